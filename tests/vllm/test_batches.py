"""A batch that is divided between two replicas, beside one replica's own answer to it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .proxy import Proxy
from .replica import Replica
from .traffic import prompt

pytestmark = pytest.mark.real

CLOSE = 2e-3
"""Log-probabilities may differ by so much: another batch beside it, another order of sums."""

GREEDY = {"model": "base", "temperature": 0, "ignore_eos": True, "max_tokens": 12, "return_token_ids": True}
IDS = [prompt(4000 + number, 60 + 7 * number) for number in range(8)]
TEXTS = [f"add {number} to 4 and you have" for number in range(8)]

BODIES: list[dict[str, Any]] = [
    {**GREEDY, "prompt": IDS, "logprobs": 2},
    {**GREEDY, "prompt": TEXTS, "logprobs": 0},
    {**GREEDY, "prompt": IDS, "logprobs": 1, "prompt_logprobs": 1},
    {**GREEDY, "prompt": TEXTS, "echo": True},
    {**GREEDY, "prompt": IDS, "n": 3, "temperature": 0.8, "seed": 9, "best_of": 3},
    {**GREEDY, "prompt": IDS[:2], "logprobs": 1, "return_tokens_as_token_ids": True},
]


def post(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return client.post("/v1/completions", json=body)


def is_like(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal, with keys in the same order, but for the last digits of fractions."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            is_like(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for at, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            is_like(mine, its, f"{where}[{at}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=CLOSE), where
    else:
        assert ours == theirs, where


def without_id(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["id"].startswith("cmpl-")
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_an_answer_is_that_of_one_server(number: int, replicas: list[Replica], serve: Callable[..., Proxy]) -> None:
    proxy = serve()
    with proxy.client() as front, replicas[0].client() as single:
        ours = post(front, BODIES[number])
        for replica in replicas:
            replica.reset()
        theirs = post(single, BODIES[number])
    assert (ours.status_code, theirs.status_code) == (200, 200), (ours.text, theirs.text)
    is_like(without_id(ours.json()), without_id(theirs.json()))
    assert set(ours.headers["x-lorafleet-replica"].split(",")) == {"0", "1"}
    assert ours.headers["content-type"] == theirs.headers["content-type"]


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    found = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    assert len({(event["id"], event["created"]) for event in found}) == 1
    return [without_id(event) for event in found]


def joined(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the events of each choice come to: how many tokens stand in one event is a matter of speed."""
    choices: dict[int, dict[str, Any]] = {}
    for event in found:
        for choice in event["choices"]:
            one = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "events": []})
            one["text"] += choice["text"]
            one["token_ids"] += choice["token_ids"]
            one["logprobs"] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
            one["finish_reason"] = choice["finish_reason"]
            one["prompt"] = one.get("prompt") or choice["prompt_token_ids"]
            one["events"] = event.get("usage")  # the last one
            one["keys"] = sorted({*one.get("keys", []), *event, *choice})
    return choices


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_stream_is_that_of_one_server(
    number: int, options: Any, replicas: list[Replica], serve: Callable[..., Proxy]
) -> None:
    body = {**BODIES[number], "stream": True, "stream_options": options}
    proxy = serve()
    with proxy.client() as front, replicas[0].client() as single:
        ours = post(front, body)
        for replica in replicas:
            replica.reset()
        theirs = post(single, body)
    assert (ours.status_code, theirs.status_code) == (200, 200), (ours.text, theirs.text)
    mine, its = events(ours.text), events(theirs.text)
    is_like(dict(sorted(joined(mine).items())), dict(sorted(joined(its).items())))
    if options is not None:
        is_like(mine[-1], its[-1])
        assert mine[-1]["choices"] == []
    assert set(ours.headers["x-lorafleet-replica"].split(",")) == {"0", "1"}
    assert ours.headers["content-type"] == theirs.headers["content-type"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [*IDS, prompt(1, 3000)]},
        {"prompt": [*IDS[:3], [999_999]]},
        {"prompt": ["", *TEXTS]},
        {"prompt": [*IDS, "x"]},
        {"prompt": [[-1], [2]]},
        {"prompt": [[1] for _ in range(1025)]},
        {"n": 0},
        {"n": None},
        {"n": 2},
        {"n": 10**9, "temperature": 1},
        {"logprobs": 1000},
        {"model": "nobody"},
        {"use_beam_search": True, "n": 2, "max_tokens": 3},
    ],
)
def test_refusals_are_those_of_one_server(
    wrong: dict[str, Any], stream: bool, replicas: list[Replica], serve: Callable[..., Proxy]
) -> None:
    body = {**GREEDY, "prompt": IDS, "stream": stream, **wrong}
    with serve().client() as front, replicas[0].client() as single:
        ours, theirs = post(front, body), post(single, body)
    assert ours.status_code == theirs.status_code
    if theirs.status_code != 200:
        assert ours.json()["error"] == theirs.json()["error"]

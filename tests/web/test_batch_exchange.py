"""Batches over real sockets: the answer of a fleet beside the answer of one replica, and what faults make of it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from proxy.control.desired import Adapter, Pause
from proxy.replica_state import Event
from proxy.simulator.embed import SimFleet
from tests.web.front import Client, Front, each_transport, front, until  # noqa: F401
from tests.web.scripted import Call, Scripted

TOKENS = [[100 * each + position for position in range(40)] for each in range(1, 9)]
TEXTS = [f"prompt {each} " * 12 for each in range(8)]
BATCH = {"model": "base", "prompt": TOKENS, "max_tokens": 6}


async def post(url: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        return await client.post(f"{url}/v1/completions", json=body, headers=headers)


def comparable(body: bytes) -> list[Any]:
    """With the order of keys; without what differs between two answers of one server."""
    answer = json.loads(body)
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    return list(answer.items())


def events(body: bytes) -> list[Any]:
    assert body.endswith(b"data: [DONE]\n\n")
    found = [json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]]
    shared = {(event.pop("id"), event.pop("created"), event["model"]) for event in found if "error" not in event}
    assert len(shared) == 1
    return found


def by_choice(found: list[Any]) -> dict[Any, list[Any]]:
    """The order of events is kept for each choice only."""
    sorted_out: dict[Any, list[Any]] = {}
    for event in found:
        key = event["choices"][0]["index"] if event.get("choices") else "end"
        sorted_out.setdefault(key, []).append(event)
    return sorted_out


def parts(it: Front) -> tuple[int, ...]:
    return it.notes.outcomes[-1].replicas


BODIES: list[dict[str, Any]] = [
    {"prompt": TOKENS},
    {"prompt": TEXTS},
    {"prompt": TOKENS[:2], "return_token_ids": True},
    {"prompt": TOKENS, "n": 3, "seed": 11, "temperature": 0.7, "return_token_ids": True, "logprobs": 2},
    {"prompt": TEXTS[:5], "n": 2, "logprobs": 0, "return_tokens_as_token_ids": True},
    {"prompt": [[1], [2], [3]], "temperature": 0, "cache_salt": "s"},
    {"prompt": TOKENS + TOKENS[:3], "best_of": 4},
]


@pytest.mark.parametrize("number", range(len(BODIES)))
@pytest.mark.parametrize("again", [False, True])
async def test_an_answer_is_that_of_one_server(number: int, again: bool) -> None:
    body = {"model": "base", "max_tokens": 6, **BODIES[number]}
    async with SimFleet(4) as sims, front(sims.urls[:3]) as it:
        for _ in range(1 + again):  # a second time from the caches
            ours, theirs = await post(it.url, body), await post(sims.urls[3], body)
        assert (ours.status_code, theirs.status_code) == (200, 200)
        assert comparable(ours.content) == comparable(theirs.content)
        assert len(set(parts(it))) > 1
        assert ours.headers["x-lorafleet-replica"] == ",".join(map(str, parts(it)))
        assert ours.headers["content-type"] == theirs.headers["content-type"]


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("number", range(len(BODIES)))
async def test_a_stream_is_that_of_one_server(number: int, options: Any) -> None:
    body = {"model": "base", "max_tokens": 6, **BODIES[number], "stream": True}
    if options is not None:
        body["stream_options"] = options
    async with SimFleet(4) as sims, front(sims.urls[:3]) as it:
        ours, theirs = await post(it.url, body), await post(sims.urls[3], body)
        assert (ours.status_code, theirs.status_code) == (200, 200)
        mine, its = events(ours.content), events(theirs.content)
        assert by_choice(mine) == by_choice(its)
        assert (mine[-1]["choices"] == []) == (options is not None)
        assert len(set(parts(it))) > 1
        assert ours.headers["content-type"] == theirs.headers["content-type"]


async def test_ids_that_the_client_gives() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        answer = await post(it.url, BATCH, {"x-request-id": "mine"})
        assert answer.json()["id"] == "cmpl-mine"
        answer = await post(it.url, {**BATCH, "request_id": "body"})
        assert answer.json()["id"] == "cmpl-body"


async def test_one_line_and_the_sums_for_whoever_counts() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        for _ in range(2):
            answer = (await post(it.url, {**BATCH, "prompt": TOKENS[:2]})).json()
        assert len(it.notes.outcomes) == 2
        outcome = it.notes.outcomes[-1]
        assert outcome.response_id == answer["id"]
        assert (outcome.attempts, outcome.status, outcome.n, sorted(outcome.replicas)) == (1, 200, 1, [0, 1])
        assert outcome.replica == outcome.replicas[0]
        assert outcome.usage is not None and outcome.decision is not None
        assert outcome.usage.prompt_tokens == answer["usage"]["prompt_tokens"] == 80
        assert outcome.usage.output_tokens == answer["usage"]["completion_tokens"] == 12
        assert outcome.usage.cached_tokens == outcome.decision.cached_tokens == 64
        assert (outcome.decision.prompt_tokens, outcome.decision.sequences) == (80, 2)
        assert [chain.size for chain in outcome.decision.chains] == [
            len(f"{','.join(map(str, p))},") for p in TOKENS[:2]
        ]
        assert outcome.decision.route == "affinity"
        assert outcome.first_byte_secs is not None
        counted = it.fleet.router.counters()
        assert counted["predicted_cached_tokens"] == counted["actual_cached_tokens"] == 64


async def test_each_replica_learns_the_outputs_of_its_parts() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        body = {**BATCH, "prompt": TOKENS[:2], "max_tokens": 30, "return_token_ids": True}
        answer = (await post(it.url, body)).json()
        longer = [prompt + answer["choices"][at]["token_ids"] + [1] for at, prompt in enumerate(TOKENS[:2])]
        again = await post(it.url, {**body, "prompt": longer})
        assert again.headers["x-lorafleet-route"] == "affinity,affinity"
        assert again.headers["x-lorafleet-predicted-cached-tokens"] == str(2 * 64)


async def test_an_unsplit_batch_passes_as_it_came() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        text = json.dumps(BATCH, indent=1).encode()
        async with httpx.AsyncClient() as client:
            await client.post(f"{it.url}/v1/completions", content=text)
        assert replica.calls[0].body == text
        outcome = it.notes.outcomes[0]
        assert outcome.replicas == ()
        assert outcome.usage is not None
        assert outcome.usage.cached_tokens is None  # it was said of the last prompt only
    await replica.stop()


async def test_a_rebound_name_and_its_digest() -> None:
    bound = Adapter("v1", "/b/v1", "sha256:" + "b" * 64, "v1@bbbbbbbbbbbb")

    def script(call: Call) -> None:
        asked = call.json()
        assert asked["model"] == bound.upstream
        if asked.get("stream"):
            call.stream()
            event = {"id": "a", "object": "o", "created": 1, "model": bound.upstream}
            for index, prompt in enumerate(asked["prompt"]):
                call.event(**event, choices=[{"index": index, "text": str(prompt)}])
            call.chunk(b"data: [DONE]\n\n")
            call.end()
        else:
            choices = [{"index": index, "text": str(prompt)} for index, prompt in enumerate(asked["prompt"])]
            call.answer({"id": "a", "model": bound.upstream, "choices": choices, "usage": None})

    replicas = [await Scripted(script).start() for _ in range(2)]
    async with front([replica.url for replica in replicas]) as it:
        it.bind(bound)
        answer = await post(it.url, {**BATCH, "model": "v1"})
        assert (answer.json()["model"], answer.headers["x-lorafleet-adapter"]) == ("v1", "v1")
        assert answer.headers["x-lorafleet-digest"] == bound.digest
        assert [choice["text"] for choice in answer.json()["choices"]] == list(map(str, TOKENS))
        streamed = await post(it.url, {**BATCH, "model": "v1", "stream": True})
        found = events(streamed.content)
        assert {event["model"] for event in found} == {"v1"}
        assert {e["choices"][0]["index"]: e["choices"][0]["text"] for e in found} == dict(enumerate(map(str, TOKENS)))
        assert all(len(replica.calls) == 2 for replica in replicas)
    for replica in replicas:
        await replica.stop()


# -- faults ------------------------------------------------------------------------------------------------------------

STREAMED = pytest.mark.parametrize("stream", [False, True])


@STREAMED
@pytest.mark.parametrize("kind", ["refuse", "reset", "crash"])
async def test_a_part_without_an_answer_is_asked_for_elsewhere(kind: str, stream: bool) -> None:
    async with SimFleet(3) as sims, front(sims.urls[:2]) as it:
        sims.replicas[1].faults.add(kind, "completion", times=1)
        sims.replicas[1].faults.add(kind, "stream", times=1)
        body = {**BATCH, "stream": stream}
        ours, theirs = await post(it.url, body), await post(sims.urls[2], body)
        assert ours.status_code == 200
        if stream:
            assert by_choice(events(ours.content)) == by_choice(events(theirs.content))
        else:
            assert comparable(ours.content) == comparable(theirs.content)
        outcome = it.notes.outcomes[0]
        assert (outcome.replicas, outcome.attempts) == ((0, 0), 2)
        assert [replica for replica, _ in it.notes.retries] == [1]


async def test_json_that_breaks_off_is_asked_for_elsewhere() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        sims.replicas[0].faults.add("reset_body", "completion", times=1)
        answer = await post(it.url, BATCH)
        assert answer.status_code == 200
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(8))
        assert it.notes.outcomes[0].replicas == (1, 1)


async def test_json_that_breaks_off_everywhere_is_one_error() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        for replica in sims.replicas:
            replica.faults.add("reset_body", "completion")
        answer = await post(it.url, BATCH)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == 502


async def test_a_stream_that_breaks_off_is_cut() -> None:
    async with SimFleet(2, decode_tps=200) as sims, front(sims.urls) as it:
        sims.replicas[0].faults.add("reset_body", "stream", times=1, after=3)
        client = await Client.connect(it)
        client.post({**BATCH, "max_tokens": 200, "stream": True})
        data = await client.rest()
        assert data.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in data
        assert not data.endswith(b"0\r\n\r\n")
        assert it.notes.outcomes[0].cut
        await until(lambda: all(not sim.state()["running"] for sim in sims.replicas))


@STREAMED
@pytest.mark.parametrize("status", [400, 500, 503])
async def test_the_first_error_is_the_answer(status: int, stream: bool) -> None:
    async with SimFleet(2, decode_tps=50) as sims, front(sims.urls) as it:
        sims.replicas[1].faults.add("error", "stream" if stream else "completion", status=status)
        answer = await post(it.url, {**BATCH, "max_tokens": 5000, "stream": stream})
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-lorafleet-replica"] == "1"
        outcome = it.notes.outcomes[0]
        assert (outcome.status, outcome.attempts, outcome.cut, outcome.left) == (status, 1, False, False)
        await until(lambda: all(not sim.state()["running"] for sim in sims.replicas))
        assert all(replica.failures == 0 for replica in it.fleet.replicas)


@STREAMED
async def test_what_the_engine_refuses_of_one_prompt_it_refuses_of_all(stream: bool) -> None:
    prompts = [*TOKENS, [151936 + 5]]
    async with SimFleet(2) as sims, front(sims.urls) as it:
        body = {**BATCH, "prompt": prompts, "stream": stream}
        ours, theirs = await post(it.url, body), await post(sims.urls[0], body)
        assert ours.status_code == theirs.status_code == 400
        assert ours.content == theirs.content


async def test_an_error_event_ends_the_stream() -> None:
    error = {"error": {"message": "EngineCore encountered an issue", "type": "x", "param": None, "code": 500}}
    other: list[Call] = []

    async def script(call: Call) -> None:
        call.stream()
        call.event(id="a", choices=[{"index": 0, "text": "x"}])
        if [first for first in call.json()["prompt"] if first == TOKENS[0]]:
            other.append(call)
            await call.hang()
        else:
            await until(lambda: other)
            call.event(**error)
            call.chunk(b"data: [DONE]\n\n")
            call.end()

    replicas = [await Scripted(script).start() for _ in range(2)]
    async with front([replica.url for replica in replicas]) as it:
        answer = await post(it.url, {**BATCH, "stream": True})
        found = answer.text.split("\n\n")
        assert (answer.status_code, found[-2:], json.loads(found[-3][6:])) == (200, ["data: [DONE]", ""], error)
        async with asyncio.timeout(20):
            await other[0].left.wait()
        assert not it.notes.outcomes[0].cut
    for replica in replicas:
        await replica.stop()


async def test_garbage_is_one_error_and_nobodys_fault() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        sims.replicas[0].faults.add("garbage", "completion")
        answer = await post(it.url, BATCH)
        assert answer.status_code == 502
        assert "cannot be read" in answer.json()["error"]["message"]
        assert all(replica.failures == 0 for replica in it.fleet.replicas)


@pytest.mark.parametrize("media", ["text/html", "text/event-stream", "application/json"])
@pytest.mark.parametrize("line", ["x-nothing: 1", "content-encoding: gzip"])
async def test_answers_that_do_not_fit_together(media: str, line: str) -> None:
    first = await Scripted(lambda call: call.answer(b"data: [DONE]\n\n", 200, line, media=media)).start()
    async with SimFleet(1) as sims, front([*sims.urls, first.url]) as it:
        answer = await post(it.url, BATCH)
        assert answer.status_code == 502
        assert all(replica.failures == 0 for replica in it.fleet.replicas)
        assert first.calls[0].header("accept-encoding") == []
    await first.stop()


@STREAMED
async def test_a_client_that_leaves_while_a_part_hangs(stream: bool) -> None:
    async with SimFleet(3, decode_tps=100) as sims, front(sims.urls) as it:
        hung = sims.replicas[2].faults.add("hang", "stream" if stream else "completion")
        client = await Client.connect(it)
        client.post({**BATCH, "max_tokens": 20_000, "stream": stream})
        await until(lambda: hung.hits and all(sim.state()["running"] for sim in sims.replicas[:2]))
        client.leave()
        await until(it.at_rest)
        await until(lambda: not any(sim.state()["running"] for sim in sims.replicas))
        await until(lambda: it.notes.outcomes)
        assert (it.notes.outcomes[0].left, it.notes.departures) == (True, ["asked"])
        assert all(replica.failures == 0 for replica in it.fleet.replicas)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_dies_unnoticed(stream: bool) -> None:
    """It hangs; the health check tells the part that waits for it."""
    async with SimFleet(2) as sims, front(sims.urls) as it:
        sims.replicas[1].faults.add("hang", "any")
        asked = asyncio.create_task(post(it.url, {**BATCH, "stream": stream}))
        await until(lambda: sims.replicas[1].faults.active[0].hits)
        it.fleet.apply(1, Event.PROBE_FAILED, "gone")
        answer = await asked
        assert answer.status_code == 200
        assert it.notes.outcomes[0].replicas == (0, 0)


# -- names, pauses, waiting --------------------------------------------------------------------------------------------


async def test_a_batch_waits_for_the_end_of_a_pause() -> None:
    async with SimFleet(2) as sims, front(sims.urls) as it:
        it.commit(it.fleet.desired.with_pause(Pause("mode=keep", 0.0)))
        asked = asyncio.create_task(post(it.url, BATCH))
        await until(lambda: it.notes.now_waiting == 1)
        assert not any(sim.calls.get("completion") for sim in sims.replicas)
        it.commit(it.fleet.desired.with_pause(None))
        assert (await asked).status_code == 200
        assert len(it.notes.outcomes[0].replicas) == 2


@STREAMED
async def test_parts_asked_again_keep_their_version(stream: bool) -> None:
    """`-latest` moves on while a part is asked for again: the old version still answers, on all."""
    old, new = Adapter("p-v1", "/a/1", None, "p-v1", order=1), Adapter("p-v2", "/a/2", None, "p-v2", order=2)
    asked: list[str] = []

    async def script(call: Call) -> None:
        asked.append(call.json()["model"])
        if len(asked) == 1:
            it.bind(new)
            call.reset()
            return
        prompts = call.json()["prompt"]
        if stream:
            call.stream()
            for index, _ in enumerate(prompts):
                call.event(id="a", model=call.json()["model"], choices=[{"index": index, "text": "x"}])
            call.chunk(b"data: [DONE]\n\n")
            call.end()
            return
        choices = [{"index": index} for index, _ in enumerate(prompts)]
        call.answer({"id": "a", "model": call.json()["model"], "choices": choices})

    replicas = [await Scripted(script).start() for _ in range(3)]
    async with front([replica.url for replica in replicas]) as it:
        it.bind(old)
        answer = await post(it.url, {**BATCH, "model": "p-latest", "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-lorafleet-adapter"] == "p-v1"
        assert asked == ["p-v1"] * 4
        assert (await post(it.url, {**BATCH, "model": "p-latest"})).headers["x-lorafleet-adapter"] == "p-v2"
    for replica in replicas:
        await replica.stop()


@STREAMED
@pytest.mark.parametrize("gone", [False, True])
async def test_weights_that_changed_meanwhile_are_not_mixed(gone: bool, stream: bool) -> None:
    """All of it is asked for again: by the new weights, or it is known then that there are none."""
    old, new = Adapter("v1", "/a/1", None, "v1"), Adapter("v1", "/b/1", None, "v1@b")
    asked: list[str] = []

    async def script(call: Call) -> None:
        model = call.json()["model"]
        asked.append(model)
        if len(asked) == 1:
            it.commit(it.fleet.desired.unbind("v1")) if gone else it.bind(new)
            call.reset()
        elif model == "v1":
            await call.hang()
        else:
            choices = [{"index": index} for index, _ in enumerate(call.json()["prompt"])]
            if stream:
                call.stream()
                call.event(id="a", model=model, choices=choices)
                call.chunk(b"data: [DONE]\n\n")
                call.end()
            else:
                call.answer({"id": "a", "model": model, "choices": choices})

    replicas = [await Scripted(script).start() for _ in range(2)]
    async with front([replica.url for replica in replicas]) as it:
        it.bind(old)
        answer = await post(it.url, {**BATCH, "model": "v1", "stream": stream})
        assert answer.status_code == (404 if gone else 200)
        assert asked[:2] == ["v1", "v1"]
        assert set(asked[2:]) == (set() if gone else {"v1@b"})
        assert gone or answer.text.count('"index":') == 8
    for replica in replicas:
        await replica.stop()


async def test_a_slow_client_holds_back_the_replicas() -> None:
    """What the proxy holds for a client that does not read is bounded, however much the replicas have to say."""
    written = [0, 0]
    text = "x" * 50_000

    async def script(call: Call) -> None:
        number = replicas.index(next(each for each in replicas if call in each.calls))
        call.stream()
        for _ in range(2000):
            call.event(id="a", choices=[{"index": 0, "text": text}])
            try:
                await call.drain()
            except ConnectionError:
                break
            written[number] += 1

    replicas = [await Scripted(script).start() for _ in range(2)]
    async with front([replica.url for replica in replicas]) as it:
        client = await Client.connect(it)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.post({**BATCH, "stream": True})
        await until(lambda: all(written))
        before = [-1, -1]
        while before != written:
            before = list(written)
            await asyncio.sleep(0.3)
        assert max(written) < 600  # 30 MB in sockets' buffers at the very most, of 100
        client.reset()
        await until(it.at_rest)
    for replica in replicas:
        await replica.stop()


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        None,
        "",
        {},
        7,
        [None, None],
        ["a", 1],
        [[1, 2], "a"],
        [[[1]], [[2]]],
        [[], []],
        ["", ""],
        [[1.5], [2]],
        [[-1], [2]],
        [[1, "a"], [2]],
        [True, False],
        [[1]] * 1023,
        [[1]] * 10_000,
        [[each] for each in range(10_000)],
    ],
)
async def test_hostile_prompts_are_answered_as_by_one_server(prompt: Any) -> None:
    async with SimFleet(3) as sims, front(sims.urls[:2]) as it:
        body = {"model": "base", "prompt": prompt, "max_tokens": 1}
        ours, theirs = await post(it.url, body), await post(sims.urls[2], body)
        assert ours.status_code == theirs.status_code
        if ours.status_code == 200:
            assert comparable(ours.content) == comparable(theirs.content)
        assert all(replica.failures == 0 for replica in it.fleet.replicas)


@pytest.mark.parametrize(
    "fields",
    [{"n": 10**9}, {"n": 0}, {"n": -1}, {"n": "x"}, {"n": 2, "temperature": 0}, {"max_tokens": 10**9}, {"stream": "x"}],
)
async def test_hostile_fields_are_answered_as_by_one_server(fields: dict[str, Any]) -> None:
    async with SimFleet(3) as sims, front(sims.urls[:2]) as it:
        body = {**BATCH, **fields}
        ours, theirs = await post(it.url, body), await post(sims.urls[2], body)
        assert ours.status_code == theirs.status_code == 400
        assert ours.content == theirs.content


@STREAMED
async def test_clients_that_leave_at_any_moment(stream: bool) -> None:
    """Whatever a request waits for when its client leaves, nothing is left behind."""
    order = random.Random(5)
    async with SimFleet(3, decode_tps=2000, prefill_tps=20_000) as sims, front(sims.urls) as it:

        async def one() -> None:
            client = await Client.connect(it)
            client.post({**BATCH, "max_tokens": order.randrange(1, 60), "stream": stream, "n": order.randrange(1, 3)})
            await asyncio.sleep(order.random() * 0.05)
            order.choice([client.leave, client.reset])()

        for _ in range(6):
            order.choice(sims.replicas).faults.add("reset", "any", times=2)
            await asyncio.gather(*[one() for _ in range(20)])
        for sim in sims.replicas:
            sim.faults.clear()
        await until(it.at_rest)
        await until(lambda: not any(sim.state()["running"] for sim in sims.replicas))
        for index in range(3):
            it.ready(index)
        assert (await post(it.url, BATCH)).status_code == 200

"""--verify-load and `<name>-latest` on real vLLM: real log-probabilities, real adapters."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .proxy import Proxy
from .replica import Replica
from .test_publish import mount, seen, state
from .traffic import complete, prompt, session

pytestmark = pytest.mark.real

PROMPT = prompt(31, 100)
VERIFIED = ("--verify-load", "--pause", "lazy", "--policy", "round_robin")


async def test_right_weights_are_proven(replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path) -> None:
    """Also under TRL's pause, which is a lazy one, and for an adapter that changes nothing, as a run's first is."""
    proxy = serve(*VERIFIED)
    assert proxy.load("trl-policy-v1", adapters / "zero").status_code == 200
    assert proxy.post("/pause", mode="keep").status_code == 200
    assert proxy.load("trl-policy-v2", adapters / "v2").status_code == 200
    assert proxy.post("/resume").status_code == 200
    kinds = [row["phases"] for row in proxy.fleet()["transactions"] if row["kind"] == "load"]
    assert all("verify" in [phase["name"] for phase in phases] for phases in kinds)
    async with session() as client:
        first = [await complete(client, proxy.url, "trl-policy-v1", PROMPT) for _ in range(2)]
        base = await complete(client, proxy.url, "base", PROMPT)
        second = [await complete(client, proxy.url, "trl-policy-v2", PROMPT) for _ in range(2)]
    assert [answer.replica for answer in first] != [answer.replica for answer in second[:1]] * 2
    assert {answer.tokens for answer in first} == {base.tokens}
    assert len({answer.tokens for answer in second}) == 1 and second[0].tokens != base.tokens


@pytest.mark.parametrize("wrong", ["v3", "zero"], ids=["other weights", "no effect"])
async def test_a_replica_with_other_weights_is_found_out(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path, wrong: str
) -> None:
    """The same path leads to another directory on one replica, which is asked last, and loads it without complaint."""
    proxy = serve(*VERIFIED)
    assert proxy.load("trl-policy-v1", adapters / "v1").status_code == 200
    before = state(proxy, replicas)
    shutil.copytree(adapters / "v2", mount(replicas[0], "two-minds"))
    shutil.copytree(adapters / wrong, mount(replicas[1], "two-minds"))
    refused = proxy.load("trl-policy-v2", seen("two-minds"))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (502, 502)
    assert "replicas answer with different weights under the new name" in error["message"]
    assert [row["replica"] for row in error["replicas"]] == [0, 1]
    said = [row["message"] for row in error["replicas"]]
    assert said[0] != said[1] and all("log-probabilities [" in message for message in said)
    assert not any(str(replica.port) in refused.text for replica in replicas)
    assert state(proxy, replicas) == before

    shutil.rmtree(mount(replicas[1], "two-minds"), ignore_errors=True)
    shutil.copytree(adapters / "v2", mount(replicas[1], "two-minds"))
    assert proxy.load("trl-policy-v2", seen("two-minds")).status_code == 200
    async with session() as client:
        answers = [await complete(client, proxy.url, "trl-policy-v2", PROMPT) for _ in range(2)]
    assert {answer.replica for answer in answers} == {"0", "1"}
    assert len({answer.tokens for answer in answers}) == 1


async def test_latest_is_the_newest_committed_version(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path
) -> None:
    proxy = serve("--policy", "round_robin")
    answered = {}
    async with session() as client:
        for number in (1, 2, 3):
            assert proxy.load(f"trl-policy-v{number}", adapters / f"v{number}").status_code == 200
            latest = [await complete(client, proxy.url, "trl-policy-latest", PROMPT) for _ in range(2)]
            assert [answer.model for answer in latest] == [f"trl-policy-v{number}"] * 2
            named = await complete(client, proxy.url, f"trl-policy-v{number}", PROMPT)
            assert {answer.tokens for answer in latest} == {named.tokens}
            answered[number] = named.tokens
        refused = proxy.load("trl-policy-v4", adapters / "rank16")
        assert refused.status_code >= 400
        answer = await complete(client, proxy.url, "trl-policy-latest", PROMPT)
        assert (answer.model, answer.tokens) == ("trl-policy-v3", answered[3])
        assert proxy.unload("trl-policy-v3").status_code == 200
        answer = await complete(client, proxy.url, "trl-policy-latest", PROMPT)
        assert (answer.model, answer.tokens) == ("trl-policy-v2", answered[2])
        whole = proxy.post("/v1/completions", {"model": "trl-policy-latest", "prompt": PROMPT, "max_tokens": 1})
    assert whole.headers["x-lorafleet-adapter"] == "trl-policy-v2"
    assert len(set(answered.values())) == 3

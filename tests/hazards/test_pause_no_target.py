"""A broadcast that reached nobody is an error, never a success (verl-omni #433)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rig import quick, rig  # noqa: F401

CALLS = (
    ("/pause?mode=keep", None),
    ("/resume", None),
    ("/reset_prefix_cache", None),
    ("/abort_requests", {}),
    ("/sleep", None),
    ("/wake_up", None),
)


@pytest.mark.parametrize("count", [1, 2])
async def test_everybody_is_down(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.control.asking.READY_WAIT_SECS", 0.2)
    async with rig(count, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        for replica in it.replicas:
            replica.refuse()
        await it.until(lambda: not it.parts.fleet.ready(), "seen to be down")
        calls = [*CALLS, ("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": str(it.library.path(2))})]
        for target, body in [*calls, ("/v1/unload_lora_adapter", {"lora_name": "a"})]:
            answer = await it.ask("POST", target, body)
            assert answer.status == 503, (target, answer.text)
            assert answer.json()["error"]["code"] == 503
            assert "retry-after" in answer.headers
        assert (await it.ask("GET", "/health")).status == 503
        for index in range(count):
            await it.sims.start(index)
        await it.check()


@pytest.mark.parametrize(("target", "body"), CALLS)
async def test_everybody_goes_down_during_the_call(target: str, body: object, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        if target.startswith(("/resume", "/wake_up")):
            assert (await it.ask("POST", "/pause" if target == "/resume" else "/sleep")).ok
        for replica in it.replicas:
            replica.refuse()
        answer = await it.ask("POST", target, body)
        assert answer.status in (502, 503), answer.text
        for index in range(2):
            await it.sims.start(index)
        it.paused = target == "/resume"
        if target == "/wake_up":
            await it.settle()
            assert (await it.ask("POST", "/wake_up")).ok
        await it.check()

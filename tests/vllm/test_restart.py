"""kill -9 of one of two replicas during a TRL run: the run ends as if nothing had happened."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .proxy import Proxy
from .recorder import Recorder
from .replica import Replica
from .training import train

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]

STEPS, DEATH, RETURN = 8, 2, 5  # the trainer waits after so many steps for the replica to die, and to be back


async def test_a_replica_is_killed_and_comes_back(
    replicas: list[Replica], serve: Callable[..., Proxy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, victim = serve(), replicas[1]
    async with Recorder(proxy.url) as recorder:
        training = asyncio.create_task(
            train(
                recorder.url,
                tmp_path / "out",
                steps=STEPS,
                hold_at=f"{DEATH} {RETURN}",
                hold_dir=tmp_path,
                limit_secs=400,
            )
        )
        await until(training, lambda: len(recorder.of("/v1/load_lora_adapter")) == DEATH + 1)
        await until(training, lambda: victim.counter("vllm:num_requests_running") > 0)
        victim.kill()
        killed = time.monotonic()
        await until(training, lambda: member(proxy, 1)["state"] != "ready")
        away = time.monotonic()
        (tmp_path / str(DEATH)).touch()
        await until(training, lambda: len(recorder.of("/v1/load_lora_adapter")) == RETURN + 1)  # published without it
        victim.start()
        await until(training, lambda: member(proxy, 1)["state"] == "ready")
        back = time.monotonic()
        (tmp_path / str(RETURN)).touch()
        await until(
            training, lambda: any(c.headers.get("x-lorafleet-replica") == "1" for c in served(recorder, since=back))
        )
        run = await training

    assert run.adapter_sync and run.version == STEPS + 1
    assert all(0.95 <= ratio <= 1.05 for ratio in run.values("ratio")), run.values("ratio")
    assert not run.values("rollout/vllm_retry_total"), "TRL saw completions fail"
    assert {call.status for call in served(recorder)} == {200}
    control = [call for call in recorder.calls if call.method == "POST" and call.path != "/v1/completions"]
    assert {call.status for call in control} == {200}
    assert replicas[0].adapters() == victim.adapters() != {}
    assert sorted(proxy.listed()) == sorted(f"trl-policy-v{STEPS + 1 - age}" for age in range(3))
    with capsys.disabled():
        print(f"\nkilled: not routable after {away - killed:.2f} s; back after {back - killed:.1f} s with all adapters")


def member(proxy: Proxy, index: int) -> dict:
    return proxy.fleet()["replicas"][index]


def served(recorder: Recorder, since: float = 0.0) -> list:
    """Completions sent after `since`, but for those that the trainer itself broke off at its end."""
    return [call for call in recorder.of("/v1/completions") if call.started >= since and call.status]


async def until(training: asyncio.Task, true: Callable[[], bool]) -> None:
    """Waits for a condition while the training goes on."""
    while not await asyncio.to_thread(true):
        if training.done():
            training.result()
            raise AssertionError("the training ended too early for what it should show")
        await asyncio.sleep(0.1)

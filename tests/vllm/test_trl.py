"""TRL's own AsyncGRPOTrainer through the proxy, twice on the same fleet and in the same output directory.

The second run numbers its policies from v1 again: the fleet meets names that it knows, at paths that it knows, with
other weights behind them.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from .proxy import Proxy
from .recorder import Call, Recorder
from .replica import Replica
from .traffic import complete, session
from .training import Training, train

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

STEPS, STALENESS = 6, 2
SYNC = ["/pause", "/v1/load_lora_adapter", "/resume", "/v1/unload_lora_adapter"]


async def test_two_runs_of_six_steps(
    replicas: list[Replica], serve: Callable[..., Proxy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = serve()
    for seed in (1, 2):
        async with Recorder(proxy.url) as recorder:
            run = await train(recorder.url, tmp_path / "out", steps=STEPS, staleness=STALENESS, seed=seed)
        with capsys.disabled():
            print(summary(seed, run, recorder))
        check_training(run)
        check_control_calls(recorder)
        check_completions(recorder)
        await asyncio.to_thread(check_fleet, proxy, replicas)
        await check_weights(proxy, replicas, recorder.of("/v1/completions")[-1].body["prompt"], seed)


def check_training(run: Training) -> None:
    assert run.adapter_sync
    assert run.version == STEPS + 1  # the untrained policy is v1
    ratios = run.values("ratio")
    assert len(ratios) == STEPS
    assert all(0.95 <= ratio <= 1.05 for ratio in ratios), ratios
    assert not run.values("rollout/vllm_retry_total")


def check_control_calls(recorder: Recorder) -> None:
    """Every sync went pause, load, resume and later unload, and every answer was 200."""
    control = sorted((call for call in recorder.calls if call.path in SYNC), key=lambda call: call.started)
    expected = []
    for version in range(1, STEPS + 2):
        expected += [(path, 200) for path in (SYNC if version > STALENESS + 1 else SYNC[:3])]
    assert [(call.path, call.status) for call in control] == expected
    loaded = [call.adapter for call in recorder.of("/v1/load_lora_adapter")]
    assert loaded == [f"trl-policy-v{version}" for version in range(1, STEPS + 2)]


def check_completions(recorder: Recorder) -> None:
    """Each names the policy that was newest when it was sent, and is answered under that very name.

    TRL moves to a new version a moment after its load was answered, so the one before is current until then too.
    """
    loads = recorder.of("/v1/load_lora_adapter")
    completions = [call for call in recorder.of("/v1/completions") if call.status]
    assert len(completions) >= STEPS * 8
    for call in completions:
        newest = sum(load.ended <= call.started for load in loads)
        assert call.model in {f"trl-policy-v{newest}", f"trl-policy-v{newest - 1}"}
        assert (call.status, call.answer.get("model")) == (200, call.model), call.answer
        assert call.headers["x-lorafleet-adapter"] == call.model
    assert {call.headers["x-lorafleet-replica"] for call in completions} == {"0", "1"}


def check_fleet(proxy: Proxy, replicas: list[Replica]) -> None:
    held = [replica.adapters() for replica in replicas]
    assert held[0] == held[1] and len(held[0]) == STALENESS + 1
    assert sorted(proxy.listed()) == [f"trl-policy-v{version}" for version in range(STEPS - 1, STEPS + 2)]
    assert proxy.get("/is_paused") == {"is_paused": False}
    for replica in replicas:
        with replica.client() as client:
            assert client.get("/is_paused").json() == {"is_paused": False}
    assert [member["in_flight"] for member in proxy.fleet()["replicas"]] == [0, 0]


async def check_weights(proxy: Proxy, replicas: list[Replica], ids: list[int], seed: int) -> None:
    """The newest name answers as the same files do under a name that was never used."""
    name = f"trl-policy-v{STEPS + 1}"
    path = next(adapter["path"] for adapter in proxy.fleet()["adapters"] if adapter["name"] == name)
    fresh = f"never-used-{seed}"
    with replicas[0].client() as client:
        client.post("/v1/load_lora_adapter", json={"lora_name": fresh, "lora_path": path}).raise_for_status()
    async with session(replicas[0].token) as direct, session() as client:
        expected = await complete(direct, replicas[0].url, fresh, ids)
        answer = await complete(client, proxy.url, name, ids)
    with replicas[0].client() as client:
        client.post("/v1/unload_lora_adapter", json={"lora_name": fresh}).raise_for_status()
    assert (answer.model, answer.tokens) == (name, expected.tokens)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def summary(seed: int, run: Training, recorder: Recorder) -> str:
    syncs, ratios = sorted(run.values("perf/weight_sync_s")), run.values("ratio")
    calls: list[Call] = recorder.of("/v1/completions")
    return (
        f"\nTRL run {seed}: {len(calls)} completions, importance ratio {min(ratios):.4f} to {max(ratios):.4f}, "
        f"weight sync median {syncs[len(syncs) // 2]:.3f} s, max {syncs[-1]:.3f} s"
    )

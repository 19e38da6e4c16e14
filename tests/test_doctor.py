"""The doctor's questions, against simulated replicas."""

from __future__ import annotations

from pathlib import Path

from proxy.doctor import diagnose
from proxy.simulator.adapters import write_adapter
from proxy.simulator.embed import SimFleet
from proxy.upstream.transport import Endpoint


async def test_a_fit_fleet_and_nothing_left_behind(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 1)
    async with SimFleet(2, api_key="canary", require_token_everywhere=True) as fleet:
        endpoints = [Endpoint(url, lambda: "canary") for url in fleet.urls]
        lines = await diagnose(endpoints, adapter=str(tmp_path / "a"), max_staleness=2, rank=8)
        assert [line for line in lines if line.level != "ok"] == []
        assert "canary" not in repr(lines)
        assert [list(replica.replica.loras) for replica in fleet.replicas] == [[], []]


async def test_what_is_wrong_with_an_unfit_one(tmp_path: Path) -> None:
    write_adapter(tmp_path / "old", 1)
    each = [
        {"api_key": "k", "require_token_everywhere": True},
        {"dev_mode": False, "runtime_lora": False},
        {"max_loras": 2, "data_parallel_size": 2, "dtype": "torch.float16"},
    ]
    async with SimFleet(each=each) as fleet:
        endpoints = [Endpoint(url) for url in [*fleet.urls, "http://127.0.0.1:9"]]
        lines = await diagnose(endpoints, adapter=str(tmp_path / "missing"), max_staleness=2, rank=None)
    failed = {(line.replica, line.what) for line in lines if line.level == "fail"}
    assert (0, "token") in failed
    assert {(1, "dev endpoints"), (1, "runtime LoRA updating")} <= failed
    assert {(2, "max_loras"), (2, "data_parallel_size"), (2, "probe adapter")} <= failed
    assert (3, "reachable") in failed

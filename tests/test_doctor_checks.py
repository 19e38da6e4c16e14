"""Each thing that makes a fleet unfit is found, said in one line, and comes with its mend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.control.facts import Facts
from proxy.doctor_checks import Examined, compare, examine

FACTS = Facts(("base",), "/m", 4096, "0.27.1", 16, 65536, 4, 16, 1, "torch.bfloat16")
FIT = Examined(
    0,
    reachable=True,
    models_status=200,
    without_token=401,
    token_sent=True,
    facts=FACTS,
    server_info=200,
    is_paused=False,
    paused_status=200,
    load_route=400,
    probe="",
    looks=6,
    engines=6,
)


def test_a_fit_replica_has_no_complaint() -> None:
    assert {line.level for line in examine(FIT, 2, 16)} == {"ok"}


@pytest.mark.parametrize(
    ("change", "what", "level"),
    [
        ({"reachable": False, "error": "connection refused"}, "reachable", "fail"),
        ({"models_status": 401}, "token", "fail"),
        ({"facts": None, "models_status": 404}, "models", "fail"),
        ({"load_route": 404}, "runtime LoRA updating", "fail"),
        ({"server_info": 404}, "dev endpoints", "fail"),
        ({"paused_status": 404}, "dev endpoints", "fail"),
        ({"facts": replace(FACTS, max_loras=3)}, "max_loras", "fail"),
        ({"facts": replace(FACTS, max_loras=None)}, "LoRA", "fail"),
        ({"facts": replace(FACTS, max_lora_rank=8)}, "max_lora_rank", "fail"),
        ({"facts": replace(FACTS, data_parallel_size=2)}, "data_parallel_size", "fail"),
        ({"facts": replace(FACTS, version="0.22.1")}, "version", "fail"),
        ({"facts": replace(FACTS, version="0.25.0")}, "version", "warn"),
        ({"facts": replace(FACTS, version="dev")}, "version", "warn"),
        ({"is_paused": True}, "paused", "warn"),
        ({"adapters": ("trl-policy-v9",)}, "leftovers", "warn"),
        ({"probe": None}, "probe adapter", "warn"),
        ({"probe": "/x: it does not see the directory"}, "probe adapter", "fail"),
        ({"engines": 3}, "one server", "fail"),
    ],
)
def test_each_fault_is_found_with_its_mend(change: dict[str, object], what: str, level: str) -> None:
    found = [line for line in examine(replace(FIT, **change), 2, 16) if line.level != "ok"]  # type: ignore[arg-type]
    assert [(line.what, line.level) for line in found] == [(what, level)]
    assert all(line.fix for line in found)


@pytest.mark.parametrize(
    ("facts", "what", "level"),
    [
        (replace(FACTS, base_models=("other",)), "same base model", "fail"),
        (replace(FACTS, dtype="torch.float16"), "same dtype", "fail"),
        (replace(FACTS, max_model_len=1), "same max_model_len", "fail"),
        (replace(FACTS, block_size=32), "same block size", "warn"),
        (replace(FACTS, version="0.32.0"), "same version", "warn"),
    ],
)
def test_what_differs_between_replicas(facts: Facts, what: str, level: str) -> None:
    odd = [line for line in compare([FIT, replace(FIT, replica=1, facts=facts)]) if line.level != "ok"]
    assert [(line.what, line.level) for line in odd] == [(what, level)]
    assert "replica 1" in odd[0].detail

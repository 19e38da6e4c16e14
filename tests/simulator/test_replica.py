import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.simulator import ReplicaOptions, read_adapter
from proxy.simulator.replica import LoadRefused, Replica


def replica(**options: object) -> Replica:
    made = Replica(ReplicaOptions(**options))  # type: ignore[arg-type]
    made.boot()
    return made


async def test_ids_are_new_for_each_load(adapters: Callable[[int], Path]) -> None:
    made = replica()
    await made.load("v1", str(adapters(1)))
    assert made.unload("v1") and not made.unload("v1")
    await made.load("v1", str(adapters(2)))
    assert (made.loras["v1"].int_id, len(made.slots.held)) == (2, 2)
    await made.load("v1", str(adapters(1)), inplace=True)
    assert (made.loras["v1"].int_id, made.loras["v1"].load_inplace) == (2, True)


async def test_refusals(tmp_path: Path, adapters: Callable[[int], Path]) -> None:
    made = replica(max_lora_rank=4)
    for name, path, status in (
        ("", "/x", 400),
        ("v1", "", 400),
        ("v1", "/nowhere", 404),
        ("v1", str(adapters(1)), 500),
    ):
        with pytest.raises(LoadRefused) as refusal:
            await made.load(name, path)
        assert refusal.value.status == status
    assert made.loras == {}


async def test_loads_of_one_name_do_not_overlap(adapters: Callable[[int], Path]) -> None:
    made = replica(load_secs=0.01)
    results = await asyncio.gather(*(made.load("v1", str(adapters(1))) for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(result, LoadRefused) for result in results) == 2


async def test_a_boot_forgets_the_process_and_keeps_the_records(adapters: Callable[[int], Path]) -> None:
    made = replica()
    await made.load("v1", str(adapters(1)))
    made.record("load", {"authorization": "Bearer t"})
    assert made.state()["adapters"]["v1"]["weights"] == read_adapter(str(adapters(1))).weights
    made.boot()
    state = made.state()
    assert (state["boots"], state["adapters"], state["slots"]["held"]) == (2, {}, [])
    assert state["calls"] == {"load": 1} and state["headers"]["load"]["authorization"] == "Bearer t"


async def test_old_records_are_dropped() -> None:
    made = replica()
    for number in range(2500):
        made.record("load", {"n": str(number)})
    assert len(made.all_headers) <= 1000 and made.all_headers[-1] == {"n": "2499"}


async def test_pretended_loads_answer_as_base() -> None:
    made = replica(base_weights="other base")
    made.pretend_load("v1", "/nowhere")
    assert made.slots.activate(made.loras["v1"], True) == "other base"

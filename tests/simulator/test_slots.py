import pytest

from proxy.simulator.slots import AdapterSlots, LoraRef, NamedWeights


def ref(number: int, inplace: bool = False) -> LoraRef:
    return LoraRef(f"v{number}", number, f"/adapters/v{number}", inplace)


def slots_of(cpu: int, active: int) -> tuple[AdapterSlots, list[str]]:
    reads: list[str] = []

    def read(lora: LoraRef) -> str:
        reads.append(lora.name)
        if lora.path.endswith("broken"):
            raise ValueError("broken")
        return f"{lora.name}@{len(reads)}"

    return AdapterSlots(read, max_loras=active, max_cpu_loras=cpu), reads


def test_held_adapters_are_not_read_again() -> None:
    slots, reads = slots_of(2, 1)
    assert [slots.activate(ref(1), True), slots.activate(ref(1), False), slots.activate(ref(1), True)] == ["v1@1"] * 3
    assert reads == ["v1"]


def test_the_least_recently_used_one_goes_and_comes_back_from_disk() -> None:
    slots, reads = slots_of(2, 2)
    for number in (1, 2, 1, 3):
        slots.activate(ref(number), True)
    assert [name for name, _ in slots.held.values()] == ["v1", "v3"]
    assert slots.activate(ref(2), True) == "v2@4"
    assert (reads, slots.evictions) == (["v1", "v2", "v3", "v2"], 2)


def test_a_broken_adapter_costs_nobody_a_slot() -> None:
    slots, _ = slots_of(1, 1)
    slots.activate(ref(1), True)
    with pytest.raises(ValueError, match="broken"):
        slots.activate(LoraRef("v2", 2, "/adapters/broken"), True)
    assert list(slots.held) == [1]


def test_load_inplace_reads_at_every_request() -> None:
    slots, reads = slots_of(2, 2)
    sticky = ref(1, inplace=True)
    assert [slots.activate(sticky, fresh) for fresh in (True, True, False)] == ["v1@1", "v1@2", "v1@2"]
    assert reads == ["v1", "v1"]


def test_active_ones_are_a_subset() -> None:
    slots, _ = slots_of(4, 2)
    for number in (1, 2, 3):
        slots.activate(ref(number), True)
    assert (list(slots.held), list(slots.active)) == ([1, 2, 3], [2, 3])


def test_weights_without_files() -> None:
    assert NamedWeights().activate(ref(1), True) == "weights of v1"

"""Dividing a batch."""

from tests.routing.helpers import ask, ids, request, router


def positions(parts: list[tuple[int, list[int]]]) -> list[int]:
    return sorted(position for _, part in parts for position in part)


def test_prompts_go_where_they_are_held() -> None:
    it = router()
    held = {ask(it, request(ids(300, seed))).replica: seed for seed in range(8)}
    parts = it.split(request(*(ids(300, seed) for seed in held.values())), "m", range(4), 0.0)
    assert {replica: len(part) for replica, part in parts} == dict.fromkeys(held, 1)
    seeds = list(held.values())
    for replica, part in parts:
        assert held[replica] == seeds[part[0]]


def test_new_prompts_are_spread_evenly_and_equal_ones_stay_together() -> None:
    it = router()
    batch = [ids(300, seed) for seed in range(16)]
    parts = it.split(request(*batch), "m", range(4), 0.0)
    assert positions(parts) == list(range(16))
    assert max(len(part) for _, part in parts) == 4
    twice = it.split(request(batch[0], batch[1], batch[0], batch[1]), "m", range(4), 0.0)
    assert all(len({position % 2 for position in part}) == 1 for _, part in twice)


def test_one_prompt_or_one_candidate_is_not_divided() -> None:
    it = router()
    assert it.split(request(ids(300, 1)), "m", range(4), 0.0) == []
    assert it.split(request(ids(300, 1), ids(300, 2)), "m", [3], 0.0) == []


def test_other_policies_divide_evenly() -> None:
    it = router(policy="least_loaded")
    parts = it.split(request(*(ids(50, seed) for seed in range(6))), "m", range(4), 0.0)
    assert positions(parts) == list(range(6))
    assert sorted(len(part) for _, part in parts) == [1, 1, 2, 2]


def test_nothing_is_recorded() -> None:
    it = router()
    it.split(request(ids(300, 1), ids(300, 2)), "m", range(4), 0.0)
    assert it.counters()["blocks"] == 0

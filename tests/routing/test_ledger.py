"""Placements are counted, forgotten slowly, and a newcomer is not flooded."""

from proxy.routing.ledger import WINDOW, Ledger


def ledger(replicas: int) -> Ledger:
    it = Ledger()
    for slot in range(replicas):
        it.open(slot, range(slot))
    return it


def test_the_mean_settles_at_the_window() -> None:
    it = ledger(4)
    for turn in range(2000):
        it.count(turn % 4, 1.0, 4)
    assert abs(it.mean(range(4)) - WINDOW) < 1.0
    assert max(it.had(slot) for slot in range(4)) - min(it.had(slot) for slot in range(4)) < 1.5


def test_a_newcomer_begins_with_the_mean() -> None:
    it = ledger(2)
    for turn in range(40):
        it.count(turn % 2, 1.0, 2)
    it.open(2, (0, 1))
    assert abs(it.had(2) - it.mean((0, 1))) < 1e-9


def test_slow_replicas_fill_up_sooner() -> None:
    it = ledger(2)
    it.count(0, 2.0, 2)
    it.count(1, 1.0, 2)
    assert it.had(0) > it.had(1) and it.least((0, 1)) == 1


def test_numbers_stay_in_range() -> None:
    it = ledger(1)
    for _ in range(20_000):
        it.count(0, 1.0, 1)
    assert 0.0 < it.had(0) < 2 * WINDOW


def test_others_are_noticed_and_forgotten() -> None:
    it = ledger(2)
    for _ in range(30):
        it.answered(surprise=False)
    assert not it.shared
    it.answered(surprise=True)
    assert not it.shared  # once may be chance
    it.answered(surprise=True)
    assert it.shared
    for _ in range(40):
        it.answered(surprise=False)
    assert not it.shared

from __future__ import annotations

from proxy.control.roster import Roster

A, B, C, D = "http://a", "http://b", "http://c", "http://d"


def members(roster: Roster, *named: str) -> set[str]:
    roster = roster.at_start(named)
    return {*named, *roster.added} - roster.removed


def test_who_was_added_comes_back() -> None:
    roster = Roster().join(C).join(D)
    assert roster.at_start([A, B]) == Roster(added=(C, D))
    assert members(roster, A, B) == {A, B, C, D}


def test_who_is_named_now_is_the_command_lines() -> None:
    roster = Roster().join(C).at_start([A, C])
    assert roster == Roster()
    assert members(roster, A) == {A}


def test_who_was_removed_stays_out_while_every_start_names_it() -> None:
    roster = Roster().leave(B, named=True)
    for _ in range(3):
        roster = roster.at_start([A, B])
        assert members(roster, A, B) == {A}
    without = roster.at_start([A])
    assert members(without, A, B) == {A, B}


def test_who_was_added_and_removed_is_forgotten() -> None:
    assert Roster().join(C).leave(C, named=False) == Roster()


def test_adding_takes_a_removal_back() -> None:
    roster = Roster().leave(B, named=True).join(B)
    assert members(roster, A, B) == {A, B}


def test_all_others_may_go_but_not_everybody() -> None:
    moved = Roster().join(C).leave(A, named=True).leave(B, named=True)
    assert members(moved, A, B) == {C}
    empty = Roster().leave(A, named=True).leave(B, named=True)
    assert members(empty, A, B) == {A, B}


def test_who_was_drained_is_drained() -> None:
    roster = Roster().join(C).drain(A).drain(C)
    assert roster.at_start([A, B]).drained == {A, C}
    assert roster.at_start([B]).drained == {C}
    assert roster.undrain(A).at_start([A, B]).drained == {C}
    assert roster.leave(A, named=True).at_start([A, B]).drained == {C}
    assert roster.join(C).drained == {A}


def test_the_order_of_joining_is_kept() -> None:
    assert Roster().join(C).join(D).join(C).added == (D, C)

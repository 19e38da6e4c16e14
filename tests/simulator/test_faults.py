import msgspec
import pytest

from proxy.simulator.faults import KINDS, Fault, Faults


def hits(faults: Faults, route: str, name: str | None = None, now: float = 0.0, calls: int = 5) -> list[bool]:
    return [faults.take(route, name, now) is not None for _ in range(calls)]


def test_routes_and_names() -> None:
    faults = Faults()
    faults.add("reset", "load", name="v1")
    assert faults.take("unload", "v1", 0) is None
    assert faults.take("load", "v2", 0) is None
    assert faults.take("load", "v1", 0) is not None
    faults.add("reset")
    assert faults.take("metrics", None, 0) is not None


def test_counts() -> None:
    faults = Faults()
    fault = faults.add("reset", "load", times=2, skip=1)
    assert hits(faults, "load") == [False, True, True, False, False]
    assert (fault.hits, faults.active) == (2, [])


def test_time() -> None:
    faults = Faults()
    faults.add("not_visible", "load", now=10.0, until_secs=3.0)
    assert hits(faults, "load", now=12.9, calls=1) == [True]
    assert hits(faults, "load", now=13.0, calls=1) == [False]
    assert faults.active == []


def test_probability_is_repeatable() -> None:
    drawn = []
    for _ in range(2):
        faults = Faults(seed=3)
        faults.add("reset", "load", probability=0.5)
        drawn.append(hits(faults, "load", calls=40))
    assert drawn[0] == drawn[1] and 5 < sum(drawn[0]) < 35


def test_the_first_that_matches_wins() -> None:
    faults = Faults()
    first, second = faults.add("reset", "load", times=1), faults.add("hang", "load")
    assert [faults.take("load", None, 0) for _ in range(2)] == [first, second]
    faults.clear("unload")
    assert faults.active == [second]
    faults.clear("load")
    assert faults.active == []


def test_short_forms_and_mistakes() -> None:
    faults = Faults()
    assert (faults.add("503", "load").kind, faults.active[0].status) == ("error", 503)
    assert faults.add_json({"kind": "slow", "secs": 0.5}, 1.0) == Fault(kind="slow", secs=0.5, added=1.0)
    for wrong in ({"kind": "nonsense"}, {"kind": "reset", "whatever": 1}, {}):
        with pytest.raises(msgspec.ValidationError):
            faults.add_json(wrong, 0.0)
    assert len(faults.active) == 2 and len(set(KINDS)) == len(KINDS)


def test_refusing_everything_is_at_once() -> None:
    faults, called = Faults(), []
    faults.refuse_now = called.append
    faults.add("refuse", secs=0.5)
    assert (called, faults.active) == ([0.5], [])
    faults.add("refuse", "load")
    assert (called, len(faults.active)) == ([0.5], 1)

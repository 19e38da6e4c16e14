"""Groups in flight."""

from proxy.routing.kin import Kin
from proxy.routing.load import Trace


def test_a_group_is_counted_where_it_runs_and_gone_when_it_ends() -> None:
    kin = Kin()
    one, two, other = Trace(key=5), Trace(key=5, sequences=3), Trace(key=6)
    kin.join(one, 0)
    kin.join(two, 1)
    kin.join(other, 0)
    assert (dict(kin.of(5)), dict(kin.of(6)), dict(kin.of(7))) == ({0: 1, 1: 3}, {0: 1}, {})
    kin.leave(two)
    kin.leave(two)
    assert dict(kin.of(5)) == {0: 1}
    kin.leave(one)
    kin.leave(other)
    assert not kin._running


def test_what_never_began_does_not_end() -> None:
    kin = Kin()
    kin.leave(Trace(key=5))
    assert not kin._running

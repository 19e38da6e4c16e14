from __future__ import annotations

import gc
import subprocess
import sys
import weakref

from proxy.garbage import LATEST_SECS, QUIET_SECS, Sweeper


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_it_waits_for_a_quiet_moment_but_not_for_ever() -> None:
    sweeper = Sweeper(0.0)
    assert not sweeper.tick(QUIET_SECS - 1, busy=False)
    assert not sweeper.tick(QUIET_SECS + 1, busy=True)
    knot = weakref.ref(Knot())
    gc.disable()
    try:
        assert sweeper.tick(QUIET_SECS + 2, busy=False)
    finally:
        gc.enable()
    assert knot() is None
    assert not sweeper.tick(QUIET_SECS + 3, busy=False)
    assert not sweeper.tick(QUIET_SECS + 2 + LATEST_SECS - 1, busy=True)
    assert sweeper.tick(QUIET_SECS + 2 + LATEST_SECS, busy=True)


def test_a_calm_process_still_frees_young_cycles_and_never_starts_a_great_collection() -> None:
    script = """
import gc, weakref
from proxy.garbage import calm
calm()
class Knot: pass
knots, great = [], 0
def count(phase, info):
    global great
    great += phase == "start" and info["generation"] == 2
gc.callbacks.append(count)
for _ in range(1_500_000):
    knot = Knot(); knot.me = knot
    if _ < 100: knots.append(weakref.ref(knot))
print(great, sum(knot() is not None for knot in knots))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]

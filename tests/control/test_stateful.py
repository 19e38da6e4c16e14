"""The whole control plane against a model of what it promises: random clients, faults and crashes, in virtual time.

Every run is a fleet of simulated replicas (`replicas.py`) under the real control plane (`world.py`). After each step
the promises are checked; every history ends with all faults gone, after which the fleet has to become whole by itself.

`LORAFLEET_LONG=1` runs the large profile, 2 twice as much; `pytest -s` prints how many steps ran and what they met.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from proxy.replica_state import State
from tests.control.files import BROKEN, PARTIAL, digest_of
from tests.control.process import BASE
from tests.control.replicas import CALLS, KINDS, FakeReplica
from tests.control.virtual_time import VirtualLoop, end
from tests.control.world import SETTINGS, World

LONG = int(os.environ.get("LORAFLEET_LONG") or 0)

NAMES = ("p-v1", "p-v2", "p-v3", "p-v4", "q-v1", "solo")
names = st.sampled_from(NAMES)
prompts = st.sampled_from(("p0", "p1", "p2"))
indices = st.integers(0, 3)
secs = st.sampled_from((0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 1.1, 3.0, 8.0, 35.0))
kinds = st.sampled_from([kind for kind in KINDS if kind not in ("no effect", "not visible", "exists")])

totals: Counter[str] = Counter()


class Quiet(RuleBasedStateMachine):
    """Clients and time; nothing breaks. Then nothing may fail either."""

    faulty = False

    @initialize(
        replicas=st.integers(1, 4),
        max_loras=st.integers(3, 7),
        seed=st.integers(0, 1000),
        lazy=st.booleans(),
        mounted=st.booleans(),
        lag=st.sampled_from((0.0, 0.0, 0.3, 2.0)),
        slowest_call=st.sampled_from((0.0, 0.005, 0.3)),
    )
    def begin(self, replicas, max_loras, seed, lazy, mounted, lag, slowest_call):
        self.loop = VirtualLoop()
        self.world = World(
            self.loop,
            replicas=replicas,
            max_loras=max_loras,
            seed=seed,
            settings=replace(SETTINGS, lazy_pause=lazy),
            mounted=mounted,
            lag=lag,
            slowest_call=slowest_call,
        )
        self.weights = 0
        self.dirs = 0
        self.paths: dict[str, str] = {}
        self.world.seconds(3)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        try:
            world.check()
            world.settle()
            self.work_to_the_end()
            totals.update(world.counts)
            totals["histories"] += 1
            totals["virtual seconds"] += int(self.loop.time() - 1000)
        finally:
            world.proxy.kill()
            end(self.loop)

    def work_to_the_end(self):
        """Resume, and see every completion end."""
        world = self.world
        if world.proxy.fleet.desired.asleep is not None:
            world.switch("wake_up")
        world.switch("resume")
        if not world.until(lambda: not world.operations and not world.completions, 200):
            world.violated(f"{len(world.completions)} completions and {len(world.operations)} operations never end")
        world.settle()

    def fresh(self) -> str:
        self.weights += 1
        return f"w{self.weights}"

    # -- clients -------------------------------------------------------------------------------------------------------

    def publish(self, name: str, path: str, weights: str, told: bool, *, partial_for: float = 0.0):
        """Write a directory and ask for it, as a trainer does."""
        world = self.world
        if partial_for:
            world.files.write(path, f"{PARTIAL} {weights}")
            self.loop.call_later(partial_for, world.files.write, path, weights)
        else:
            world.files.write(path, weights)
        self.paths[name] = path
        return world.load(name, path, digest_of(weights) if told else None)

    @rule(name=names, told=st.booleans(), partial_for=st.sampled_from((0.0, 0.0, 0.0, 0.7)))
    def load_new_directory(self, name, told, partial_for):
        self.dirs += 1
        self.publish(name, f"/run{self.dirs}/{name}", self.fresh(), told or bool(partial_for), partial_for=partial_for)

    @rule(name=names, told=st.booleans())
    def load_again(self, name, told):
        """The same name from the same place, whatever lies there now."""
        path = self.paths.get(name)
        if path is not None:
            there = self.world.files.read(path)
            self.world.load(name, path, digest_of(there) if told and there else None)

    @rule(name=names, told=st.booleans())
    def load_same_weights_elsewhere(self, name, told):
        path = self.paths.get(name)
        there = self.world.files.read(path) if path is not None else None
        if there is not None and not there.startswith((PARTIAL, BROKEN)):
            self.dirs += 1
            self.publish(name, f"/run{self.dirs}/{name}", there, told)

    @precondition(lambda self: len(self.world.operations) < 6)
    @rule(name=names, copies=st.integers(2, 5))
    def load_many_at_once(self, name, copies):
        self.dirs += 1
        path = f"/run{self.dirs}/{name}"
        self.publish(name, path, self.fresh(), told=False)
        for _ in range(copies - 1):
            self.world.load(name, path)

    @rule(name=names, appears=st.sampled_from((None, 0.3, 2.0, 15.0)))
    def load_what_is_not_there_yet(self, name, appears):
        """Asked for too early, or by a path with a mistake in it."""
        self.dirs += 1
        path, weights = f"/run{self.dirs}/{name}", self.fresh()
        if appears is not None:
            self.loop.call_later(appears, self.world.files.write, path, weights)
        self.paths[name] = path
        self.world.load(name, path, coming=weights if appears is not None else None)

    @rule(name=names)
    def unload(self, name):
        self.world.unload(name)

    @rule(
        query=st.sampled_from(("mode=keep", "mode=keep", "mode=keep&clear_cache=false", "mode=abort", "mode=wait", ""))
    )
    def pause(self, query):
        self.world.switch("pause", query)

    @rule()
    def resume(self):
        self.world.switch("resume")

    @rule(query=st.sampled_from(("", "reset_running_requests=true")))
    def reset(self, query):
        self.world.switch("reset", query)

    @rule(what=st.sampled_from(("sleep", "wake_up", "wake_up", "abort")))
    def sleep_or_wake(self, what):
        self.world.switch(what)

    @rule(name=names, prompt=prompts, secs=secs, copies=st.integers(1, 3))
    def complete(self, name, prompt, secs, copies):
        for _ in range(copies):
            self.world.complete(name, prompt, secs)

    @rule(prompt=prompts, secs=secs)
    def rollouts(self, prompt, secs):
        """Completions under every name that is committed."""
        for name in list(self.world.proxy.fleet.desired.adapters):
            self.world.complete(name, prompt, secs)

    @rule(which=st.integers(0, 5), prompt=prompts, secs=secs)
    def complete_committed(self, which, prompt, secs):
        committed = list(self.world.proxy.fleet.desired.adapters)
        if committed:
            self.world.complete(committed[which % len(committed)], prompt, secs)

    @rule(name=names, told=st.booleans(), secs=secs)
    def publish_and_go_on(self, name, told, secs):
        self.load_new_directory(name=name, told=told, partial_for=0.0)
        self.world.seconds(secs)

    @rule(prompt=prompts, secs=secs)
    def complete_base(self, prompt, secs):
        self.world.complete(BASE, prompt, secs)

    @rule(which=st.integers(0, 20))
    def client_leaves(self, which):
        waiting = list(self.world.completions)
        if waiting:
            waiting[which % len(waiting)].cancel()

    @rule(secs=secs)
    def time_passes(self, secs):
        self.world.seconds(secs)

    @rule(steps=st.integers(1, 40))
    def little_time_passes(self, steps):
        for _ in range(steps):
            self.loop.step()

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def promises_hold(self):
        if hasattr(self, "world"):
            totals["steps"] += 1
            self.world.check()
            if not self.faulty:
                self.nothing_failed()

    def nothing_failed(self):
        counts = self.world.counts
        for outcome in ("completion 502", "completion 503", "completion 500", "name lost on a replica", "load unknown"):
            assert not counts[outcome], (outcome, *self.world.log[-200:])


class Faulty(Quiet):
    """And everything breaks: replicas, the network, files, the disk, the proxy itself."""

    faulty = True

    def replica(self, index: int) -> FakeReplica:
        return self.world.replicas[index % len(self.world.replicas)]

    @rule(index=indices, away=secs)
    def restart(self, index, away):
        self.world.note(f"replica {index} restarts, away for {away} s")
        self.replica(index).crash(away)

    @rule(index=indices, away=secs, how=st.sampled_from(("refuse", "hang")))
    def cut_off(self, index, away, how):
        """The network breaks for a while; the process goes on."""
        replica = self.replica(index)
        self.world.note(f"replica {index} is cut off ({how}) for {away} s")
        replica.cut = how
        self.loop.call_later(away, setattr, replica, "cut", None)

    @rule(index=indices, call=st.sampled_from(CALLS), kind=kinds, times=st.integers(1, 3), secs=secs)
    def fault(self, index, call, kind, times, secs):
        self.world.note(f"replica {index}: the next {times} {call} will be {kind} ({secs})")
        self.replica(index).fail(call, kind, times=times, secs=secs)

    @rule(index=indices, kind=st.sampled_from(("not visible", "exists")), times=st.integers(1, 3))
    def odd_load(self, index, kind, times):
        self.world.note(f"replica {index}: the next {times} load will be {kind}")
        self.replica(index).fail("load", kind, times=times)

    @rule(index=indices)
    def mount_is_gone(self, index):
        self.world.note(f"replica {index} sees no files any more")
        self.replica(index).blind = True

    @rule()
    def faults_end(self):
        for replica in self.world.replicas:
            replica.faults.clear()
            replica.blind = False

    @rule(name=names)
    def trainer_rewrites(self, name):
        """A second run writes into the first one's directory; it will ask for it later, or never. A proxy that does not
        see the files cannot know."""
        path = self.paths.get(name)
        if path is not None and self.world.files.lag is not None:
            weights = self.fresh()
            self.world.note(f"{path} now holds {weights}")
            self.world.files.write(path, weights)

    @rule(name=names)
    def files_vanish(self, name):
        path = self.paths.get(name)
        if path is not None:
            self.world.note(f"{path} is deleted")
            self.world.files.delete(path)

    @rule(name=names)
    def load_broken(self, name):
        self.dirs += 1
        self.publish(name, f"/run{self.dirs}/{name}", BROKEN, told=False)

    @rule(full=st.booleans())
    def disk(self, full):
        self.world.note(f"disk full: {full}")
        self.world.disk.full = full

    @rule(steps=st.integers(0, 60))
    def proxy_dies(self, steps):
        """kill -9 at any await."""
        for _ in range(steps):
            self.loop.step()
        self.world.crash()

    @rule(which=st.integers(0, 5))
    def add_replica(self, which):
        """A new one, or one that was removed."""
        world = self.world
        away = [base for base, may in world.members.items() if may == {False}]
        if which < len(away):
            world.membership("add", away[which])
        elif len(world.replicas) < 5:
            base = f"http://r{len(world.replicas)}:8000"
            fresh = FakeReplica(base, world.files, self.loop, max_loras=world.max_loras)
            world.replicas.append(fresh)
            world.proxy.calls.add(fresh)
            world.membership("add", base)

    @rule(index=indices, what=st.sampled_from(("drain", "undrain", "undrain", "remove")))
    def membership(self, index, what):
        world = self.world
        members = world.proxy.fleet.members()
        replica = members[index % len(members)]
        base = replica.endpoint.base
        unsure = any(len(may) > 1 for may in (*world.members.values(), *world.drained.values()))
        if unsure or (what == "remove" and (len(members) == 1 or replica.state is State.JOINING)):
            return
        world.membership(what, base)

    def work_to_the_end(self):
        fleet = self.world.proxy.fleet
        for replica in fleet.members():
            if replica.state is State.DRAINING:
                self.world.membership("undrain", replica.endpoint.base)
        super().work_to_the_end()


@pytest.fixture(autouse=True)
def _no_log():
    """Thousands of histories make thousands of warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def profile(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples * (100 * LONG or 1),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=not LONG,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )


def report(what: str) -> None:
    print(f"\n{what}: {dict(sorted(totals.items()))}")
    totals.clear()


@pytest.mark.timeout(0 if LONG else 300)
def test_nothing_fails_when_nothing_breaks():
    try:
        run_state_machine_as_test(Quiet, settings=profile(60, 40))
    finally:
        report("quiet")


@pytest.mark.timeout(0 if LONG else 300)
def test_promises_hold_whatever_breaks():
    try:
        run_state_machine_as_test(Faulty, settings=profile(120, 50))
    finally:
        report("faulty")

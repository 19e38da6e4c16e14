"""The sole owner of what changes about replicas while lorafleet runs: states, beliefs, in-flight counts.

Everything here runs on one event loop and never awaits, so each method is one step that nobody sees half done. The
control plane feeds it events and the desired state; the data path takes leases; the operator's views read snapshots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.control.desired import Adapter, Desired
from proxy.control.facts import Facts
from proxy.errors import NotFound, Unavailable
from proxy.lease import Lease, Served, Usage
from proxy.replica_state import Event, State, after
from proxy.routing.request import RouteRequest
from proxy.routing.router import Router

if TYPE_CHECKING:
    from proxy.upstream.transport import Endpoint

logger = logging.getLogger("lorafleet.fleet")

LATEST = "-latest"


@dataclass(slots=True)
class Replica:
    """One replica. Only `Fleet` writes to it.

    `holds` maps the upstream names that it is believed to list to the path it said (None: not told); `paused` is what
    the engine really does. `recent` are the upstream names that hold a slot in its engine, least recently used first,
    unloaded ones included: the engine forgets a name at an unload, not the slot; None until that is known. `tainted`
    maps names that it may list with weights nobody is sure of to the reason. `stale_cache`: its prefix cache may hold
    blocks of a time that lorafleet knows nothing of.
    """

    index: int
    endpoint: Endpoint
    state: State = State.JOINING
    since: float = 0.0
    facts: Facts | None = None
    holds: dict[str, str | None] = field(default_factory=dict)
    paused: bool = False
    asleep: bool = False
    cache_epoch: int | None = None
    stale_cache: bool = True
    recent: dict[str, None] | None = None
    tainted: dict[str, str] = field(default_factory=dict)
    leases: set[Lease] = field(default_factory=set)
    running: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    failures: int = 0
    broken_calls: int = 0
    last_error: str | None = None
    removed: bool = False

    @property
    def in_flight(self) -> int:
        return len(self.leases)

    def touch(self, upstream: str) -> None:
        """`upstream` is now the most recently used of its engine's adapters."""
        if self.recent is None:
            return
        self.recent.pop(upstream, None)
        self.recent[upstream] = None
        if self.facts is not None and self.facts.max_loras:
            while len(self.recent) > self.facts.max_loras:
                del self.recent[next(iter(self.recent))]


class Fleet:
    """Replicas, the routing index over them, and the desired state as committed."""

    def __init__(
        self, endpoints: Iterable[Endpoint], router: Router, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.router = router
        self.clock = clock
        self.replicas: list[Replica] = []
        self.desired = Desired()
        self.running: Counter[str] = Counter()
        self.ready_once: set[int] = set()
        self._watchers: list[Callable[[], None]] = []
        self._offered: tuple[int, ...] = ()
        self._closed: set[str] = set()
        self._ghosts = 0
        for endpoint in endpoints:
            self.add(endpoint)

    # -- membership ----------------------------------------------------------------------------------------------------

    def add(self, endpoint: Endpoint) -> Replica:
        """A new replica, JOINING. Indices are never re-used."""
        replica = Replica(index=len(self.replicas), endpoint=endpoint, since=self.clock())
        self.replicas.append(replica)
        return replica

    def remove(self, index: int) -> None:
        """Forget a replica for good; what still runs on it keeps its lease until it ends."""
        self.replicas[index].removed = True
        self.router.drop_replica(index)
        self._changed()

    def members(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.removed]

    def ready(self) -> list[Replica]:
        return [replica for replica in self.members() if replica.state is State.READY]

    # -- events --------------------------------------------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """`callback` runs after each change that may let a waiting request go on."""
        self._watchers.append(callback)

    def apply(self, index: int, event: Event, reason: str | None = None) -> bool:
        """Move one replica through the table; True when its state changed."""
        replica = self.replicas[index]
        if reason is not None:
            replica.last_error = reason
        new = after(replica.state, event)
        if event is Event.PROBE_FAILED and replica.state is State.DRAINING:
            self._lose(replica)  # it stays what the operator said, but what waits on a dead one is told
        if new is replica.state:
            return False
        logger.info("replica %d: %s -> %s%s", index, replica.state.value, new.value, f" ({reason})" if reason else "")
        replica.state, replica.since = new, self.clock()
        if new is State.READY:
            replica.last_error = None
            replica.broken_calls = 0
            self.ready_once.add(index)
        if new is State.DOWN:
            self._lose(replica)
        self._changed()
        return True

    def call_failed(self, index: int, reason: str) -> None:
        """A call broke. The last replica that can serve is kept: an error is better than nobody to ask."""
        replica = self.replicas[index]
        replica.failures += 1
        replica.broken_calls += 1
        replica.last_error = reason
        if self.ready() != [replica]:
            self.apply(index, Event.CALL_FAILED)

    def learn(self, index: int, facts: Facts) -> None:
        """What the replica said of itself; the router sizes its index by it."""
        replica = self.replicas[index]
        if replica.recent is None:
            # Its process is older than ours: ghosts that nobody remembers may be younger than what it lists.
            ghosts = [f"ghost {number}" for number in range(facts.max_loras or 0)]
            replica.recent = dict.fromkeys([*replica.holds, *ghosts])
        if replica.facts != facts and not replica.removed:
            replica.facts = facts
            self.router.set_replica(
                index,
                key=replica.endpoint.base,
                block_size=facts.block_size or 16,
                capacity_tokens=facts.kv_capacity_tokens,
            )

    def forget_cache(self, index: int) -> None:
        """The replica's prefix cache is empty: restarted, reset, or paused with clearing."""
        self.router.forget(index)

    def held(self, index: int, upstream: str, path: str | None) -> None:
        """The replica said that it loaded `upstream`."""
        replica = self.replicas[index]
        replica.holds[upstream] = path
        replica.tainted.pop(upstream, None)
        replica.touch(upstream)

    def given_up(self, index: int, upstream: str) -> None:
        """The replica said that it no longer lists `upstream`; its engine keeps the slot (a ghost), beside the one that
        the name gets when it is loaded again."""
        replica = self.replicas[index]
        replica.holds.pop(upstream, None)
        replica.tainted.pop(upstream, None)
        if replica.recent and upstream in replica.recent and upstream not in replica.running:
            self._ghosts += 1
            ghost = f"ghost {self._ghosts} of {upstream}"
            replica.recent = {ghost if name == upstream else name: None for name in replica.recent}

    def taint(self, index: int, upstream: str, reason: str) -> None:
        """The replica may list `upstream`, now or later, with weights that nobody is sure of."""
        self.replicas[index].tainted[upstream] = reason

    def lost_adapter(self, index: int, upstream: str) -> None:
        """A completion was told that the replica does not know a name that it should hold: it was restarted."""
        self.restarted(index)
        self.apply(index, Event.DRIFTED, f"answered that it does not know {upstream!r}")

    def restarted(self, index: int) -> None:
        """The process behind the address is another one: what was believed of the old one is void."""
        replica = self.replicas[index]
        replica.holds.clear()
        replica.tainted.clear()
        replica.recent = {}
        replica.paused = replica.asleep = False
        replica.cache_epoch = None
        self.router.forget(index)

    def observed(self, index: int, adapters: Mapping[str, str | None], *, paused: bool | None) -> None:
        """What the replica was seen to list, and whether it is paused (None: it does not say)."""
        replica = self.replicas[index]
        if replica.holds.keys() - adapters.keys():
            self.restarted(index)
        for upstream in adapters.keys() - replica.holds.keys():
            replica.touch(upstream)
        replica.holds = dict(adapters)
        replica.paused = bool(paused)

    def set_paused(self, index: int, paused: bool) -> None:
        self.replicas[index].paused = paused

    def set_asleep(self, index: int, asleep: bool) -> None:
        self.replicas[index].asleep = asleep

    def set_epoch(self, index: int, epoch: int) -> None:
        self.replicas[index].cache_epoch = epoch

    def set_error(self, index: int, reason: str) -> None:
        self.replicas[index].last_error = reason

    def commit(self, desired: Desired) -> None:
        """Make `desired` what clients see, in one step.

        A READY or SUSPECT replica that is behind (lacks an adapter, is not paused as it should be, missed a cache
        reset) stops being routable in the same step, so that a name is usable on all routable replicas or on none.
        """
        gone = {a.upstream for a in self.desired.adapters.values()} - {a.upstream for a in desired.adapters.values()}
        self.desired = desired
        for upstream in gone:
            self.router.forget_model(upstream)
        for replica in self.members():
            if replica.state not in (State.READY, State.SUSPECT):
                continue
            behind = self._behind(replica)
            if behind is not None:
                self.apply(replica.index, Event.DRIFTED, behind)
        self._changed()

    def _behind(self, replica: Replica) -> str | None:
        """What keeps a replica from being as it should be, as far as is known; None for nothing."""
        missing = self.missing(replica)
        if missing:
            return f"does not hold {missing[0].name} yet"
        if any(adapter.upstream in replica.tainted for adapter in self.desired.adapters.values()):
            return "may hold other weights"
        if replica.asleep != (self.desired.asleep is not None):
            return "is asleep" if replica.asleep else "is not asleep yet"
        should_pause = self.desired.pause is not None and self.desired.pause.real
        if replica.paused != should_pause and not replica.asleep:  # an engine that sleeps may call itself paused
            return "is paused" if replica.paused else "is not paused yet"
        if replica.cache_epoch is not None and replica.cache_epoch < self.desired.cache_epoch:
            return "missed a cache reset"
        return None

    def missing(self, replica: Replica) -> list[Adapter]:
        """Committed bindings that the replica is not known to hold."""
        return [a for a in self.desired.adapters.values() if a.upstream not in replica.holds]

    # -- the data path -------------------------------------------------------------------------------------------------

    def base_models(self) -> tuple[str, ...]:
        for replica in self.members():
            if replica.facts is not None:
                return replica.facts.base_models
        return ()

    def resolve(self, model: str | None) -> Served | None:
        """What a model name means now; None when the client named none (the engine then takes its base model).

        Raises NotFound, in vLLM's words, for a name that is neither a base model nor committed.
        """
        if model is None:
            return None
        adapter = self.desired.adapters.get(model)
        if adapter is None and model.endswith(LATEST):
            adapter = self.latest(model.removesuffix(LATEST))
        if adapter is not None and adapter.name not in self._closed:
            return Served(adapter.name, adapter.upstream, adapter.digest, adapter=True)
        if model in self.base_models():
            return Served(model, model, None, adapter=False)
        raise NotFound(f"The model `{model}` does not exist.", param="model")

    def latest(self, name: str) -> Adapter | None:
        """The newest committed version of `name`: `<name>-v<N>` or `<name>` itself."""
        found: Adapter | None = None
        for adapter in self.desired.adapters.values():
            stem, dash_v, number = adapter.name.rpartition("-v")
            if adapter.name == name or (dash_v and stem == name and number.isdigit()):
                found = adapter if found is None or adapter.order > found.order else found
        return found

    def max_loras(self) -> int | None:
        """Adapter slots of the smallest engine among the replicas that have served; None while no replica says."""
        served = [r for r in self.members() if r.index in self.ready_once]
        return min((r.facts.max_loras for r in served if r.facts and r.facts.max_loras), default=None)

    def close(self, name: str) -> None:
        """Refuse `name` to new completions while it is being unloaded; `reopen` ends it."""
        self._closed.add(name)

    def reopen(self, name: str) -> None:
        self._closed.discard(name)

    def paused(self) -> bool:
        """Whether completions must wait: a pause or sleep that the replicas really hold."""
        pause = self.desired.pause
        return (pause is not None and pause.real) or self.desired.asleep is not None

    def routable(self, exclude: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """Replicas that may be offered work: the READY ones, or the SUSPECT ones when there is no READY one."""
        offered = self._offered
        return tuple(index for index in offered if index not in exclude) if exclude else offered

    def lease(self, request: RouteRequest, served: Served | None, exclude: frozenset[int] = frozenset()) -> Lease:
        """Choose a replica and hold it. Raises Unavailable when none may be offered the request."""
        candidates = self.routable(exclude)
        if not candidates:
            raise Unavailable("no replica can serve this now")
        now = self.clock()
        upstream = served.upstream if served is not None else ""
        decision = self.router.decide(request, upstream, candidates, now)
        replica = self.replicas[decision.replica]
        lease = Lease(self, replica, decision, served, now)
        self.router.start(decision, now)
        replica.leases.add(lease)
        replica.requests += 1
        if served is not None and served.adapter:
            replica.touch(upstream)
            replica.running[upstream] += 1
            self.running[upstream] += 1
        return lease

    def lease_answered(self, lease: Lease) -> None:
        self.router.first_byte(lease.decision, self.clock())

    def lease_released(self, lease: Lease, *, ok: bool, usage: Usage | None) -> None:
        replica, served = lease.replica, lease.served
        replica.leases.discard(lease)
        if ok:
            replica.broken_calls = 0
        if served is not None and served.adapter:
            for counts in (replica.running, self.running):
                counts[served.upstream] -= 1
                if not counts[served.upstream]:
                    del counts[served.upstream]
            if served.upstream in replica.holds:
                replica.touch(served.upstream)  # it was in use until now
            if served.upstream not in self.running and self.desired.retiring:
                self._changed()
        usage = usage or Usage()
        self.router.end(
            lease.decision,
            self.clock(),
            ok=ok,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            output_ids=usage.output_ids,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _lose(self, replica: Replica) -> None:
        """Tell whoever waits on a dead replica. Its cache is taken for gone; if it was not, the index relearns."""
        self.router.forget(replica.index)
        for lease in list(replica.leases):
            callback, lease.on_lost = lease.on_lost, None
            if callback is not None:
                callback()

    def _changed(self) -> None:
        known = [r for r in self.members() if r.facts is not None]
        ready = tuple(r.index for r in known if r.state is State.READY)
        self._offered = ready or tuple(r.index for r in known if r.state is State.SUSPECT)
        for callback in self._watchers:
            callback()

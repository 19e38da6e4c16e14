"""A whole fleet in virtual time: replicas, files, a disk, clients, and a proxy that can be killed at any await.

The control plane is the real one. What it promises is checked where a client would notice: at the moment a completion
is routed, and when its answer comes.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import json
import random
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from proxy.control import edits
from proxy.control.adapters import AdapterChanges
from proxy.control.desired import Desired
from proxy.control.edits import Line
from proxy.control.journal import Recovered, for_start
from proxy.control.membership import Membership
from proxy.control.plane import Plane
from proxy.control.reconcile import Reconciler
from proxy.control.settings import ControlSettings
from proxy.control.switches import Switches
from proxy.errors import LorafleetError, NotFound, Unavailable
from proxy.fleet import Fleet
from proxy.lease import Lease, Served
from proxy.replica_state import State
from proxy.routing.request import RouteRequest
from proxy.upstream.transport import Endpoint
from proxy.web.gate import Gate
from tests.control.files import FakeFiles, digest_of
from tests.control.oracle import Meaning, Oracle
from tests.control.process import BASE, Run, Unknown, Unreadable
from tests.control.replicas import Broken, FakeReplica, MemoryCalls
from tests.control.virtual_time import NumberedTask, VirtualLoop

T = TypeVar("T")

EPOCH = 1_000_000.0
"""Wall-clock seconds when the loop's time is zero."""

SETTINGS = ControlSettings(
    pause_lease_secs=60.0,
    load_deadline_secs=20.0,
    unload_drain_secs=30.0,
    probe_secs=1.0,
    health_timeout_secs=1.0,
    admin_timeout_secs=3.0,
    lost_files_secs=10.0,
)

_owner: contextvars.ContextVar[Proxy | None] = contextvars.ContextVar("owner", default=None)


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Disk:
    """What outlives the proxy. `full`: nothing more can be written."""

    lines: list[str]
    full: bool = False


class DiskJournal:
    """The journal's lines on a `Disk`, through JSON as in the real file."""

    def __init__(self, disk: Disk, bases: list[str], on_line: Callable[[Line], None]) -> None:
        self._disk = disk
        self._bases = bases
        self._on_line = on_line
        self.dead = False

    def open(self) -> Recovered:
        desired, known = Desired(), None
        for text in self._disk.lines:
            line = json.loads(text)
            if line["do"] == "fleet":
                known = line["replicas"]
            else:
                desired = edits.apply(desired, line)
        desired = for_start(desired, self._bases, known or ())
        again = [{"do": "fleet", "replicas": self._bases}, edits.snapshot(desired)]
        self._disk.lines = [json.dumps(line) for line in again]
        return Recovered(desired, found=known is not None)

    def append(self, line: Line, desired: Desired) -> None:
        if self.dead:
            return
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.lines.append(json.dumps(line))
        self._on_line(line)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Choice:
    replica: int
    route: str = "new"
    cached_tokens: int = 0


class AnyRouter:
    """The next candidate each time; where requests go is not what is tested here."""

    def __init__(self) -> None:
        self._turn = 0

    def decide(self, request: RouteRequest, model: str, candidates: list[int], now: float) -> Choice:
        self._turn += 1
        return Choice(candidates[self._turn % len(candidates)])

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **named: None


class CheckedFleet(Fleet):
    """Looks at the promises each time that a request is routed."""

    on_route: Callable[[Fleet], None]

    def lease(self, request: RouteRequest, served: Served | None, exclude: frozenset[int] = frozenset()) -> Lease:
        self.on_route(self)
        return super().lease(request, served, exclude)


class Proxy:
    """One life of the proxy, from its start to its kill -9."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.context = contextvars.copy_context()
        self.context.run(_owner.set, self)
        loop = world.loop
        bases = world.named
        self.fleet = CheckedFleet([Endpoint(base) for base in bases], AnyRouter(), clock=loop.time)
        self.fleet.on_route = world.check_routing
        self.calls = MemoryCalls(world.replicas, world.latency)
        self.journal = DiskJournal(world.disk, [*bases, *world.groups], world.on_line)

        async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
            await asyncio.sleep(world.latency())
            result = function(*args)
            await asyncio.sleep(world.latency())
            return result

        self.plane = Plane(
            self.fleet,
            self.calls,
            self.journal,
            world.settings,
            wall=lambda: loop.time() + EPOCH,
            in_thread=in_thread,
            files=world.files,
        )
        self.adapters = AdapterChanges(self.plane)
        self.switches = Switches(self.plane)
        self.reconciler = Reconciler(self.plane)
        self.membership = Membership(self.plane, self.reconciler, lambda url: Endpoint(str(url)), bases)
        self.gate = Gate(self.fleet, 4096, lambda waiting: None)
        self.plane.open()
        self.membership.restore()
        self.inside(self.switches.arm_lease)
        self.inside(self.reconciler.start)

    def inside(self, call: Callable[[], T]) -> T:
        """Call something that needs the running loop, as this proxy."""
        done: list[Callable[[], T]] = []

        def run() -> None:
            try:
                result = call()
                done.append(lambda: result)
            except LorafleetError as error:
                done.append(partial(_raise, error))

        self.world.loop.call_soon(run, context=self.context)
        while not done and not self.world.loop.errors:
            self.world.loop.step()
        return done[0]()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that dies with this proxy."""
        return self.context.run(self.world.loop.create_task, coroutine)

    def kill(self) -> None:
        """Nothing that it does from now on reaches anybody."""
        self.calls.dead = self.journal.dead = True
        self.switches.stop()
        for task in list(self.tasks):
            task.cancel()


class World:
    def __init__(
        self,
        loop: VirtualLoop,
        *,
        replicas: int = 2,
        max_loras: int = 8,
        seed: int = 0,
        settings: ControlSettings = SETTINGS,
        mounted: bool = True,
        lag: float = 0.0,
        slowest_call: float = 0.005,
    ) -> None:
        self.loop = loop
        loop.set_task_factory(_task_of_owner)
        self.random = random.Random(seed)
        self.slowest_call = slowest_call
        self.settings = settings
        self._mounted = mounted
        self.files = FakeFiles(loop.time, lag=0.0 if mounted else None, epoch=EPOCH)
        self.max_loras = max_loras
        self.replicas = [
            FakeReplica(f"http://r{i}:8000", self.files, loop, lag=lag * i, max_loras=max_loras)
            for i in range(replicas)
        ]
        self.named = [replica.base for replica in self.replicas]
        self.groups: list[str] = []
        self.members: dict[str, set[bool]] = {base: {True} for base in self.named}
        self.drained: dict[str, set[bool]] = {base: {False} for base in self.named}
        self.disk = Disk([])
        self.oracle = Oracle()
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.violations: list[str] = []
        self.operations: set[asyncio.Task[Any]] = set()
        self.completions: dict[asyncio.Task[Any], None] = {}
        self.paused: frozenset[bool] = frozenset({False})
        self._switching = 0
        self._nonce = 0
        self.proxy = Proxy(self)

    # -- small things --------------------------------------------------------------------------------------------------

    def latency(self) -> float:
        return self.random.random() ** 4 * self.slowest_call

    def note(self, what: str) -> None:
        self.log.append(f"{self.loop.time() - 1000:9.3f} {what}")

    def violated(self, what: str) -> None:
        self.note(f"VIOLATION {what}")
        self.violations.append(what)

    def replica_of(self, base: str) -> FakeReplica:
        return next(replica for replica in self.replicas if replica.base == base)

    def seconds(self, secs: float) -> None:
        self.loop.pass_time(secs)

    def until(self, condition: Callable[[], bool], secs: float) -> bool:
        """Let time pass until the condition holds; False when it does not within `secs`."""
        end = self.loop.time() + secs
        while not condition():
            if self.loop.time() >= end:
                return False
            self.loop.pass_time(0.05)
        return True

    # -- life of the proxy ---------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """kill -9, and start again from what is on disk."""
        self.note("proxy killed")
        self.counts["crash"] += 1
        dead = self.proxy
        dead.kill()
        for _ in range(200):
            if all(task.done() for task in dead.tasks):
                break
            self.loop.step()
        for index, replica in enumerate(dead.fleet.replicas):
            if replica.leases:
                self.violated(f"I3 replica {index} has leases after all requests were cut off")
        self.proxy = Proxy(self)
        self.check_members()
        for replica in self.proxy.fleet.replicas:
            base, here = replica.endpoint.base, not replica.removed
            self.members[base] = {here}
            self.drained[base] = {here and replica.state is State.DRAINING}
        for base in self.members.keys() - {replica.endpoint.base for replica in self.proxy.fleet.replicas}:
            self.members[base], self.drained[base] = {False}, {False}

    # -- operations ----------------------------------------------------------------------------------------------------

    def load(self, name: str, path: str, digest: str | None = None, coming: str | None = None) -> asyncio.Task[Any]:
        """`coming`: weights that will lie at the path some time."""
        targets: set[Meaning] = set(self.files.contents(path, self.loop.time())) | ({coming} if coming else set())
        operation = self.oracle.begin(name, "load", targets)
        began = self.loop.time()
        self.note(f"load {name} from {path} ({targets}, digest {'given' if digest else 'not given'})")

        async def run() -> str:
            outcome = "unknown"
            try:
                await self.proxy.adapters.load(name, path, digest)
                outcome = "ok"
            except LorafleetError as error:
                outcome = "failed"
                self.note(f"  load {name} failed: {error.message}")
            finally:
                seen = self.files.contents(path, began)
                if digest is not None:
                    seen = {weights for weights in seen if digest_of(weights) == digest}
                operation.targets |= seen
                self.oracle.end(operation, outcome)
                self.note(f"  load {name}: {outcome}")
                self.counts[f"load {outcome}"] += 1
            return outcome

        return self._operate(run())

    def unload(self, name: str) -> asyncio.Task[Any]:
        operation = self.oracle.begin(name, "unload", {None})
        self.note(f"unload {name}")

        async def run() -> str:
            outcome = "unknown"
            try:
                await self.proxy.adapters.unload(name)
                outcome = "ok"
            except LorafleetError as error:
                outcome = "failed"
                self.note(f"  unload {name} failed: {error.message}")
            finally:
                self.oracle.end(operation, outcome)
                self.note(f"  unload {name}: {outcome}")
                self.counts[f"unload {outcome}"] += 1
            return outcome

        return self._operate(run())

    def switch(self, what: str, query: str = "") -> asyncio.Task[Any]:
        """pause, resume, reset, sleep, wake_up or abort."""
        self.note(f"{what} {query}")
        switches = self.proxy.switches
        leaves = {"pause": True, "resume": False}.get(what)
        if leaves is not None:
            self._switching += 1

        async def run() -> str:
            outcome, answer = "unknown", None
            try:
                match what:
                    case "pause":
                        answer = await switches.pause(query)
                    case "resume":
                        answer = await switches.resume()
                    case "reset":
                        answer = await switches.reset_prefix_cache(query)
                    case "sleep":
                        answer = await switches.sleep(query)
                    case "wake_up":
                        answer = await switches.wake_up(query)
                    case "abort":
                        answer = await switches.abort_requests(b"")
                outcome = "ok"
            except LorafleetError as error:
                outcome = "failed"
                self.note(f"  {what} failed: {error.message}")
            finally:
                self.note(f"  {what}: {outcome} {answer or ''}")
                self.counts[f"{what} {outcome}"] += 1
                if leaves is not None:
                    self._switched(leaves, outcome)
            return outcome

        return self._operate(run())

    def membership(self, what: str, base: str) -> asyncio.Task[Any]:
        """add, remove, drain or undrain."""
        self.note(f"{what} {base}")
        known, to = {
            "add": (self.members, True),
            "remove": (self.members, False),
            "drain": (self.drained, True),
            "undrain": (self.drained, False),
        }[what]
        membership = self.proxy.membership
        known.setdefault(base, {False}).add(to)
        if what == "add":
            self.drained.setdefault(base, {False}).add(False)

        async def run() -> str:
            outcome = "unknown"
            before = known[base] - {to} or {to}
            try:
                if what == "add":
                    await membership.add(base)
                else:
                    replica = membership.of(base)
                    assert replica is not None
                    await getattr(membership, what)(replica.index)
                outcome = "ok"
                known[base] = {to}
                if known is self.members:
                    self.drained[base] = {False}
            except LorafleetError as error:
                outcome = "failed"
                known[base] = before
                self.note(f"  {what} failed: {error.message}")
            finally:
                self.note(f"  {what}: {outcome}")
                self.counts[f"{what} {outcome}"] += 1
            return outcome

        return self._operate(run())

    def check_members(self) -> None:
        """Who belongs to the fleet is what the operator was told, after a crash as well."""
        fleet = self.proxy.fleet
        states = {replica.endpoint.base: replica.state for replica in fleet.members()}
        for base, may in self.members.items():
            if (base in states) not in may:
                self.violated(f"{base} is a member: {base in states}, the operator was told {may}")
            elif base not in states or False in may:
                continue  # while its removal is written down it drains
            elif (states[base] is State.DRAINING) not in self.drained[base]:
                self.violated(f"{base} is {states[base].value}, drained: {self.drained[base]}")

    def _switched(self, leaves: bool, outcome: str) -> None:
        self._switching -= 1
        if outcome == "ok" and not self._switching:
            self.paused = frozenset({leaves})
        elif outcome != "failed":
            self.paused |= {leaves}

    def _operate(self, coroutine: Coroutine[Any, Any, str]) -> asyncio.Task[Any]:
        task = self.proxy.spawn(coroutine)
        self.operations.add(task)
        task.add_done_callback(self.operations.discard)
        return task

    def on_line(self, line: Line) -> None:
        """The proxy wrote an edit. A name that nobody unloads may be taken away for two reasons only."""
        self.note(f"    journal {line}")
        if line["do"] == "resume":
            self.paused |= {False}
        if line["do"] != "unbind":
            return
        name, making_room = line["name"], self.oracle.loading()
        if self.oracle.unloading(name) and not making_room:
            return
        if not making_room:
            bound = self.proxy.fleet.desired.adapters[name]
            if not self._mounted and all(replica.blind for replica in self.replicas):
                return  # neither the proxy nor a replica can tell
            there = self.files.read(bound.path)
            if there is not None and (bound.digest is None or digest_of(there) == bound.digest):
                self.violated(f"{name} was given up although its files are there")
        self.counts["name taken away"] += 1
        self.oracle.forgets(name)

    # -- completions ---------------------------------------------------------------------------------------------------

    def complete(self, name: str, prompt: str = "p0", secs: float = 0.1) -> asyncio.Task[Any]:
        task = self.proxy.spawn(self._complete(name, prompt, secs, RouteRequest(model=name)))
        self.completions[task] = None
        task.add_done_callback(self.completions.pop)
        return task

    async def _complete(self, name: str, prompt: str, secs: float, request: RouteRequest) -> str:
        outcome = "left"
        try:
            outcome = await self._served(name, prompt, secs, request)
        except NotFound:
            outcome = "404"
        except Unavailable:
            outcome = "503"
        finally:
            self.counts[f"completion {outcome}"] += 1
            if outcome not in ("ok", "left"):
                self.note(f"  completion under {name}: {outcome}")
        return outcome

    async def _served(self, name: str, prompt: str, secs: float, request: RouteRequest) -> str:
        """The life of a completion as `proxy.web.exchange` leads it."""
        proxy, tried, repeats = self.proxy, frozenset[int](), 0
        patience = self.loop.time() + 30
        while True:
            while proxy.fleet.paused():
                await proxy.gate.wait(None, waited=True)
            if not proxy.fleet.routable(tried):
                if self.loop.time() >= patience:
                    return "503"
                forgive = self.loop.time() + 0.2
                while tried and self.loop.time() < forgive - 1e-6 and not proxy.fleet.routable(tried):
                    await proxy.gate.wait(forgive - self.loop.time(), waited=True)
                if not proxy.fleet.routable(tried):
                    await proxy.gate.wait(0.0 if tried else 0.2, waited=True)
                    tried = frozenset()
                continue
            allowed = self._meaning(name)
            try:
                served = proxy.fleet.resolve(name)
            except NotFound:
                if None not in allowed:
                    self.violated(f"{name} is not found, it should mean {allowed}")
                raise
            assert served is not None
            allowed = self._meaning(served.name)
            lease = proxy.fleet.lease(request, served, tried)
            ok = False
            asked = self.loop.create_task(
                proxy.calls.complete(lease.replica.endpoint, served.upstream, prompt, secs), name="ask"
            )
            lease.on_lost = asked.cancel
            try:
                await asyncio.wait({asked})
                run = asked.result()
                ok = True
                self._check_answer(served, allowed, run)
                return "aborted" if run.aborted else "ok"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                repeats += 1
            except Broken as broken:
                repeats += broken.sent
                proxy.fleet.call_failed(lease.replica.index, "broken")
            except Unreadable:
                return "500"
            except Unknown:
                bound = proxy.fleet.desired.adapters.get(served.name)
                if bound is not None and bound.upstream == served.upstream:
                    proxy.fleet.lost_adapter(lease.replica.index, served.upstream)
                self.counts["name lost on a replica"] += 1
            finally:
                asked.cancel()
                lease.on_lost = None
                lease.release(ok=ok)
            if repeats > 1:
                return "502"
            tried |= {lease.replica.index}

    def _meaning(self, name: str) -> frozenset[Meaning]:
        if name == BASE:
            return frozenset({BASE})
        return self.oracle.possible(name) if not name.endswith("-latest") else frozenset({None})

    # -- invariants ----------------------------------------------------------------------------------------------------

    def _check_answer(self, served: Served, allowed: frozenset[Meaning], run: Run) -> None:
        """I1: the weights that were committed under the name when it was routed, and nobody else's blocks."""
        self.counts["answer checked"] += 1
        if len(run.used) > 1:
            self.violated(f"I1 {served.name} was answered with several weights: {run.used}")
        if not run.used <= allowed:
            self.violated(f"I1 {served.name} was answered with {run.used}, it should mean {set(allowed)}")
        if served.digest is not None and {digest_of(weights) for weights in run.used} != {served.digest}:
            self.violated(f"I1 {served.name} was answered with {run.used}, the digest is another's")
        if run.stale:
            self.violated(f"I1 {served.name} ({served.upstream}) was answered from the cache of other weights")

    def check_routing(self, fleet: Fleet) -> None:
        """I2 and I4 as believed, at the only moment when it matters."""
        real = fleet.desired.pause is not None and fleet.desired.pause.real
        for index in fleet.routable():
            replica = fleet.replicas[index]
            missing = [adapter for adapter in fleet.missing(replica) if adapter.name not in fleet._closed]
            if missing:
                self.violated(f"I2 replica {index} ({replica.state.value}) is offered work and lacks {missing[0].name}")
            if replica.paused != real and not self.proxy.plane.busy:
                self.violated(f"I4 replica {index} is offered work, paused: {replica.paused}, the fleet: {real}")

    def check(self) -> None:
        """What must hold between any two steps."""
        self.check_members()
        if self.loop.errors:
            raise Violation(f"an exception that nobody saw: {self.loop.errors[0]}")
        if self.violations:
            raise Violation(self.violations[0] + "\n" + "\n".join(self.log[-400:]))

    def settle(self) -> None:
        """Everything that was broken works again and nobody asks for anything: soon all is well."""
        self.note("settle")
        self.disk.full = False
        for replica in self.replicas:
            replica.faults.clear()
            replica.cut = None
            replica.blind = False
            if replica.process is None:
                replica.boot()
        if not self.until(lambda: not self.operations, 300):
            self.violated(f"an operation hangs: {[task.get_coro() for task in self.operations]}")
        if not self.until(self._equal, 60):
            self._release_lost()
        self.check_rest()

    def _equal(self) -> bool:
        plane = self.proxy.plane  # busy: the lease of a pause may have run out just now
        return not self.difference() and not self.proxy.fleet.desired.retiring and not plane.busy

    def _release_lost(self) -> None:
        """Files that are gone keep a replica that lost its adapters away: the operator unloads what is lost."""
        for adapter in list(self.proxy.fleet.desired.adapters.values()):
            there = self.files.read(adapter.path)
            if there is None or (adapter.digest is not None and digest_of(there) != adapter.digest):
                self.counts["operator unloads what is lost"] += 1
                self.unload(adapter.name)
        self.until(lambda: not self.operations, 300)
        self.until(self._equal, 60)

    def difference(self) -> str | None:
        """How replicas that should serve differ from what is committed; None when they do not."""
        fleet = self.proxy.fleet
        desired = fleet.desired
        real = desired.pause is not None and desired.pause.real
        kept = {adapter.upstream: adapter for adapter in desired.adapters.values()}
        draining = {adapter.upstream for adapter in desired.retiring}
        for replica in fleet.members():
            if replica.state is State.DRAINING:
                continue
            if replica.state is not State.READY:
                return f"replica {replica.index} is {replica.state.value}: {replica.last_error}"
            process = self.replica_of(replica.endpoint.base).alive
            names = process.listed.keys()
            if kept.keys() - names:
                return f"replica {replica.index} lacks {kept.keys() - names}"
            extra = {name for name in names - kept.keys() - draining if name in desired.used}
            if extra:
                return f"replica {replica.index} still lists {extra}"
            if desired.asleep is None and (process.paused is not None) != real:
                return f"replica {replica.index} is paused: {process.paused}, the fleet: {real}"
            # One that restarted with nothing loaded, and was paused at once, says that it sleeps: nobody can know.
            seems_asleep = process.asleep or (desired.asleep is not None and process.paused is not None)
            if seems_asleep != (desired.asleep is not None):
                return f"replica {replica.index} is asleep: {process.asleep}"
        return None

    def check_rest(self) -> None:
        """I1 to I4 and that nothing is left over, when nothing is going on but completions."""
        fleet, plane = self.proxy.fleet, self.proxy.plane
        difference = self.difference()
        if difference is not None:
            self.violated(f"at rest: {difference}")
        if plane.pending or plane.busy:
            self.violated(f"at rest: pending {plane.pending}, busy {plane.busy}")
        for adapter in fleet.desired.adapters.values():
            possible = self.oracle.possible(adapter.name)
            digests = {digest_of(weights) for weights in possible if weights is not None}
            if adapter.digest is not None and adapter.digest not in digests:
                self.violated(f"I1 {adapter.name} is committed with another digest than any of {possible}")
            for replica in fleet.ready():
                names = self.replica_of(replica.endpoint.base).names()
                if names.get(adapter.upstream) not in possible | {"nothing"}:
                    self.violated(f"I1 {adapter.name} is {names.get(adapter.upstream)}, it may be {possible}")
        for name in self.oracle.names():
            if None not in self.oracle.possible(name) and name not in fleet.desired.adapters:
                self.violated(f"{name} is gone, it should mean {self.oracle.possible(name)}")
        if (fleet.desired.pause is not None) not in self.paused:
            self.violated(f"paused: {fleet.desired.pause}, clients were told {set(self.paused)}")
        if not self.completions:
            for replica in fleet.replicas:
                if replica.in_flight or replica.running:
                    self.violated(f"I3 replica {replica.index} has {replica.in_flight} leases at rest")
            if fleet.running:
                self.violated(f"I3 {fleet.running} run at rest")
        self.check()


def lazily(settings: ControlSettings) -> ControlSettings:
    return replace(settings, lazy_pause=True)


def _raise(error: Exception) -> Any:
    raise error


def _task_of_owner(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task = NumberedTask(loop, coroutine, **options)
    owner = _owner.get()
    if owner is not None:
        owner.tasks.add(task)
    return task

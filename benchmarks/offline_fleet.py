"""A fleet of simulated engines behind one or more routers, on a virtual clock."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from random import Random

from xxhash import xxh3_64_intdigest

from benchmarks.offline_workloads import Rollout, Workload
from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import RouteRequest
from proxy.routing.router import Decision, Router
from proxy.simulator.engine import Engine, EngineConfig
from proxy.simulator.prefix_cache import chain_hashes, chain_seed
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef

SEND_SECS = 5e-5
"""The client sends one request after the other, this far apart."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a replica's engine can do."""

    name: str
    prefill_tps: float
    decode_tps: float
    slowdown: float


GPU = Speed("gpu", 20_000.0, 60.0, 0.01)
CPU = Speed("cpu", 3_000.0, 30.0, 0.8)


@dataclass(slots=True)
class Result:
    """Token counts, requests per replica and seconds of virtual time."""

    prompt_tokens: int = 0
    cached: int = 0
    endless: int = 0
    shares: list[int] = field(default_factory=list)
    wall: float = 0.0
    predicted: int = 0
    routes: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """What was reused of what one endless cache would have reused."""
        return self.cached / self.endless if self.endless else 1.0

    @property
    def balance(self) -> float:
        """The largest share of the requests over the mean."""
        return max(self.shares) * len(self.shares) / max(1, sum(self.shares))


class EndlessCache:
    """Reuse in one cache that never evicts, for requests in the order in which they were sent."""

    def __init__(self, block_size: int = 16) -> None:
        self._known: set[bytes] = set()
        self._size = block_size

    def lookup(self, model: str, tokens: list[int]) -> int:
        hit = 0
        hashes = chain_hashes(chain_seed(model, None), tokens, self._size)
        for value in hashes[: (len(tokens) - 1) // self._size]:
            if value not in self._known:
                break
            hit += 1
        self._known.update(hashes)
        return hit * self._size

    def add(self, model: str, tokens: list[int]) -> None:
        self._known.update(chain_hashes(chain_seed(model, None), tokens, self._size))


@dataclass(slots=True)
class _Flight:
    rollout: Rollout
    turn: int
    prompt: list[int]
    router: int
    decision: Decision
    sequence: Sequence


class Simulation:
    """Keeps `concurrency` rollouts going until all are done."""

    def __init__(
        self,
        workload: Workload,
        policy: str,
        *,
        replicas: int,
        concurrency: int,
        speed: Speed = GPU,
        speeds: dict[int, float] | None = None,
        capacity_blocks: int = 1_000_000,
        routers: int = 1,
        report: bool = True,
        restart_at: int | None = None,
        seed: int = 3,
    ) -> None:
        factors = speeds or {}
        self._engines = [
            Engine(
                EngineConfig(
                    capacity_blocks=capacity_blocks,
                    prefill_tps=speed.prefill_tps,
                    decode_tps=speed.decode_tps,
                    decode_slowdown=speed.slowdown,
                    speed=factors.get(index, 1.0),
                    max_loras=64,
                )
            )
            for index in range(replicas)
        ]
        self._policy = policy
        self._capacity = capacity_blocks * 16
        self._routers = [self._router() for _ in range(routers)]
        self._candidates = list(range(replicas))
        self._concurrency = concurrency
        self._report = report
        self._restart_at = restart_at
        self._random = Random(seed)
        self._todo = deque(workload.rollouts)
        self._loras: dict[str, LoraRef] = {}
        self._flights: dict[str, _Flight] = {}
        self._endless = EndlessCache()
        self._sends: list[tuple[float, int, Rollout, int, list[int]]] = []
        self._free_at = 0.0
        self._ids = count()
        self.result = Result(shares=[0] * replicas)

    def _router(self) -> Router:
        router = Router(self._policy)
        for index in range(len(self._engines)):
            router.set_replica(
                index, key=f"http://10.0.0.{index + 1}:8000", block_size=16, capacity_tokens=self._capacity
            )
        return router

    def run(self) -> Result:
        for _ in range(self._concurrency):
            self._next_rollout(0.0)
        while self._sends or self._flights:
            times = [engine.next_event_time() for engine in self._engines]
            soonest = min((t, index) for index, t in enumerate([float("inf") if t is None else t for t in times]))
            if self._sends and self._sends[0][0] <= soonest[0]:
                now, _, rollout, turn, prompt = heapq.heappop(self._sends)
                self._send(now, rollout, turn, prompt)
            else:
                for sequence in self._engines[soonest[1]].advance(soonest[0]):
                    self._finished(sequence, soonest[0])
        for router in self._routers:
            counters = router.counters()
            for route, number in counters["decisions"].items():  # type: ignore[attr-defined]
                self.result.routes[route] = self.result.routes.get(route, 0) + number
            self.result.predicted += counters["predicted_cached_tokens"]  # type: ignore[operator]
        return self.result

    def _next_rollout(self, now: float) -> None:
        if self._todo:
            rollout = self._todo.popleft()
            self._queue(now, rollout, 0, list(rollout.turns[0].tokens))

    def _queue(self, now: float, rollout: Rollout, turn: int, prompt: list[int]) -> None:
        self._free_at = max(self._free_at, now) + SEND_SECS
        heapq.heappush(self._sends, (self._free_at, next(self._ids), rollout, turn, prompt))

    def _send(self, now: float, rollout: Rollout, turn: int, prompt: list[int]) -> None:
        number = next(self._ids)
        if self._restart_at is not None and sum(self.result.shares) == self._restart_at:
            self._routers[0] = self._router()
        which = self._random.randrange(len(self._routers))
        router = self._routers[which]
        raw = ",".join(map(str, prompt)).encode()
        request = RouteRequest(
            model=rollout.model,
            max_tokens=rollout.turns[turn].answer * 2,
            prompts=(Prompt(Kind.TOKENS, raw, xxh3_64_intdigest(raw)),),
        )
        decision = router.decide(request, rollout.model, self._candidates, now)
        router.start(decision, now)
        self.result.endless += self._endless.lookup(rollout.model, prompt)
        self.result.shares[decision.replica] += 1
        self.result.prompt_tokens += len(prompt)
        lora = self._loras.setdefault(
            rollout.model, LoraRef(name=rollout.model, int_id=len(self._loras) + 1, path=f"/a/{rollout.model}")
        )
        asked = EngineRequest(str(number), prompt, rollout.turns[turn].answer, lora, seed=number)
        sequence = self._engines[decision.replica].submit(asked, now)
        self._flights[asked.id] = _Flight(rollout, turn, prompt, which, decision, sequence)

    def _finished(self, sequence: Sequence, now: float) -> None:
        flight = self._flights.pop(sequence.request.id)
        output = sequence.output
        self.result.cached += sequence.cached_tokens or 0
        self.result.wall = max(self.result.wall, now)
        self._endless.add(flight.rollout.model, flight.prompt + output[:-1])
        self._routers[flight.router].end(
            flight.decision,
            now,
            ok=True,
            prompt_tokens=len(flight.prompt),
            cached_tokens=sequence.cached_tokens if self._report else None,
            output_tokens=len(output),
            output_ids=output,
        )
        if flight.turn + 1 < len(flight.rollout.turns):
            longer = flight.prompt + output + flight.rollout.turns[flight.turn + 1].tokens
            self._queue(now, flight.rollout, flight.turn + 1, longer)
        else:
            self._next_rollout(now)

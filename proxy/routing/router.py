"""The routing of one proxy: chains, index, ring and load put together, and kept in step with what happens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from proxy.routing import affinity, batches, policies
from proxy.routing.blocks import EDGES, Chain, block_count, canonical_ids
from proxy.routing.chains import Chains
from proxy.routing.engine_feed import EngineFeed
from proxy.routing.index import Index
from proxy.routing.ledger import Ledger
from proxy.routing.load import Rates, ReplicaLoad, Trace
from proxy.routing.policies import Route, View
from proxy.routing.prompt import TOKENS
from proxy.routing.request import MAX_PROMPTS, RouteRequest
from proxy.routing.ring import Ring
from proxy.routing.runs import Path

HASHED_PROMPTS: Final = 64
"""Prompts of one batch that are looked up; the rest of an unsplit batch goes along with them."""
_NEXT: Final = 1e-12
"""What each start adds to a replica's `busy`, so that among equals the one used longest ago is least."""
_DOUBT: Final = 2
"""By how many engine blocks a replica must have reused less than predicted to be thought to have evicted them."""
_SIDE_BY_SIDE: Final = 8
"""Uses of the index that may belong to requests which just ended, beside two for each that is in flight."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes, and what that was based on.

    `cached_tokens` is how many prompt tokens the replica should be able to reuse, `prompt_tokens` how many there are
    (an estimate except for short lists of token ids), `sequences` how many the request makes the replica generate.
    """

    replica: int
    route: Route
    cached_tokens: int
    prompt_tokens: int
    sequences: int
    model: str
    chains: tuple[Chain, ...]
    trace: Trace

    def __repr__(self) -> str:
        return f"Decision(replica {self.replica}, {self.route}, {self.cached_tokens} of {self.prompt_tokens} tokens)"


@dataclass(slots=True)
class _Replica:
    slot: int
    key: str
    block_size: int


class Router:
    """Not safe for threads; `now` is in seconds and must not go backwards."""

    def __init__(self, policy: str = "prefix") -> None:
        if policy not in policies.POLICIES:
            raise ValueError(f"no policy is called {policy!r}; there are {', '.join(policies.POLICIES)}")
        self.policy = policy
        self._choose = policies.POLICIES[policy]
        self._index = Index()
        self.feed = EngineFeed(self._index, self._known_slot)
        """Takes what engines say of their own caches."""
        self._chains = Chains()
        self._ring = Ring({})
        self._rates = Rates()
        self._ledger = Ledger()
        self._replicas: dict[int, _Replica] = {}
        # By slot: a slot is a small number that a replica has while it is known, the bit that stands for it in masks.
        self._indices: list[int] = []
        self._loads: list[ReplicaLoad] = []
        self._busy: list[float] = []
        self._free: list[int] = []
        self._candidates: tuple[tuple[int, ...], list[int], int] = ((), [], 0)
        self._sequences = 0
        self._turn = 0
        self._routes: dict[str, int] = {"affinity": 0, "spill": 0, "new": 0, "fallback": 0}
        self._predicted = 0
        self._actual = 0
        self._doubts = 0

    # Replicas and models.

    def set_replica(self, replica: int, *, key: str, block_size: int, capacity_tokens: int | None) -> None:
        """Add a replica or change what is known of it. `key` decides where it lies on the ring: its URL."""
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = self._new(replica, key)
            self._draw_ring()
        elif known.key != key:
            known.key = key
            self._draw_ring()
        known.block_size = max(1, block_size)
        self._index.set_capacity(known.slot, capacity_tokens)

    def drop_replica(self, replica: int) -> None:
        """The replica is gone for good. What still runs on it may end later."""
        self.feed.cleared(replica)
        known = self._replicas.pop(replica, None)
        if known is not None:
            self._index.drop(known.slot)
            self._sequences -= self._loads[known.slot].sequences
            self._free.append(known.slot)
            self._candidates = ((), [], 0)
            self._draw_ring()

    def forget(self, replica: int) -> None:
        """The replica's prefix cache is empty: it was restarted, reset, or paused with clearing."""
        self.feed.cleared(replica)

    def forget_model(self, model: str) -> None:
        """The upstream name was unloaded or will mean other weights: nothing cached under it counts any more."""
        self._index.forget_model(model)

    # Requests.

    def decide(self, request: RouteRequest, model: str, candidates: Sequence[int], now: float) -> Decision:
        """Choose among `candidates` (never empty), and remember the choice for the requests that follow at once.

        `model` is the upstream name. Candidates that were never set count as idle replicas that hold nothing.
        """
        slots, allowed = self._slots(candidates)
        prompts, index = request.prompts, self._index
        if len(prompts) == 1:  # nearly always, and lists of one are slow to make
            chain = self._chains.get(prompts[0], model, request.salt)
            chains: tuple[Chain, ...] = (chain,)
            paths = [index.walk(chain.seed, chain.blocks)]
            tokens, sequences = chain.tokens, request.n
        elif prompts:
            chains = tuple([self._chains.get(prompt, model, request.salt) for prompt in prompts[:HASHED_PROMPTS]])
            paths = [index.walk(chain.seed, chain.blocks) for chain in chains]
            tokens = sum([chain.tokens for chain in chains]) * len(prompts) // len(chains)
            sequences = len(prompts) * request.n
        else:
            return self._fallback(slots, model, request.n)
        slot, route = self._choose(self._view(request, slots, allowed, chains, paths, tokens, sequences, now))
        self._routes[route] += 1
        self._turn += 1
        new = route == "new" and self.policy == "prefix"
        if new:
            self._ledger.count(slot, self._weight(slot), len(slots))
        trace = Trace(sequences=sequences)
        cached = self._record(chains, paths, model, slot, trace, new=new)
        trace.uncached = max(0, tokens - cached)
        return Decision(
            self._indices[slot],
            route,
            cached if request.reads_cache else 0,
            tokens,
            sequences,
            model,
            chains,
            trace,
        )

    def start(self, decision: Decision, now: float) -> None:
        """The request is about to be sent: it counts as load until `end`."""
        known = self._replicas.get(decision.replica)
        if known is not None and self._loads[known.slot] is decision.trace.load:
            load = self._loads[known.slot]
            load.begin(decision.trace, self._rates, now)
            load.last_turn = self._turn
            self._sequences += decision.sequences
            self._busy[known.slot] = load.sequences * load.speed + load.last_turn * _NEXT

    def first_byte(self, decision: Decision, now: float) -> None:
        """The answer began: its prompt, and all that was before it, is computed."""
        load = decision.trace.load
        if load is not None:
            load.answered(decision.trace)

    def end(
        self,
        decision: Decision,
        now: float,
        *,
        ok: bool,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        output_ids: Sequence[int] | bytes | None = None,
    ) -> None:
        """The request is over, exactly once after each `start`. The counts are the replica's own, where it gave any.

        `output_ids` are those of the only sequence (as ints, or as they stand in the answer's JSON list).
        """
        known = self._replicas.get(decision.replica)
        if known is None or self._loads[known.slot] is not decision.trace.load:
            return  # dropped meanwhile, and its slot perhaps used again
        load, slot = self._loads[known.slot], known.slot
        uncached, crowd = load.finish(decision.trace, self._rates, now)
        self._sequences -= decision.sequences
        if ok:
            if output_tokens:
                each = output_tokens / decision.sequences
                self._rates.learn(load, now - decision.trace.began, uncached, each, crowd)
            if prompt_tokens and len(decision.chains) == 1:
                self._chains.learn(decision.chains[0], prompt_tokens)
            if cached_tokens is not None:
                self._compare(decision, slot, cached_tokens, known.block_size)
            self._learn_output(decision, slot, output_tokens, output_ids)
        self._busy[slot] = load.sequences * load.speed + load.last_turn * _NEXT

    def split(
        self, request: RouteRequest, model: str, candidates: Sequence[int], now: float
    ) -> list[tuple[int, list[int]]]:
        """How to divide a batch: replicas, and the positions of the prompts that belong on each.

        Nothing is recorded: `decide` each part with that replica as its only candidate. Policies other than `prefix`
        divide evenly. A request with one prompt, or more than are looked at, is one part without a replica chosen yet:
        an empty list.
        """
        count = len(request.prompts)
        if count < 2 or count >= MAX_PROMPTS or len(candidates) < 2:
            return []
        slots, allowed = self._slots(candidates)
        if self.policy != "prefix":
            order = sorted(slots, key=self._busy.__getitem__)
            return [
                (self._indices[slot], list(range(at, count, len(order)))) for at, slot in enumerate(order) if at < count
            ]
        chains = [self._chains.get(prompt, model, request.salt) for prompt in request.prompts]
        found = batches.parts(self._index, self._ring, self._ledger, chains, slots, allowed)
        return [(self._indices[slot], positions) for slot, positions in found.items()]

    def counters(self) -> dict[str, object]:
        """Totals since the start, and the size of the index now."""
        return {
            "policy": self.policy,
            "decisions": dict(self._routes),
            "predicted_cached_tokens": self._predicted,
            "actual_cached_tokens": self._actual,
            "corrections": self._doubts,
            "blocks": self._index.blocks,
            "bytes": self._index.size(),
            "in_flight": self._sequences,
        }

    # Inside.

    def _view(
        self,
        request: RouteRequest,
        slots: list[int],
        allowed: int,
        chains: tuple[Chain, ...],
        paths: list[Path],
        tokens: int,
        sequences: int,
        now: float,
    ) -> View:
        index = self._index
        found = affinity.find(index, chains, paths, allowed) if self.policy == "prefix" else affinity.NOTHING
        limit, typical = request.max_tokens, self._rates.tokens_out
        return View(
            slots,
            allowed,
            self._loads,
            self._busy,
            self._sequences,
            self._ledger,
            self._ring,
            self._rates,
            now,
            found,
            0 if found.holders else affinity.placement_key(index, chains[0], paths[0]),
            tokens,
            typical if limit is None or limit > typical else max(1.0, limit),
            sequences,
            self._turn,
        )

    def _fallback(self, slots: list[int], model: str, sequences: int) -> Decision:
        slot = min(slots, key=self._busy.__getitem__)
        self._routes["fallback"] += 1
        self._turn += 1
        trace = Trace(sequences=sequences, load=self._loads[slot])
        return Decision(self._indices[slot], "fallback", 0, 0, sequences, model, (), trace)

    def _new(self, replica: int, key: str) -> _Replica:
        others = [known.slot for known in self._replicas.values()]
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._loads)
            self._loads.append(ReplicaLoad())
            self._busy.append(0.0)
            self._indices.append(replica)
        self._loads[slot] = ReplicaLoad()
        self._busy[slot] = 0.0
        self._indices[slot] = replica
        self._ledger.open(slot, others)
        return _Replica(slot, key, 16)

    def _known_slot(self, replica: int) -> int | None:
        known = self._replicas.get(replica)
        return None if known is None else known.slot

    def _slots(self, candidates: Sequence[int]) -> tuple[list[int], int]:
        """The candidates' slots, as a list and as a mask."""
        known, slots, mask = self._candidates
        if known is candidates:
            return slots, mask
        for replica in candidates:
            if replica not in self._replicas:
                self.set_replica(replica, key=str(replica), block_size=16, capacity_tokens=None)
        slots = [self._replicas[replica].slot for replica in candidates]
        mask = sum(1 << slot for slot in set(slots))
        self._candidates = (tuple(candidates), slots, mask)  # a tuple is kept as it is; a list may change
        return slots, mask

    def _draw_ring(self) -> None:
        self._ring = Ring({known.slot: known.key for known in self._replicas.values()})

    def _weight(self, slot: int) -> float:
        """As how many placements one on this replica counts: more than one if it is clearly slower than the fastest."""
        speed = self._loads[slot].speed
        if speed <= 1.0:
            return 1.0
        slower = speed / min([load.speed for load in self._loads])
        return slower if slower > policies.SLOW else 1.0

    def _record(
        self, chains: tuple[Chain, ...], paths: list[Path], model: str, slot: int, trace: Trace, *, new: bool
    ) -> int:
        """Enter the prompts into the index; how many of their tokens the replica holds already."""
        index = self._index
        size = self._replicas[self._indices[slot]].block_size
        cached = 0
        for at, chain in enumerate(chains):
            # The one before may have changed what was found.
            path = index.walk(chain.seed, chain.blocks) if at else paths[0]
            depth, last_use = index.holding(path, slot)
            if depth:
                # What comes after the last full block is the same too when all blocks are, or nearly always.
                whole = depth == len(chain.blocks)
                tokens = chain.tokens if whole else int(EDGES[depth] * chain.tokens_per_byte + 0.5)
                cached += max(0, min(tokens, chain.tokens - 1)) // size * size
                trace.last_use = last_use
            path = index.record(model, chain.seed, chain.blocks, chain.tokens_per_byte, slot, path)
            if new:
                index.count_prompt(chain.seed, path)
        trace.load = load = self._loads[slot]
        trace.settled = index.ticks(slot) - 2 * load.requests - _SIDE_BY_SIDE
        return cached

    def _compare(self, decision: Decision, slot: int, cached_tokens: int, block_size: int) -> None:
        """Hold what the replica reused against what was predicted.

        Where it reused clearly less, it had evicted what it was thought to hold (or was emptied behind our back), and
        with it all that was used before. Only what is older than anything that was in flight then can tell: what two
        requests compute side by side is not always shared.
        """
        self._predicted += decision.cached_tokens
        self._actual += cached_tokens
        if decision.route == "new" and len(decision.chains) == 1:
            self._ledger.answered(surprise=cached_tokens > decision.cached_tokens + _DOUBT * block_size)
        if len(decision.chains) == 1 and cached_tokens + _DOUBT * block_size < decision.cached_tokens:
            trace = decision.trace
            if 0 < trace.last_use < trace.settled:
                self._doubts += 1
                self._index.forget_older(slot, trace.last_use)

    def _learn_output(
        self, decision: Decision, slot: int, output_tokens: int | None, output_ids: Sequence[int] | bytes | None
    ) -> None:
        """What was generated is cached too, and takes room whether its tokens were seen or not."""
        if output_ids and len(decision.chains) == 1 and decision.sequences == 1:
            chain = decision.chains[0]
            if chain.kind is TOKENS:
                data = canonical_ids(output_ids)
                if block_count(chain.size + len(data)) > len(chain.blocks):  # else nothing that could be looked up
                    longer = chain.continued(data)
                    path = self._index.walk(longer.seed, longer.blocks)
                    self._index.record(decision.model, longer.seed, longer.blocks, longer.tokens_per_byte, slot, path)
                return
        if output_tokens:
            self._index.occupy(slot, output_tokens)

"""The routing of one proxy: chains, index, ring and load put together, and kept in step with what happens."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from proxy.routing import blocks as hashing
from proxy.routing import policies
from proxy.routing.blocks import EDGES, Chain
from proxy.routing.index import Index, Node, Path, bits
from proxy.routing.load import Rates, ReplicaLoad, Trace
from proxy.routing.policies import Route, View
from proxy.routing.request import Kind, Prompt, RouteRequest
from proxy.routing.ring import Ring

CHAINS: Final = 512
"""Prompts whose hashes are kept for the siblings that follow."""
HASHED_PROMPTS: Final = 64
"""Prompts of one batch that are looked up; the rest of an unsplit batch goes along with them."""
COMMON: Final = 0.25
"""What this part of the new prompts begins with says nothing about where one of them belongs."""
_LEARN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and what that was based on.

    `cached_tokens` is how many prompt tokens the replica should be able to reuse, `prompt_tokens` how many there are
    (an estimate except for short lists of token ids), `sequences` how many the request makes the replica generate.
    """

    replica: int
    route: Route
    cached_tokens: int
    prompt_tokens: int
    sequences: int
    model: str = field(repr=False)
    chains: tuple[Chain, ...] = field(repr=False, compare=False)
    trace: Trace = field(repr=False, compare=False)


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
        self._ring = Ring({})
        self._rates = Rates()
        self._replicas: dict[int, _Replica] = {}
        self._indices: list[int] = []
        self._loads: list[ReplicaLoad] = []
        self._free: list[int] = []
        self._chains: OrderedDict[tuple[int, int, int], Chain] = OrderedDict()
        self._tokens_per_byte = {Kind.TOKENS: 0.2, Kind.TEXT: 0.25, Kind.CHAT: 0.25}
        self._sequences = 0
        self._cold = policies.COLD
        self._turn = 0
        self._routes: dict[str, int] = {"affinity": 0, "spill": 0, "new": 0, "fallback": 0}
        self._predicted = 0
        self._actual = 0

    # Replicas and models.

    def set_replica(self, replica: int, *, key: str, block_size: int, capacity_tokens: int | None) -> None:
        """Add a replica or change what is known of it. `key` decides where it lies on the ring: its URL."""
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = self._new(replica, key, block_size)
            self._draw_ring()
        elif known.key != key:
            known.key = key
            self._draw_ring()
        known.block_size = max(1, block_size)
        self._index.set_capacity(known.slot, capacity_tokens)

    def drop_replica(self, replica: int) -> None:
        """The replica is gone for good. What still runs on it may end later."""
        known = self._replicas.pop(replica, None)
        if known is not None:
            self._index.drop(known.slot)
            self._sequences -= self._loads[known.slot].sequences
            self._free.append(known.slot)
            self._draw_ring()

    def forget(self, replica: int) -> None:
        """The replica's prefix cache is empty: it was restarted, reset, or paused with clearing."""
        known = self._replicas.get(replica)
        if known is not None:
            self._index.forget(known.slot)

    def forget_model(self, model: str) -> None:
        """The upstream name was unloaded or will mean other weights: nothing cached under it counts any more."""
        self._index.forget_model(model)

    # Requests.

    def decide(self, request: RouteRequest, model: str, candidates: Sequence[int], now: float) -> Decision:
        """Choose among `candidates` (never empty), and remember the choice for the requests that follow at once.

        `model` is the upstream name. Candidates that were never set count as idle replicas that hold nothing.
        """
        slots = [self._slot(replica) for replica in candidates]
        sequences = max(1, len(request.prompts)) * request.n
        chains = tuple(self._chain(p, model, request.salt) for p in request.prompts[:HASHED_PROMPTS])
        paths = [self._index.walk(c.seed, c.blocks) for c in chains]
        holders, held, asked = self._holders(chains, paths, slots) if self.policy == "prefix" else ([], 0.0, 0)
        known = sum(c.tokens for c in chains)
        tokens = known * len(request.prompts) // len(chains) if chains else 0
        out = self._rates.tokens_out if request.max_tokens is None else min(self._rates.tokens_out, request.max_tokens)
        view = View(
            candidates=slots,
            loads=self._loads,
            ring=self._ring,
            rates=self._rates,
            now=now,
            key=self._key(chains, paths),
            holders=holders,
            held_tokens=held,
            asked=asked,
            prompt_tokens=tokens,
            tokens_out=max(1.0, out),
            sequences=sequences,
            turn=self._turn,
            in_flight=self._sequences,
            cold=self._cold,
        )
        if chains:
            choice = self._choose(view)
            slot, route = choice.slot, choice.route
            self._turn += 1
        else:
            slot, route = policies.least_loaded(view).slot, "fallback"
        self._routes[route] += 1
        if route == "spill" and not self._rates.known:
            self._cold -= 1
        if route == "new" and self.policy == "prefix":
            self._placed(slot, slots)
        cached = self._record(chains, paths, model, slot, new=route == "new")
        return Decision(
            replica=self._indices[slot],
            route=route,
            cached_tokens=cached if request.reads_cache else 0,
            prompt_tokens=tokens,
            sequences=sequences,
            model=model,
            chains=chains,
            trace=Trace(uncached=max(0, tokens - cached), sequences=sequences),
        )

    def start(self, decision: Decision, now: float) -> None:
        """The request is about to be sent: it counts as load until `end`."""
        known = self._replicas.get(decision.replica)
        if known is not None:
            self._loads[known.slot].begin(decision.trace, self._rates, now)
            self._sequences += decision.sequences

    def first_byte(self, decision: Decision, now: float) -> None:
        """The answer began."""
        if decision.trace.answered is None:
            decision.trace.answered = now

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
        """The request is over, exactly once after each `start`. The counts are the replica's own, where it gave any."""
        known = self._replicas.get(decision.replica)
        if known is None:
            return
        load = self._loads[known.slot]
        work, crowd = load.finish(decision.trace, self._rates, now)
        self._sequences -= decision.sequences
        if not ok:
            return
        if output_tokens is not None:
            each = output_tokens / decision.sequences
            self._rates.learn(load, now - decision.trace.began, work, each, crowd)
        self._learn_truth(decision, prompt_tokens, cached_tokens)
        if len(decision.chains) == 1:
            self._learn_output(decision, known.slot, output_tokens, output_ids)

    def split(self, request: RouteRequest, model: str, candidates: Sequence[int], now: float) -> list[list[int]]:
        """Which prompts of a batch should go together: lists of their positions, each list for one replica."""
        return [list(range(len(request.prompts)))]

    def counters(self) -> dict[str, object]:
        """Totals since the start."""
        return {
            "policy": self.policy,
            "decisions": dict(self._routes),
            "predicted_cached_tokens": self._predicted,
            "actual_cached_tokens": self._actual,
            "blocks": self._index.blocks(),
            "in_flight": self._sequences,
        }

    # Inside.

    def _new(self, replica: int, key: str, block_size: int) -> _Replica:
        if self._free:
            slot = self._free.pop()
            self._loads[slot] = ReplicaLoad()
            self._indices[slot] = replica
        else:
            slot = len(self._loads)
            self._loads.append(ReplicaLoad())
            self._indices.append(replica)
        return _Replica(slot, key, max(1, block_size))

    def _slot(self, replica: int) -> int:
        known = self._replicas.get(replica)
        if known is None:
            self.set_replica(replica, key=str(replica), block_size=16, capacity_tokens=None)
            known = self._replicas[replica]
        return known.slot

    def _draw_ring(self) -> None:
        self._ring = Ring({known.slot: known.key for known in self._replicas.values()})

    def _chain(self, prompt: Prompt, model: str, salt: str) -> Chain:
        begin = hashing.seed(model, salt, prompt.kind)
        name = (begin, prompt.key, len(prompt.raw))
        found = self._chains.get(name)
        if found is not None:
            self._chains.move_to_end(name)
            return found
        found = hashing.chain(prompt, begin, self._tokens_per_byte[prompt.kind])
        self._chains[name] = found
        if len(self._chains) > CHAINS:
            self._chains.popitem(last=False)
        return found

    def _holders(self, chains: tuple[Chain, ...], paths: list[Path], slots: list[int]) -> tuple[list[int], float, int]:
        """The candidates that hold the most of a continuation, how many tokens, and how often it was asked before.

        None when nothing is held but what different prompts share.
        """
        best: list[int] = []
        most, asked = 0.0, 0
        for one, path in zip(chains, paths, strict=True):
            at = len(path) - 1
            while at >= 0 and not _continues(*path[at], len(one.blocks)):
                at -= 1
            if at < 0:
                continue
            holders = [slot for slot in bits(path[at][0].mask) if slot in slots]
            if not holders:
                continue
            depths = [self._index.depth(path, slot) for slot in holders]
            depth = max(depths)
            tokens = EDGES[depth] * one.tokens_per_byte
            if tokens > most:
                best = [slot for slot, its in zip(holders, depths, strict=True) if its == depth]
                most, asked = tokens, path[at][0].asked
        return best, most, asked

    def _key(self, chains: tuple[Chain, ...], paths: list[Path]) -> int:
        """What a new prompt is placed by: its first block after what many prompts begin with."""
        for one, path in zip(chains, paths, strict=True):
            if one.blocks:
                root = self._index.root(one.seed)
                many = max(2.0, COMMON * root.prompts) if root is not None else 2.0
                at = 0
                for node, matched in path:
                    if node.prompts < many and matched == len(node.blocks):
                        break
                    at = node.start + matched
                return one.blocks[min(at, len(one.blocks) - 1)]
        return 0

    def _placed(self, slot: int, slots: list[int]) -> None:
        self._loads[slot].placed += policies.weight(self._loads, slots, slot)
        for other in slots:
            self._loads[other].placed *= 1.0 - 1.0 / (policies.WINDOW * len(slots))

    def _record(self, chains: tuple[Chain, ...], paths: list[Path], model: str, slot: int, *, new: bool) -> int:
        """Enter the prompts into the index; how many of their tokens the replica holds already."""
        size = self._replicas[self._indices[slot]].block_size
        cached = 0
        for at, (one, path) in enumerate(zip(chains, paths, strict=True)):
            if at:
                path = self._index.walk(one.seed, one.blocks)
            tokens = int(EDGES[self._index.depth(path, slot)] * one.tokens_per_byte + 0.5)
            cached += max(0, min(tokens, one.tokens - 1)) // size * size
            path = self._index.record(model, one.seed, one.blocks, one.tokens_per_byte, slot, path)
            if new:
                self._index.count_prompt(one.seed, path)
        return cached

    def _learn_truth(self, decision: Decision, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        if cached_tokens is not None:
            self._predicted += decision.cached_tokens
            self._actual += cached_tokens
        if prompt_tokens and len(decision.chains) == 1:
            one = decision.chains[0]
            if one.kind is not Kind.TOKENS and one.size >= 64:
                known = self._tokens_per_byte[one.kind]
                self._tokens_per_byte[one.kind] = known + _LEARN * (prompt_tokens / one.size - known)

    def _learn_output(
        self, decision: Decision, slot: int, output_tokens: int | None, output_ids: Sequence[int] | bytes | None
    ) -> None:
        one = decision.chains[0]
        if output_ids and one.kind is Kind.TOKENS and decision.sequences == 1:
            longer = one.continued(hashing.canonical_ids(output_ids))
            path = self._index.walk(longer.seed, longer.blocks)
            self._index.record(decision.model, longer.seed, longer.blocks, longer.tokens_per_byte, slot, path)
        elif output_tokens:
            self._index.occupy(slot, output_tokens)


def _continues(node: Node, matched: int, size: int) -> bool:
    """Whether a prompt of `size` blocks that matches the run this far goes on where an earlier one ended."""
    return (node.ended and matched == len(node.blocks)) or node.start + matched == size

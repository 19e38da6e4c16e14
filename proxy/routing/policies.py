"""Where a request goes. One function a policy; each reads a `View` and returns a `Choice`, and changes nothing.

Theory
    A prompt is one of three things.

    *A continuation*: some replica holds it up to a point where an earlier prompt or answer ended. It is a sibling of a
    group (the same prompt again) or a further turn. It belongs where its blocks are (`affinity`), unless waiting there
    costs more than computing them elsewhere (`spill`); the other replica then holds them as well, and a group that is
    all the load spreads by itself.

    *New*: nothing of it is known, or only what other prompts share too (a preamble). What is shared says nothing about
    where it belongs: it is placed on the ring by what comes after the shared part (`new`), on the first replica that
    has not had more than its part of the new prompts. How much a replica had is counted in placements, not in seconds
    or requests in flight, because every proxy in front of the same replicas sees nearly the same sequence of new
    prompts, while each sees only its own requests in flight: so they agree, and one that was restarted soon does.

    *Nothing*: a body without a prompt goes where there is the least to do (`fallback`).

Worth
    A replica that has d sequences completes d / (T * (step + crowd * d)) of them a second (T tokens each; `load` learns
    the rates). So one more is worth much on an idle replica, and the less on a busy one, the more a batch slows it:
    little lost on a GPU, nearly all of it where each further sequence takes the others' time. A prompt that must be
    computed stalls all that run there. `_worth` is the difference in completed requests within the time of an answer;
    a request leaves the replica that holds its prompt when another is worth clearly more. What decides is not how busy
    a replica is at this moment (where a batch ends at once it is idle, and has the next one before the copy is
    computed) but how busy it will be while the answer is made, see `ReplicaLoad.expected`.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from proxy.routing.affinity import Found
from proxy.routing.ledger import Ledger
from proxy.routing.load import Rates, ReplicaLoad
from proxy.routing.ring import Ring

Route = Literal["affinity", "spill", "new", "fallback"]

FAIR: Final = 1.25
"""How many times the mean of the sequences in flight is no reason to copy even a popular prompt."""
SPILL: Final = 0.1
SPILL_DEAR: Final = 0.05
"""So many requests more must be completed within the time of an answer for a prompt to be computed a second time; the
second where a batch slows its replica much, so that to be even is worth more."""
PULL: Final = 0.5
"""So many for a new prompt to go elsewhere than where every other proxy would send it."""
POPULAR: Final = 16
POPULAR_IDLE: Final = 9
"""A prompt asked this often for each replica that holds it is worth another copy in any case (or: on an idle one)."""
ROOM: Final = 0.7
"""Placements above the mean that do not count against a replica: with more, two proxies agree more often; with less,
load is more even."""
SHARED_SPILL: Final = 0.5
SHARED_ROOM: Final = 1.0
SHARED_PART: Final = 0.2
"""SPILL and ROOM where other proxies serve the same replicas (see `_agree`): a copy there is one more that they do not
know of, and a home that depends on what this proxy alone has seen is one that they do not choose. The room is then this
many placements and this part of the mean. Measured with two proxies on simulated GPUs: reuse drops by 1 to 4 % instead
of up to 8, and the time of a batch grows by 2 to 6 %; where batches are dear it would grow by 25 %."""
SLOW: Final = 1.3
"""From how many times the fastest replica's time on a replica gets fewer new prompts."""
CROWDED: Final = 2.0
_FEW: Final = 8
"""No new prompt goes where this many times the mean, and a few, are in flight, whatever the ledger says."""


class View(msgspec.Struct, frozen=True, gc=False):
    """What a policy may look at. Replicas are named by their slot; `allowed` has the bits of the candidates.

    `found` says who holds a continuation (nobody: it is new); `key` is what new prompts are placed by; `busy` the
    sequences in flight by slot, times how slow the replica is.
    """

    candidates: Sequence[int]
    allowed: int
    loads: Sequence[ReplicaLoad]
    busy: Sequence[float]
    in_flight: int
    ledger: Ledger
    ring: Ring
    rates: Rates
    now: float
    found: Found
    key: int
    prompt_tokens: float
    tokens_out: float
    sequences: int
    turn: int


Choice = tuple[int, Route]
"""A slot, and why."""


def prefix(view: View) -> Choice:
    """Where the blocks are, as long as that pays."""
    other = min(view.candidates, key=view.busy.__getitem__)
    holders = view.found.holders
    if not holders:
        slot = _place(view)
        return (other if other != slot and _gain(view, slot, other) > PULL * view.sequences else slot), "new"
    holder = holders[0] if len(holders) == 1 else min(holders, key=view.busy.__getitem__)
    if other in holders:
        return other, "affinity"
    spill = SHARED_SPILL if _agree(view) else SPILL if view.rates.cheap else SPILL_DEAR
    if _popular(view, holder, other) or _gain(view, holder, other) > spill * view.sequences:
        return other, "spill"
    return holder, "affinity"


def consistent_hash(view: View) -> Choice:
    """The first replica on the ring that is not overloaded: no memory, so all proxies agree."""
    limit = FAIR * (view.in_flight + view.sequences) / len(view.candidates)
    for slot in view.ring.walk(view.key):
        if view.allowed >> slot & 1 and view.loads[slot].sequences + view.sequences <= max(limit, view.sequences):
            return slot, "new"
    return least_loaded(view)


def least_loaded(view: View) -> Choice:
    """The fewest sequences for its speed; among equals the one that was used longest ago."""
    return min(view.candidates, key=view.busy.__getitem__), "new"


def round_robin(view: View) -> Choice:
    """One after the other."""
    return view.candidates[view.turn % len(view.candidates)], "new"


def _place(view: View) -> int:
    """The ring's choice among those that had no more than their part of the new prompts."""
    candidates, ledger = view.candidates, view.ledger
    mean = ledger.mean(candidates)
    room = SHARED_ROOM + SHARED_PART * mean if _agree(view) else ROOM
    limit = max(mean + 1.0 / len(candidates) + room - 1.0, 0.0) + 1e-9
    crowded = CROWDED * (view.in_flight + view.sequences) / len(candidates) + _FEW
    for slot in view.ring.walk(view.key):
        if view.allowed >> slot & 1 and ledger.had(slot) <= limit and view.loads[slot].sequences <= crowded:
            return slot
    return ledger.least(candidates)


def _agree(view: View) -> bool:
    """Whether to choose what other proxies choose is worth more than to even out load."""
    return view.ledger.shared and view.rates.cheap


def _popular(view: View, holder: int, other: int) -> bool:
    """Whether a prompt is asked so often, and the holder has so much to do, that load should be evened out anyway."""
    least = POPULAR if view.loads[other].sequences else POPULAR_IDLE
    if view.found.asked < least * len(view.found.holders):
        return False
    fair = FAIR * (view.in_flight + view.sequences) / len(view.candidates)
    return view.loads[holder].sequences + view.sequences > fair


def _gain(view: View, slot: int, other: int) -> float:
    """How many requests more are completed if this one goes to `other`; 0 while nothing is known."""
    if not view.rates.known:
        return 0.0
    held = view.found.tokens if view.found.holders else 0.0
    return _worth(view, other, view.prompt_tokens) - _worth(view, slot, view.prompt_tokens - held)


def _worth(view: View, slot: int, uncached: float) -> float:
    """How many requests more the replica completes within the time of an answer if this one goes there too."""
    load, rates = view.loads[slot], view.rates
    beside = load.expected(rates, view.now, view.in_flight / len(view.candidates))
    before = rates.completed(beside, view.tokens_out) / load.speed
    after = rates.completed(beside + view.sequences, view.tokens_out) / load.speed
    stall = after * load.speed * rates.prefill * uncached
    waiting = view.sequences * load.pending(rates, view.now) / rates.seconds
    return rates.seconds * (after - before) - stall - waiting


POLICIES: Final[dict[str, Callable[[View], Choice]]] = {
    "prefix": prefix,
    "consistent_hash": consistent_hash,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}

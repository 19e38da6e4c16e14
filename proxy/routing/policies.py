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

    Costs are seconds (see `load`), and only differences that are sure count: a spill needs rates that were learned from
    answers, more than a fair part of the sequences in flight at the replica that holds the prompt, and a clear gain.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from proxy.routing.affinity import Found
from proxy.routing.ledger import Ledger
from proxy.routing.load import Rates, ReplicaLoad
from proxy.routing.ring import Ring

Route = Literal["affinity", "spill", "new", "fallback"]

FAIR: Final = 1.25
"""How many times the mean of the sequences in flight a replica may have before a spill is thought of."""
LOPSIDED: Final = 3.0
"""How many times what the other replica had lately (and one) a holder must have before a spill is thought of. Where a
batch ends at once, its replica is idle for a moment and the other has everything: no reason to copy a prompt (on two
real CPU replicas with four groups in flight, spills by the cost of the moment brought reuse from 1.00 of the possible
down to 0.95). Where one group is all the load, the others have been idle for as long as an answer takes."""
CLEAR: Final = 1.25
"""How many times the other replica's cost waiting must cost."""
POPULAR: Final = 16
POPULAR_IDLE: Final = 9
"""A prompt asked this often for each replica that holds it is worth another copy in any case (or: on an idle one)."""
COLD: Final = 1
COLD_CROWD: Final = 8
"""Before anything was learned, this many spills are tried, each from at least so many sequences to an idle replica: if
the first group is all the load, half of it need not wait until the rates are known."""
ROOM: Final = 0.7
"""Placements above the mean that do not count against a replica: with more, two proxies agree more often; with less,
load is more even."""
SLOW: Final = 1.3
"""From how many times the fastest replica's time on a replica gets fewer new prompts."""
CROWDED: Final = 2.0
"""No new prompt goes where this many times the mean is in flight, whatever the ledger says."""


class View(NamedTuple):
    """What a policy may look at. Replicas are named by their slot; `allowed` has the bits of the candidates.

    `found` says who holds a continuation (nobody: it is new); `key` is what new prompts are placed by, `kin` the
    sequences in flight with the same key, by slot; `busy` the
    sequences in flight by slot, times how slow the replica is; `cold` the spills that may still be tried before the
    rates are known.
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
    kin: Mapping[int, int]
    prompt_tokens: float
    tokens_out: float
    sequences: int
    turn: int
    cold: int


class Choice(NamedTuple):
    """A slot, and why."""

    slot: int
    route: Route


def prefix(view: View) -> Choice:
    """Where the blocks are, as long as that pays."""
    holders = view.found.holders
    if not holders:
        return Choice(_place(view), "new")
    holder = holders[0] if len(holders) == 1 else min(holders, key=view.busy.__getitem__)
    load = view.loads[holder]
    if load.sequences + view.sequences <= FAIR * (view.in_flight + view.sequences) / len(view.candidates):
        return Choice(holder, "affinity")
    other = min(view.candidates, key=view.busy.__getitem__)
    if other in holders:
        return Choice(other, "affinity")
    if not (_alone(view, holder) or _lopsided(view, holder, other)):
        return Choice(holder, "affinity")
    return Choice(other, "spill") if _spill_pays(view, holder, other) else Choice(holder, "affinity")


def consistent_hash(view: View) -> Choice:
    """The first replica on the ring that is not overloaded: no memory, so all proxies agree."""
    limit = FAIR * (view.in_flight + view.sequences) / len(view.candidates)
    for slot in view.ring.walk(view.key):
        if view.allowed >> slot & 1 and view.loads[slot].sequences + view.sequences <= max(limit, view.sequences):
            return Choice(slot, "new")
    return least_loaded(view)


def least_loaded(view: View) -> Choice:
    """The fewest sequences for its speed; among equals the one that was used longest ago."""
    return Choice(min(view.candidates, key=view.busy.__getitem__), "new")


def round_robin(view: View) -> Choice:
    """One after the other."""
    return Choice(view.candidates[view.turn % len(view.candidates)], "new")


def _place(view: View) -> int:
    """The ring's choice among those that had no more than their part of the new prompts."""
    candidates, ledger = view.candidates, view.ledger
    limit = max(ledger.mean(candidates) + 1.0 / len(candidates) + ROOM - 1.0, 0.0) + 1e-9
    crowded = CROWDED * (view.in_flight + view.sequences) / len(candidates) + COLD_CROWD
    for slot in view.ring.walk(view.key):
        if view.allowed >> slot & 1 and ledger.had(slot) <= limit and view.loads[slot].sequences <= crowded:
            return slot
    return ledger.least(candidates)


def _alone(view: View, holder: int) -> bool:
    """Whether this prompt's group is by itself more than a fair part of what is in flight, and of what was lately."""
    kin = view.kin.get(holder, 0) + view.sequences
    if kin <= FAIR * (view.in_flight + view.sequences) / len(view.candidates):
        return False
    peaks = [view.loads[slot].peak(view.rates, view.now) for slot in view.candidates]
    return view.rates.known and kin > sum(peaks) / len(peaks)


def _lopsided(view: View, holder: int, other: int) -> bool:
    """Whether the holder has far more than the other has had lately, or prompts queued for longer than two answers."""
    rates, now, load = view.rates, view.now, view.loads[holder]
    if load.sequences + view.sequences >= LOPSIDED * (view.loads[other].peak(rates, now) + 1.0):
        return True
    return rates.known and load.pending(rates, now) > 2.0 * rates.seconds


def _spill_pays(view: View, holder: int, other: int) -> bool:
    idle = not view.loads[other].sequences
    if view.found.asked >= (POPULAR_IDLE if idle else POPULAR) * len(view.found.holders):
        return True
    if not view.rates.known:
        return idle and view.cold > 0 and view.loads[holder].sequences >= COLD_CROWD
    here = _seconds(view, holder, view.prompt_tokens - view.found.tokens)
    there = _seconds(view, other, view.prompt_tokens)
    return there * CLEAR <= here


def _seconds(view: View, slot: int, uncached: float) -> float:
    """What a request costs on a replica: its own time, and by how much it slows the others there."""
    load, rates = view.loads[slot], view.rates
    beside = load.sequences
    own = load.speed * rates.expect(uncached, view.tokens_out, beside + view.sequences)
    others = load.speed * beside * (rates.prefill * uncached + rates.crowd * view.tokens_out * view.sequences)
    return load.pending(rates, view.now) + own + others


POLICIES: Final[dict[str, Callable[[View], Choice]]] = {
    "prefix": prefix,
    "consistent_hash": consistent_hash,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}

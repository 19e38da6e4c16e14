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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from proxy.routing.load import Rates, ReplicaLoad
from proxy.routing.ring import Ring

Route = Literal["affinity", "spill", "new", "fallback"]

FAIR: Final = 1.25
"""How much more than the mean a replica may have before others are preferred."""
PLACED: Final = 1.0
WINDOW: Final = 16.0
SLACK: Final = 0.7
CLEAR: Final = 1.25
SLOW: Final = 1.3
COLD: Final = 2
COLD_CROWD: Final = 4
POPULAR: Final = 16
POPULAR_IDLE: Final = 9


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at. Replicas are named by their slot.

    `holders` are the candidates that hold the longest part of a continuation, and `held_tokens` how much that is; empty
    for a new prompt. `key` is what new prompts are placed by.
    """

    candidates: Sequence[int]
    loads: Sequence[ReplicaLoad]
    ring: Ring
    rates: Rates
    now: float
    key: int
    holders: Sequence[int]
    held_tokens: float
    asked: int
    prompt_tokens: float
    tokens_out: float
    sequences: int
    turn: int
    in_flight: int
    cold: int


@dataclass(frozen=True, slots=True)
class Choice:
    slot: int
    route: Route


def prefix(view: View) -> Choice:
    """Where the blocks are, as long as that pays."""
    if not view.holders:
        return Choice(_place(view), "new")
    loads = view.loads
    holder = min(view.holders, key=lambda slot: (loads[slot].sequences * loads[slot].speed, loads[slot].placed))
    load = loads[holder]
    fair = FAIR * (view.in_flight + view.sequences) / len(view.candidates)
    if load.sequences + view.sequences <= fair:
        return Choice(holder, "affinity")
    other = least_loaded(view).slot
    if other in view.holders:
        return Choice(other, "affinity")
    popular = POPULAR if loads[other].sequences else POPULAR_IDLE
    if view.asked >= popular * len(view.holders):
        return Choice(other, "spill")
    if not view.rates.known:
        try_out = view.cold > 0 and load.sequences >= COLD_CROWD and not loads[other].sequences
        return Choice(other, "spill") if try_out else Choice(holder, "affinity")
    here = _seconds(view, holder, view.prompt_tokens - view.held_tokens)
    there = _seconds(view, other, view.prompt_tokens)
    return Choice(other, "spill") if there * CLEAR <= here else Choice(holder, "affinity")


def consistent_hash(view: View) -> Choice:
    """The first replica on the ring that is not overloaded: no memory, so all proxies agree."""
    limit = FAIR * (view.in_flight + view.sequences) / len(view.candidates)
    allowed = set(view.candidates)
    first = -1
    for slot in view.ring.walk(view.key):
        if slot in allowed:
            if view.loads[slot].sequences + view.sequences <= max(limit, view.sequences):
                return Choice(slot, "new")
            first = slot if first < 0 else first
    return Choice(first if first >= 0 else view.candidates[0], "new")


def least_loaded(view: View) -> Choice:
    """The fewest sequences for its speed; among equals the one that had the fewest placements."""
    loads = view.loads
    return Choice(
        min(view.candidates, key=lambda slot: (loads[slot].sequences * loads[slot].speed, loads[slot].placed)), "new"
    )


def round_robin(view: View) -> Choice:
    """One after the other."""
    return Choice(view.candidates[view.turn % len(view.candidates)], "new")


def _place(view: View) -> int:
    """The ring's choice among those that had no more than their part of the new prompts."""
    loads = view.loads
    allowed = set(view.candidates)
    limit = PLACED * (sum(loads[slot].placed for slot in view.candidates) + 1.0) / len(view.candidates) + SLACK
    limit = max(limit, 1.0)
    for slot in view.ring.walk(view.key):
        if slot in allowed and loads[slot].placed + 1.0 <= limit + 1e-9:
            return slot
    return min(view.candidates, key=lambda slot: loads[slot].placed)


def weight(loads: Sequence[ReplicaLoad], candidates: Sequence[int], slot: int) -> float:
    """As how many placements one on this replica counts: more than one if it is clearly slower than the fastest."""
    slower = loads[slot].speed / min(loads[other].speed for other in candidates)
    return slower if slower > SLOW else 1.0


def _seconds(view: View, slot: int, uncached: float) -> float:
    """What a request costs on a replica: its own time, and by how much it slows the others there."""
    load, rates = view.loads[slot], view.rates
    beside = load.sequences
    own = load.pending(view.rates, view.now) + load.speed * rates.expect(
        uncached, view.tokens_out, beside + view.sequences
    )
    others = load.speed * beside * (rates.prefill * uncached + rates.crowd * view.tokens_out * view.sequences)
    return own + others


POLICIES: Final[dict[str, Callable[[View], Choice]]] = {
    "prefix": prefix,
    "consistent_hash": consistent_hash,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}

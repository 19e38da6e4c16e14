"""plan(desired, observed) -> actions: what makes one replica equal to the desired state. Pure; the heart of the room.

An empty plan means that the replica may serve. Order matters: the pause state first, so that a replica that joins a
paused fleet never generates; then what it lacks, in commit order, so that the engine's LRU sees the newest last; then
what it should no longer have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.control.answers import Observed
from proxy.control.desired import Adapter, Desired


@dataclass(frozen=True, slots=True)
class Load:
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class Unload:
    upstream: str


@dataclass(frozen=True, slots=True)
class PauseIt:
    query: str


@dataclass(frozen=True, slots=True)
class ResumeIt:
    pass


@dataclass(frozen=True, slots=True)
class SleepIt:
    query: str


@dataclass(frozen=True, slots=True)
class WakeIt:
    pass


@dataclass(frozen=True, slots=True)
class ResetCache:
    epoch: int


Action = Load | Unload | PauseIt | ResumeIt | SleepIt | WakeIt | ResetCache


def plan(
    desired: Desired,
    observed: Observed,
    *,
    cache_epoch: int | None,
    pending: Iterable[str] = (),
    busy: Iterable[str] = (),
) -> tuple[Action, ...]:
    """The actions that are missing on a replica that shows `observed`.

    `cache_epoch` is the last epoch that this replica's cache is known to have been emptied for; None for a replica that
    was never asked (a fresh process has nothing to forget). `pending` are upstream names that a running transaction is
    working on, `busy` those with completions in flight: neither is taken away here. Names that lorafleet never offered
    (not in `desired.used`) are somebody else's and stay.
    """
    actions: list[Action] = []
    if observed.paused is not None:
        should_pause = desired.pause is not None and desired.pause.real
        if should_pause and not observed.paused and desired.pause is not None:
            actions.append(PauseIt(desired.pause.query))
        elif observed.paused and not should_pause and not observed.asleep and desired.asleep is None:
            actions.append(ResumeIt())
    if observed.asleep is not None:
        if desired.asleep is not None and not observed.asleep:
            actions.append(SleepIt(desired.asleep))
        elif observed.asleep and desired.asleep is None:
            actions.append(WakeIt())
    if cache_epoch is not None and cache_epoch < desired.cache_epoch:
        actions.append(ResetCache(desired.cache_epoch))
    kept = {adapter.upstream for adapter in desired.adapters.values()}
    for adapter in desired.adapters.values():
        if adapter.upstream not in observed.adapters:
            actions.append(Load(adapter))
        elif not same_path(observed.adapters[adapter.upstream], adapter.path):
            actions.extend((Unload(adapter.upstream), Load(adapter)))
    untouchable = kept.union(pending, busy)
    actions.extend(
        Unload(upstream) for upstream in observed.adapters if upstream in desired.used and upstream not in untouchable
    )
    return tuple(actions)


def same_path(observed: str | None, committed: str) -> bool:
    """Whether the replica loaded the name from where it should; a replica that does not say is believed."""
    return observed is None or observed.rstrip("/") == committed.rstrip("/")


def fit_to_serve(actions: Iterable[Action]) -> bool:
    """Whether a replica may serve although `actions` are still to do: only unloading what nobody can name can wait."""
    actions = tuple(actions)
    loads = {action.adapter.upstream for action in actions if isinstance(action, Load)}
    return all(isinstance(action, Unload) and action.upstream not in loads for action in actions)

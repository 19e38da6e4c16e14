"""plan(desired, observed) -> actions: what makes one replica equal to the desired state. Pure; the heart of the room.

An empty plan means that the replica may serve. Order matters: the pause state first, so that a replica that joins a
paused fleet never generates; then what it lacks, in commit order, so that the engine's LRU sees the newest last; then
what it should no longer have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
class Replace:
    """What the replica lists under this name is not (for sure) what it should be: off with it, and load it anew."""

    adapter: Adapter


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


Action = Load | Unload | Replace | PauseIt | ResumeIt | SleepIt | WakeIt | ResetCache


Switch = PauseIt | ResumeIt | SleepIt | WakeIt


def plan(
    desired: Desired,
    observed: Observed,
    *,
    cache_epoch: int | None,
    sleeps: bool | None = False,
    pending: Iterable[str] = (),
    busy: Iterable[str] = (),
    tainted: Collection[str] = (),
) -> tuple[Action, ...]:
    """The actions that are missing on a replica that shows `observed`.

    `cache_epoch` is the last epoch that this replica's cache is known to have been emptied for; None for a replica that
    was never asked (a fresh process has nothing to forget). `sleeps` is whether it was put to sleep as far as anybody
    knows (None: nobody knows). `pending` are upstream names that a running transaction is working on, `busy` those with
    completions in flight: neither is taken away here. A `tainted` name is listed with weights that nobody is sure of.
    Names that lorafleet never offered (not in `desired.used`) are somebody else's and stay.
    """
    actions: list[Action] = list(switches(desired, observed, sleeps))
    if cache_epoch is not None and cache_epoch < desired.cache_epoch:
        actions.append(ResetCache(desired.cache_epoch))
    kept = {adapter.upstream for adapter in desired.adapters.values()}
    for adapter in desired.adapters.values():
        if adapter.upstream not in observed.adapters:
            actions.append(Load(adapter))
        elif adapter.upstream in tainted or not adapter.loaded_from(observed.adapters[adapter.upstream]):
            actions.append(Replace(adapter))
    untouchable = kept.union(pending, busy)
    actions.extend(
        Unload(upstream) for upstream in observed.adapters if upstream in desired.used and upstream not in untouchable
    )
    return tuple(actions)


def switches(desired: Desired, observed: Observed, sleeps: bool | None) -> Iterator[Switch]:
    """Pause and sleep. To sleep pauses an engine and to wake resumes it; one that is paused says that it sleeps,
    whether it does or not (observed on 0.27.1)."""
    if desired.asleep is not None:
        if sleeps is not True or observed.asleep is False:
            yield SleepIt(desired.asleep)
        return
    wake = sleeps is not False and observed.asleep is True
    if wake:
        yield WakeIt()
    if desired.pause is not None and desired.pause.real:
        if wake or observed.paused is False:
            yield PauseIt(desired.pause.query)
    elif observed.paused:
        yield ResumeIt()


def intruders(desired: Desired, observed: Observed) -> list[str]:
    """Names of ours that the replica lists with somebody else's weights; its cache may hold blocks of those."""
    return [
        adapter.upstream
        for adapter in desired.adapters.values()
        if adapter.upstream in observed.adapters and not adapter.loaded_from(observed.adapters[adapter.upstream])
    ]


def same_path(observed: str | None, committed: str) -> bool:
    """Whether the replica loaded the name from where it should; a replica that does not say is believed."""
    return observed is None or observed.rstrip("/") == committed.rstrip("/")


def fit_to_serve(actions: Iterable[Action]) -> bool:
    """Whether a replica may serve although `actions` are still to do: only unloading what nobody can name can wait."""
    return all(isinstance(action, Unload) for action in actions)

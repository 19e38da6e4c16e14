"""The ledger of adapter slots. Pure.

An engine has max_loras slots and fills them by LRU: an unload only forgets the name, so an unloaded adapter (a ghost)
keeps its slot until something pushes it out, and one load too many pushes out whatever was used least recently, listed
or not (vLLM #54839, #42633). Two rules keep a listed version from being pushed out:

1. No more versions are listed than the smallest max_loras of the fleet (`room_for`).
2. When the next load would push out a listed version although ghosts hold slots, the listed ones are used once first
   (`to_touch`), which makes the ghosts the oldest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from proxy.control.desired import Adapter, Desired


def split_version(name: str) -> tuple[str, int] | None:
    """("trl-policy", 7) of "trl-policy-v7"; None for a name without a version."""
    stem, dash_v, number = name.rpartition("-v")
    return (stem, int(number)) if dash_v and stem and number.isascii() and number.isdigit() else None


def of_earlier_runs(desired: Desired, name: str) -> list[Adapter]:
    """Listed versions that a run before this one left, oldest commit first, as `name` is about to be loaded.

    Every run numbers from v1 again (TRL), so once a lower number of the same policy is committed after a higher one,
    the higher ones, committed before it, belong to an earlier run.
    """
    asked = split_version(name)
    if asked is None:
        return []
    stem, number = asked
    earlier, lowest = [], number
    for adapter in sorted(desired.adapters.values(), key=lambda a: -a.order):
        version = split_version(adapter.name)
        if version is None or version[0] != stem or adapter.name == name:
            continue
        if version[1] > lowest:
            earlier.append(adapter)
        else:
            lowest = min(lowest, version[1])
    return earlier[::-1]


def to_make_room(
    desired: Desired, name: str, max_loras: int | None, running: Mapping[str, int], *, coming: Collection[str] = ()
) -> list[Adapter] | None:
    """Versions to retire so that `name` can be listed: none, or idle ones of earlier runs. None: there is no room.

    `coming` are names that other loads will bind soon: each needs a slot, and to retire what it means now frees none.
    """
    if max_loras is None or name in desired.adapters:
        return []
    excess = len(desired.adapters.keys() | set(coming)) + 1 - max_loras
    if excess <= 0:
        return []
    idle = [
        adapter
        for adapter in of_earlier_runs(desired, name)
        if not running.get(adapter.upstream) and adapter.name not in coming
    ]
    return idle[:excess] if len(idle) >= excess else None


def refusal(
    desired: Desired, name: str, max_loras: int, running: Mapping[str, int], *, coming: Sequence[str] = ()
) -> str:
    """Why there is no room, with the numbers and the mend."""
    listed = [
        f"{a.name} ({running.get(a.upstream, 0)} in flight)"
        for a in sorted(desired.adapters.values(), key=lambda a: a.order)
    ]
    listed += [f"{other} (being loaded)" for other in coming if other not in desired.adapters]
    return (
        f"loading {name!r} would make an engine evict a listed version: {len(listed)} of "
        f"max_loras={max_loras} slots hold listed versions: {', '.join(listed)}. Unload one first, or start the "
        f"replicas with --max-loras {len(listed) + 1} or more (TRL needs max_staleness + 2)"
    )


def to_touch(
    recent: Iterable[str],
    listed: Collection[str],
    capacity: int | None,
    incoming: str,
    running: Collection[str] = (),
) -> Sequence[str]:
    """Listed names to use once before `incoming` is loaded, because the engine would push one of them out.

    `recent` are the names that hold slots, least recently used first; `running` those with completions in flight, which
    the engine uses at every step. Empty when the engine has room or would push out a ghost anyway.
    """
    if not any(name in listed for name in pushed_out(recent, capacity, incoming, running)):
        return ()
    return [name for name in recent if name in listed and name not in running and name != incoming]


def pushed_out(
    recent: Iterable[str], capacity: int | None, incoming: str, running: Collection[str] = ()
) -> Sequence[str]:
    """The names that lose their slots when `incoming` is loaded (and those that lost them before)."""
    if capacity is None:
        return ()
    held = sorted((name for name in recent if name != incoming), key=lambda name: name in running)
    return held[: max(0, len(held) + 1 - capacity)]

"""Which versions to unload and which files to delete after a publish. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Versions to unload from the fleet, and versions whose files may go; both ascending."""

    unload: tuple[int, ...]
    delete: tuple[int, ...]


def retain(
    current: int, *, listed: Set[int] | None, on_disk: Set[int], max_staleness: int, keep: int | None
) -> Retention:
    """What falls out of the window when `current` has just been loaded.

    `listed` is what the fleet listed before that load (None: no fleet is known), `on_disk` what the root holds.
    The newest `max_staleness + 1` versions stay loaded, `current` among them. Files stay one publish longer than the
    unload, at least the newest `keep`, and always while the fleet lists them: an engine reads an adapter's files when
    it first needs them, not when it is told of it.
    """
    older_loaded = sorted(n for n in listed or () if n < current)
    stay = older_loaded[max(0, len(older_loaded) - max_staleness) :]
    unload = tuple(n for n in older_loaded if n not in stay)
    older_files = sorted(n for n in on_disk if n < current)
    protected = max(max_staleness + 2, keep or 0) - 1
    candidates = older_files[: max(0, len(older_files) - protected)]
    return Retention(unload, tuple(n for n in candidates if n not in older_loaded))

"""Who belongs to the fleet beside those that the command line names: what the operator did at run time. Pure.

The rule for a start: what was done at run time holds until it is taken back at run time, or until the command line
changes its mind. A replica that was added comes back. One that the command line names and that was removed stays out as
long as every start names it: the same command run again, by a supervisor or by hand, gives the same fleet. To have it
back, add it, or leave it off the command line for one start. One that was drained is drained.

What a `dns://` name says is not remembered: an address may be another machine's by the next start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Roster:
    """Replicas by URL: `added` at run time, in that order; `removed` at run time although a start named them;
    `drained`."""

    added: tuple[str, ...] = ()
    removed: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()

    def join(self, base: str) -> Roster:
        added = (*(known for known in self.added if known != base), base)
        return replace(self, added=added, removed=self.removed - {base}, drained=self.drained - {base})

    def leave(self, base: str, named: bool) -> Roster:
        """`named`: the command line does so; otherwise nothing brings it back at the next start anyway."""
        added = tuple(known for known in self.added if known != base)
        removed = self.removed | {base} if named else self.removed
        return replace(self, added=added, removed=removed, drained=self.drained - {base})

    def drain(self, base: str) -> Roster:
        return replace(self, drained=self.drained | {base})

    def undrain(self, base: str) -> Roster:
        return replace(self, drained=self.drained - {base})

    def at_start(self, named: Collection[str]) -> Roster:
        """What is left of it for a start that names these replicas. If nobody would be left, nobody is removed."""
        added = tuple(base for base in self.added if base not in named)
        removed = self.removed.intersection(named)
        if not added and removed == set(named):
            removed = frozenset()
        return Roster(added, removed, self.drained.intersection({*named, *added} - removed))

"""What the fleet should be: adapters, pause, cache epoch. Immutable values and pure edits.

Two names matter for an adapter. `name` is what clients say. `upstream` is what the replicas are told. They are the same
the first time a name is bound; when a name comes back with other weights it goes upstream under a name never used
before, because vLLM keys its prefix cache by the name (observed on 0.27.1: a re-used name was answered from the old
weights' blocks).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from proxy.control.roster import Roster


@dataclass(frozen=True, slots=True)
class Adapter:
    """One committed binding of a name to weights.

    `digest` is "sha256:<hex>" of the adapter's files (trainer_client.digest), None when nobody could say.
    `order` grows with each commit: the newest binding has the largest. `also` are other paths that replicas may have
    loaded the same weights from.
    """

    name: str
    path: str
    digest: str | None
    upstream: str
    order: int = 0
    also: tuple[str, ...] = ()

    def loaded_from(self, path: str | None) -> bool:
        """Whether a replica that lists it with this path has the right weights; one that names no path is believed."""
        return path is None or path.rstrip("/") in {known.rstrip("/") for known in (self.path, *self.also)}


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause that is in force. `query` is what the client sent ("mode=keep"), replayed to replicas that join.

    `real` is False for a lazy pause that the replicas have not been told of. `since` is wall-clock seconds.
    """

    query: str
    since: float
    real: bool = True


@dataclass(frozen=True, slots=True)
class Desired:
    """The whole desired state. `version` grows with every edit; two states with the same version are the same.

    `adapters` maps client names to bindings, in commit order. `retiring` are bindings that clients can no longer name
    and that replicas give up once nothing runs on them. `used` maps every upstream name that was ever offered to a
    replica to its digest: such a name may have blocks in a prefix cache. `asleep` is the query of /sleep, or None.
    `met` are the replicas (URLs) whose prefix caches hold nothing from before lorafleet or from before the last reset;
    a replica that leaves is unknown again, whoever is behind its address when it comes back. `roster` is who belongs to
    the fleet by the operator's word.
    """

    version: int = 0
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))
    retiring: tuple[Adapter, ...] = ()
    used: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}))
    pause: Pause | None = None
    asleep: str | None = None
    cache_epoch: int = 0
    order: int = 0
    met: frozenset[str] = frozenset()
    roster: Roster = field(default_factory=Roster)

    def reserve(self, upstream: str, digest: str | None) -> Desired:
        """Remember that `upstream` is about to be offered to replicas with these weights."""
        return replace(self, version=self.version + 1, used=MappingProxyType({**self.used, upstream: digest}))

    def bind(self, adapter: Adapter) -> Desired:
        """Commit a binding; the one that the name had before, if any, retires unless it is the same weights."""
        known = self.by_upstream(adapter.upstream)
        paths = (*known.also, known.path) if known is not None else ()
        also = tuple(path for path in dict.fromkeys(paths) if path != adapter.path)
        adapter = replace(adapter, order=self.order + 1, also=also)
        old = self.adapters.get(adapter.name)
        kept = {name: bound for name, bound in self.adapters.items() if name != adapter.name}
        retiring = tuple(r for r in self.retiring if r.upstream != adapter.upstream)
        if old is not None and old.upstream != adapter.upstream:
            retiring += (old,)
        return replace(
            self,
            version=self.version + 1,
            order=self.order + 1,
            adapters=MappingProxyType({**kept, adapter.name: adapter}),
            retiring=retiring,
            used=MappingProxyType({**self.used, adapter.upstream: adapter.digest}),
        )

    def unbind(self, name: str, upstream: str | None = None) -> Desired:
        """Clients can no longer name it; it retires. Nothing happens when the name means something else than `upstream`
        by now, or nothing."""
        old = self.adapters.get(name)
        if old is None or upstream not in (None, old.upstream):
            return self
        kept = {key: bound for key, bound in self.adapters.items() if key != name}
        return replace(self, version=self.version + 1, adapters=MappingProxyType(kept), retiring=(*self.retiring, old))

    def retired(self, upstream: str) -> Desired:
        """No replica holds this retiring binding any more."""
        return replace(
            self, version=self.version + 1, retiring=tuple(r for r in self.retiring if r.upstream != upstream)
        )

    def with_pause(self, pause: Pause | None) -> Desired:
        return replace(self, version=self.version + 1, pause=pause)

    def with_sleep(self, query: str | None) -> Desired:
        return replace(self, version=self.version + 1, asleep=query)

    def next_epoch(self, missed: Iterable[str]) -> Desired:
        """The prefix caches were emptied on purpose, all but those of the `missed` replicas."""
        return replace(
            self,
            version=self.version + 1,
            cache_epoch=self.cache_epoch + 1,
            met=self.met.difference(missed),
        )

    def with_met(self, replica: str) -> Desired:
        """The cache of this replica (URL) was emptied."""
        return replace(self, version=self.version + 1, met=self.met | {replica})

    def joined(self, replica: str) -> Desired:
        """The operator added this replica (URL)."""
        return replace(
            self, version=self.version + 1, roster=self.roster.join(replica), met=self.met.difference({replica})
        )

    def left(self, replica: str, named: bool) -> Desired:
        """This replica (URL) is not of the fleet any more, and its cache may serve others. `named`: by the command
        line."""
        return replace(
            self, version=self.version + 1, roster=self.roster.leave(replica, named), met=self.met.difference({replica})
        )

    def with_drained(self, replica: str, drained: bool) -> Desired:
        roster = self.roster.drain(replica) if drained else self.roster.undrain(replica)
        return replace(self, version=self.version + 1, roster=roster)

    def at_start(self, named: Collection[str], before: Collection[str], *, follows: bool) -> Desired:
        """What is left of it for a start whose command line names these replicas. `before` are those that the last
        start named; `follows`: a dns:// name may bring more."""
        roster = self.roster.at_start(named)
        members = {*named, *roster.added} - roster.removed
        met = {base for base in self.met if base in members or (follows and base not in before)}
        return replace(self, roster=roster, met=frozenset(met))

    def by_upstream(self, upstream: str) -> Adapter | None:
        for adapter in (*self.adapters.values(), *self.retiring):
            if adapter.upstream == upstream:
                return adapter
        return None


def choose_upstream(desired: Desired, name: str, digest: str | None, *, seen: frozenset[str], nonce: str) -> str:
    """The upstream name under which weights may be offered so that no cached block of other weights can match.

    `seen` are the names that any replica lists now without lorafleet's doing: their weights are unknown. `nonce` is a
    string never used before, taken when no digest can make the name unique.
    """
    if name not in seen:
        if name not in desired.used:
            return name
        if digest is not None and desired.used[name] == digest:
            return name
    if digest is not None:
        alias = f"{name}@{digest.rpartition(':')[2][:12]}"
        if alias not in seen and desired.used.get(alias, digest) == digest:
            return alias
    return f"{name}@{nonce}"

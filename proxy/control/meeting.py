"""The first look at replicas: what a proxy does with a past that it does not know."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from proxy.control import edits
from proxy.control.acting import emptied
from proxy.control.adoption import adoptable
from proxy.control.answers import Observed, Outcome
from proxy.control.desired import Adapter
from proxy.control.plane import Plane
from proxy.errors import LorafleetError

if TYPE_CHECKING:
    from proxy.fleet import Replica

logger = logging.getLogger("lorafleet.reconcile")


class Meeting:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._seen: dict[int, Observed | None] = {}
        self._adopted = False
        self._turn = asyncio.Lock()
        self._cannot_reset: set[int] = set()

    def saw(self, index: int, seen: Observed | None) -> None:
        """What the first look at a replica showed; None: it did not answer."""
        self._seen.setdefault(index, seen)

    async def empty_cache(self, replica: Replica) -> bool:
        """A replica whose past no journal tells may hold cached blocks under any name: empty its cache once.

        That is refused while anything runs there. Then names are bound under aliases that nobody can have used before
        (`AdapterChanges` looks at `stale_cache`), and the replica may serve if all names are. False: it must wait.
        """
        plane, index = self._plane, replica.index
        if not replica.stale_cache or index in self._cannot_reset:
            return True
        plain = any("@" not in adapter.upstream for adapter in plane.fleet.desired.adapters.values())
        target = "/reset_prefix_cache?reset_running_requests=true" if plain else "/reset_prefix_cache"
        answer = await plane.calls.post(replica.endpoint, target, plane.settings.admin_timeout_secs)
        if answer.outcome is Outcome.REFUSED and answer.status in (404, 405, 501):
            logger.warning("replica %d cannot empty its prefix cache; names are bound under aliases", index)
            self._cannot_reset.add(index)
            return True
        if not emptied(answer):
            plane.fleet.set_error(
                index, f"its prefix cache cannot be emptied: {answer.message or 'requests run there'}"
            )
            return answer.ok and not plain
        replica.stale_cache = False
        plane.fleet.forget_cache(index)
        try:
            await plane.edit(edits.met(replica.endpoint.base))
        except LorafleetError as error:  # the next proxy empties it once more
            logger.warning("%s", error.message)
        return True

    async def adopt(self) -> bool:
        """Once, without a journal: what all replicas hold alike is taken over. False while a replica is unseen."""
        plane, fleet = self._plane, self._plane.fleet
        if self._adopted:
            return True
        if any(replica.index not in self._seen for replica in fleet.members()):
            return False
        async with self._turn:
            if not self._adopted and not plane.remembers and not fleet.desired.adapters:
                for name, upstream, path in adoptable([seen for seen in self._seen.values() if seen is not None]):
                    logger.info("adopted %s from the replicas", name)
                    await plane.edit(edits.bind(Adapter(name, path, None, upstream)))
            self._adopted = True
        return True

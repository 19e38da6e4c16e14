"""Loading and unloading adapters: what clients may ask, and its place in the queue."""

from __future__ import annotations

import asyncio

from proxy.control.adapter_files import NAME, check_name, check_path
from proxy.control.loads import Load, LoadRequest
from proxy.control.plane import Plane
from proxy.control.queue import Stopwatch, Turn
from proxy.control.sight import STAT_SECS, fingerprint
from proxy.control.unloads import unload
from proxy.errors import BadRequest, NotFound, Unavailable


class AdapterChanges:
    """Load and unload. Both are queued and survive the client that asked."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def load(self, name: object, path: object, digest: object = None) -> str:
        """Bind a name to the weights at a path on every replica that may serve; returns vLLM's own sentence.

        Raises BadRequest, Conflict (no slot), Unavailable (no replica), TransactionFailed (undone).
        """
        plane = self._plane
        request = LoadRequest(
            check_name(name, plane.fleet.base_models()),
            await self._path(path),
            check_digest(digest),
        )
        # The files are part of the key: a request for what has been written since is not the same request.
        key = ("load", request, await fingerprint(plane, request.path))

        async def change(turn: Turn, watch: Stopwatch) -> None:
            await Load(plane, request, turn, watch).run()

        await plane.queue.by_turns("load", request.name, key, change)
        return f"Success: LoRA adapter '{request.name}' added successfully."

    async def _path(self, path: object) -> str:
        """Raises BadRequest, and Unavailable for one whose links cannot be resolved now."""
        roots = self._plane.settings.adapter_roots
        if not roots:
            return check_path(path, roots)  # touches no file
        try:
            async with asyncio.timeout(STAT_SECS):
                return str(await self._plane.in_thread(check_path, path, roots))
        except TimeoutError:
            raise Unavailable("lora_path leads to a mount that does not answer; nothing was changed") from None

    async def unload(self, name: object) -> str:
        """Take a name away; returns vLLM's own sentence.

        Raises BadRequest, NotFound, Unavailable, TransactionFailed (the name stays usable).
        """
        if not isinstance(name, str) or not name:
            raise BadRequest("lora_name must be a non-empty string", param="lora_name")
        if not NAME.fullmatch(name):
            raise NotFound("no lora adapter can have this name", param="lora_name")
        await self._plane.queue.one_at_a_time(
            "unload", name, ("unload", name), lambda watch: unload(self._plane, name, watch)
        )
        return f"Success: LoRA adapter '{name}' removed successfully."


def check_digest(digest: object) -> str | None:
    """What a client says of the weights, or None. Raises BadRequest."""
    if digest is None:
        return None
    if not isinstance(digest, str) or not 8 <= len(digest) <= 200 or not digest.isprintable():
        raise BadRequest('digest must be a string like "sha256:<hex>"', param="digest")
    return digest

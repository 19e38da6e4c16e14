"""What the proxy sees of an adapter's files, or that it does not see them: it never waits for a mount that hangs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.control.adapter_files import Fingerprint, Seen
    from proxy.control.plane import Plane

logger = logging.getLogger("lorafleet.control")

STAT_SECS = 5.0
"""A mount that does not say within this time whether a file is there hangs."""

READ_SECS = 120.0
"""For all bytes of an adapter, unless the caller has less time."""


async def mark(plane: Plane, path: str) -> Fingerprint | None:
    """The fingerprint of the files at `path`. Raises TimeoutError for a mount that hangs."""
    return await _within(plane, STAT_SECS, plane.files.fingerprint, path)  # type: ignore[no-any-return]


async def see(plane: Plane, path: str, secs: float = READ_SECS) -> Seen | None:
    """The adapter at `path`, None when there is no whole one. Raises TimeoutError for a mount that hangs."""
    if await mark(plane, path) is None:
        return None
    return await _within(plane, secs, plane.files.look, path)  # type: ignore[no-any-return]


async def fingerprint(plane: Plane, path: str) -> Fingerprint | None:
    """`mark`, or None."""
    try:
        return await mark(plane, path)
    except TimeoutError:
        return None


async def look(plane: Plane, path: str, secs: float = READ_SECS) -> Seen | None:
    """`see`, or None."""
    try:
        return await see(plane, path, secs)
    except TimeoutError:
        return None


async def _within(plane: Plane, secs: float, call: Callable[..., Any], path: str) -> Any:
    """Not begun while an earlier call on this path still hangs: its thread is enough."""
    if path in plane.hanging:
        raise TimeoutError
    task = asyncio.ensure_future(plane.in_thread(call, path))
    try:
        await asyncio.wait({task}, timeout=secs)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        return task.result()
    logger.warning("%s does not answer within %g s; going on as if this machine did not see it", path, secs)
    plane.hanging[path] = task
    task.add_done_callback(lambda done: _came_back(plane, path, done))
    raise TimeoutError


def _came_back(plane: Plane, path: str, done: asyncio.Future[Any]) -> None:
    if plane.hanging.get(path) is done:
        del plane.hanging[path]
    if not done.cancelled():
        done.exception()

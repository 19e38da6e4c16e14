"""Files that may still be on their way when a load is asked for: what is waited for, and what is known afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.control import sight
from proxy.control.sight import see
from proxy.errors import TransactionFailed

if TYPE_CHECKING:
    from proxy.control.adapter_files import Fingerprint, Seen
    from proxy.control.plane import Plane

SETTLED_SECS = 10.0
"""Files that are not what they should be, and have not changed for so long, are not being copied any more."""

FIRST_LOOK_SECS = 0.05
LAST_LOOK_SECS = 0.4


async def arrived(plane: Plane, path: str, digest: str | None, deadline: float) -> Seen | None:
    """The adapter at `path` once it is whole and has the digest that the trainer named (None: it named none).

    None when the proxy has nothing to go by: it sees no files there, or half of them and no change; the replicas will
    say. `deadline` is loop time. Raises TransactionFailed for a whole adapter that goes on having another digest.
    """
    clock = asyncio.get_running_loop().time
    since, delay = clock(), FIRST_LOOK_SECS
    last: Fingerprint | None = None
    while True:
        try:
            seen = await see(plane, path, max(deadline - clock(), 1.0))
            mark = seen.fingerprint if seen is not None else await sight.mark(plane, path)
        except TimeoutError:
            return None
        if seen is not None and digest in (None, seen.digest):
            return seen
        if mark is None:
            return None
        if mark != last:
            last, since = mark, clock()
        if clock() >= min(deadline, since + SETTLED_SECS):
            break
        await asyncio.sleep(delay)
        delay = min(delay * 1.6, LAST_LOOK_SECS)
    if seen is None:
        return None
    raise TransactionFailed(
        f"the files at {path} do not have the digest {digest} that the request names; nothing was loaded", status=409
    )


def written_before(seen: Seen, moment: float) -> bool:
    """Whether these files were written before `moment` (wall-clock seconds), by their own account: who read them since
    has read the same bytes."""
    return all(modified < moment * 1e9 for _, _, modified, _ in seen.fingerprint)

"""Looking up all addresses of a name."""

from __future__ import annotations

import asyncio
import socket


async def resolve(name: str, port: int) -> list[str]:
    """Base URLs of every address that `name` has now. Raises OSError when it has none.

    IPv6 addresses count only where there is no IPv4 one: a replica that has both must not be taken for two.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    addresses = sorted({str(info[4][0]) for info in found})
    old = [address for address in addresses if ":" not in address]
    return [f"http://{address}:{port}" for address in old] or [f"http://[{address}]:{port}" for address in addresses]

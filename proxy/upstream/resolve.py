"""Looking up all addresses of a name."""

from __future__ import annotations

import asyncio
import socket


async def resolve(name: str, port: int) -> list[str]:
    """Base URLs of every address that `name` has now. Raises OSError when it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    addresses = {info[4][0] for info in found}
    return sorted(f"http://[{a}]:{port}" if ":" in str(a) else f"http://{a}:{port}" for a in addresses)

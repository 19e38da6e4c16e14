"""`lorafleet doctor URL...`: is this fleet fit for adapter-only RL? Asks each replica, changes nothing that stays."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from proxy.control.answers import Answer, Observed, Outcome
from proxy.doctor_checks import Examined, Line, compare, examine
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint
from proxy.upstream.vllm import VllmCalls

TIMEOUT_SECS = 10.0
LOAD_SECS = 60.0
LOOKS = 6


async def diagnose(
    endpoints: Sequence[Endpoint], *, adapter: str | None, max_staleness: int, rank: int | None
) -> list[Line]:
    """Every line, replica by replica, then what must be the same on all. `adapter` is an absolute path or None."""
    transport = LeanTransport()
    try:
        found = await asyncio.gather(*(_look(transport, i, e, adapter) for i, e in enumerate(endpoints)))
    finally:
        await transport.close()
    lines = [line for one in found for line in examine(one, max_staleness, rank)]
    return lines + (compare(found) if len(found) > 1 else [])


async def _look(transport: LeanTransport, index: int, endpoint: Endpoint, adapter: str | None) -> Examined:
    calls = VllmCalls(transport)
    one = Examined(index, reachable=False, token_sent=endpoint.token() is not None)
    health = await calls.health(endpoint, TIMEOUT_SECS)
    if health.status is None or health.status >= 500:
        said = f"/health answered {health.status}" if health.status else f"/health: {health.message}"
        return replace(one, error=said)
    bare = await calls.observe(Endpoint(endpoint.base), TIMEOUT_SECS)
    seen = await calls.observe(endpoint, TIMEOUT_SECS)
    one = replace(one, reachable=True, without_token=bare.status if isinstance(bare, Answer) else 200)
    if isinstance(seen, Answer):
        return replace(one, models_status=seen.status, error=seen.message)
    info, paused = await asyncio.gather(
        calls.server_info(endpoint, "config_format=json", TIMEOUT_SECS),
        calls.get(endpoint, "/is_paused", TIMEOUT_SECS),
    )
    nameless = await calls.post(endpoint, "/v1/load_lora_adapter", TIMEOUT_SECS, b'{"lora_name":"","lora_path":""}')
    one = replace(
        one,
        models_status=200,
        facts=await calls.facts(endpoint, seen, TIMEOUT_SECS),
        server_info=info.status,
        paused_status=paused.status,
        is_paused=seen.paused,
        load_route=nameless.status,
        adapters=tuple(seen.adapters),
    )
    return one if adapter is None else await _try_adapter(calls, endpoint, one, adapter)


async def _try_adapter(calls: VllmCalls, endpoint: Endpoint, one: Examined, adapter: str) -> Examined:
    """Load the probe adapter under a name never used, look at it on several connections, unload it."""
    name = f"lorafleet-doctor-{secrets.token_hex(4)}"
    answer = await calls.load(endpoint, name, adapter, LOAD_SECS)
    if not answer.ok:
        words = "it does not see the directory" if answer.outcome is Outcome.NOT_VISIBLE else answer.message
        return replace(one, probe=f"{adapter}: {words}" if words else f"{adapter}: answered {answer.status}")
    listed = 0
    try:
        for _ in range(LOOKS):
            fresh = LeanTransport()  # a connection of its own each time: a balancer may send it elsewhere
            try:
                seen = await VllmCalls(fresh).observe(endpoint, TIMEOUT_SECS)
            finally:
                await fresh.close()
            listed += isinstance(seen, Observed) and name in seen.adapters
    finally:
        await calls.unload(endpoint, name, TIMEOUT_SECS)
    return replace(one, probe="", looks=LOOKS, engines=listed)

"""The whole application behind uvicorn in this event loop, over replicas that the test names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from proxy.config import Options, build
from proxy.server import bind
from proxy.web.app import App
from proxy.web.client_connection import ClientConnection


@dataclass(frozen=True, slots=True)
class Running:
    """`client` talks to the proxy at `address`; `app.parts` are its organs."""

    app: App
    client: httpx.AsyncClient
    address: str

    async def until(self, condition: Any, secs: float = 20.0) -> None:
        """Wait until `condition()` holds."""
        async with asyncio.timeout(secs):
            while not condition():
                await asyncio.sleep(0.01)

    async def ready(self, count: int) -> None:
        await self.until(lambda: len(self.app.parts.fleet.ready()) == count)

    async def load(self, name: str, path: Path | str, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": False, **more}
        return await self.client.post("/v1/load_lora_adapter", json=body)

    async def complete(self, model: str, prompt: Any, **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "return_token_ids": True, **more}
        return await self.client.post("/v1/completions", json=body)


@contextlib.asynccontextmanager
async def running(
    urls: list[str], state_dir: Path, *, wait: bool = True, environment: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Running]:
    """`wait`: until all replicas are ready. `options` as in `proxy.config.Options`."""
    merged = {"port": 0, "probe_secs": 0.1, "log_level": "error", "state_dir": str(state_dir), **options}
    settings = build(urls, Options(**merged), environment=environment or {})
    sock = bind(settings.host, settings.port)
    app = App(settings)
    server = uvicorn.Server(
        uvicorn.Config(
            app, http=ClientConnection, ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=2
        )
    )
    task = asyncio.create_task(server._serve(sockets=[sock]))
    address = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as client:
            it = Running(app, client, address)
            await it.until(lambda: server.started)
            if wait:
                await it.ready(len(urls))
            yield it
    finally:
        server.should_exit = True
        await task

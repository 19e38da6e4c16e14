"""Runs the application under uvicorn: bind first, then everything else; end within ten seconds of the first signal."""

from __future__ import annotations

import errno
import logging
import socket
import sys

import uvicorn

from proxy.config import Settings
from proxy.errors import ConfigError
from proxy.garbage import calm
from proxy.malloc import keep_heap
from proxy.web.app import App
from proxy.web.client_connection import ClientConnection

GRACE_SECS = 7
"""What runs when the process is told to end may go on for so long; then its connections are closed."""

CLIENT_IDLE_SECS = 120
"""Longer than clients keep idle connections (aiohttp: 15 s), so that the client closes first and never sends into a
connection that the server is closing."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError that names the flag."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), port))
        sock.listen(4096)
    except (OSError, UnicodeError) as error:
        sock.close()
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.EADDRINUSE:
            raise ConfigError(f"--port {port} is in use; stop what listens there or choose another port") from None
        if code == errno.EACCES:
            raise ConfigError(f"--port {port} may not be bound by this user; choose one above 1023") from None
        raise ConfigError(f"--host {host} is not an address of this machine; choose another") from None
    sock.set_inheritable(True)
    return sock


def run_server(settings: Settings) -> None:
    """Serve until a signal. Raises ConfigError before anything has started."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    sock = bind(settings.host, settings.port)
    keep_heap()
    port = sock.getsockname()[1]
    app = App(settings, on_started=lambda: _announce(settings, app, port))
    config = uvicorn.Config(
        app,
        http=ClientConnection,
        loop="auto",
        interface="asgi3",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody asks who the client is, and a client may say anything
        server_header=False,
        timeout_keep_alive=CLIENT_IDLE_SECS,
        timeout_graceful_shutdown=GRACE_SECS,
    )
    calm()
    try:
        _Server(config, app).run(sockets=[sock])
    except KeyboardInterrupt:
        pass


class _Server(uvicorn.Server):
    """Ends what would not end by itself before it waits for the rest."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("lorafleet").info("ending; what runs may finish within %d s", GRACE_SECS)
        # What is cut off at the end of the grace is no error of the application: uvicorn would print it as one.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await self._app.begin_stop()
        await super().shutdown(sockets)


def _announce(settings: Settings, app: App, port: int) -> None:
    log = logging.getLogger("lorafleet")
    endpoints = [replica.endpoint for replica in app.parts.fleet.members()]  # as an earlier process left them
    sent = sum(1 for endpoint in endpoints if endpoint.token())
    names = [endpoint.base for endpoint in endpoints] + [str(group) for group in settings.groups]
    log.info(
        "serving %s at http://%s:%d (policy %s, pause %s; a token is sent to %d of them; %s)",
        ", ".join(names),
        settings.host,
        port,
        settings.policy,
        settings.pause_mode,
        sent,
        "clients must send the API key" if settings.api_key else "no API key",
    )
    if settings.api_key is None and settings.host not in ("127.0.0.1", "localhost", "::1"):
        log.warning("--insecure-no-auth: everybody who reaches this port can use and control the replicas")

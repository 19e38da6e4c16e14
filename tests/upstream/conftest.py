"""Every test that takes `transport` runs on both transports, and every async test on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from proxy.upstream.aiohttp_transport import AiohttpTransport
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Transport

Make = Callable[..., Transport]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    uvloop = pytest.importorskip("uvloop")
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=[AiohttpTransport, LeanTransport], ids=["aiohttp", "lean"])
def kind(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


@pytest_asyncio.fixture
async def make(kind: Make) -> AsyncIterator[Make]:
    """Makes transports with the settings a test wants, and closes them."""
    made: list[Transport] = []

    def new(**settings: Any) -> Transport:
        made.append(kind(**settings))
        return made[-1]

    yield new
    for each in made:
        await each.close()


@pytest_asyncio.fixture
async def transport(make: Make) -> Transport:
    return make()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    key, cert, both = directory / "key.pem", directory / "cert.pem", directory / "both.pem"
    wanted = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = ["openssl", *wanted.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def client_tls(certificate: Path) -> ssl.SSLContext:
    """Trusts the test certificate and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate)
    return context

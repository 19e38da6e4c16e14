"""Fixtures for the tests on real vLLM: two replicas that the whole session shares, and proxies in front of them."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from .proxy import Proxy, serving
from .realenv import model_directory
from .replica import Replica, start_all

# Tests that kill a replica come last, so that no other test waits for it to start again.
LAST = ("test_restart.py",)

Serve = Callable[..., Proxy]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name in LAST and item.path.parent == Path(__file__).parent)


@pytest.fixture(scope="session")
def made() -> Path:
    """The directory with `model/` and `adapters/` of tiny_model.py."""
    return model_directory()


@pytest.fixture(scope="session")
def adapters(made: Path) -> Path:
    """The directory with v1 .. v8, rank16, zero and truncated; shared and only to be read."""
    return made / "adapters"


@pytest.fixture(scope="session")
def replica_pair(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    token = f"canary-{secrets.token_hex(12)}"
    pair = [Replica(tmp_path_factory.mktemp(f"replica{index}"), made / "model", token) for index in range(2)]
    try:
        start_all(pair)
        yield pair
    finally:
        for replica in pair:
            replica.kill()


@pytest.fixture
def replicas(replica_pair: list[Replica]) -> list[Replica]:
    """Two running replicas as if newly started, behind no proxy."""
    start_all(replica_pair)
    for replica in replica_pair:
        replica.reset()
    return replica_pair


@pytest.fixture
def serve(replicas: list[Replica], tmp_path: Path) -> Iterator[Callable[..., Proxy]]:
    """`serve(*flags)` starts a proxy in front of both replicas; after the test it is stopped and looked over."""
    with ExitStack() as stack:
        started: list[AbstractContextManager[Proxy]] = []

        def start(*flags: str) -> Proxy:
            started.append(serving(tmp_path / f"proxy{len(started)}", replicas, *flags))
            return stack.enter_context(started[-1])

        yield start

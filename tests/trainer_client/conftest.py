from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer_client.fake_fleet import FakeFleet
from trainer_client import client as client_module


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or address of the machine's own, and no waiting between tries."""
    import os

    for name in list(os.environ):
        if name.startswith("LORAFLEET_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(client_module, "_FIRST_WAIT", 0.0)


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with FakeFleet() as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"

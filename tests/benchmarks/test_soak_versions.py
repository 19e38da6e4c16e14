from pathlib import Path

import pytest

from benchmarks.soak_versions import LATEST, Versions
from proxy.simulator.adapters import read_adapter, write_adapter
from trainer_client.digest import adapter_digest


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


def test_names(versions: Versions) -> None:
    assert versions.ask() == versions.ask(back=1) == "soak-v1"
    versions.seen(4)
    versions.seen(3)
    assert (versions.ask(), versions.ask(back=1)) == ("soak-v4", "soak-v3")


def test_a_version_means_itself(versions: Versions) -> None:
    assert versions.meaning("soak-v3", "soak-v3", floor=5) == 3
    assert versions.meaning("soak-v3", "soak-v4", floor=3) == "soak-v3 was answered as soak-v4"
    assert isinstance(versions.meaning("soak-v3", "base", floor=3), str)


def test_latest_never_goes_back(versions: Versions) -> None:
    assert versions.meaning(LATEST, "soak-v6", floor=5) == 6
    assert versions.meaning(LATEST, "soak-v5", floor=5) == 5
    assert "v4 when v5 was committed" in str(versions.meaning(LATEST, "soak-v4", floor=5))


def test_weights_are_remembered_beyond_their_files(versions: Versions, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "soak-v1", seed=1)
    expected = (read_adapter(str(path)).weights, adapter_digest(path))
    assert versions.remember(1) == expected
    write_adapter(path, seed=2)
    assert versions.remember(1) == expected

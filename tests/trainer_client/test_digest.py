from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.trainer_client.support import write_adapter
from trainer_client.digest import FileFacts, adapter_digest, scan_adapter, weight_file
from trainer_client.errors import IncompleteAdapter


def test_the_rule_by_hand(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"abc")
    (tmp_path / "README.md").write_text("does not count")
    expected = hashlib.sha256(b"adapter_config.json\x002\x00{}adapter_model.safetensors\x003\x00abc").hexdigest()
    scan = scan_adapter(tmp_path)
    assert adapter_digest(str(tmp_path)) == scan.digest == f"sha256:{expected}"
    assert scan.files == {
        "adapter_config.json": FileFacts(2, hashlib.sha256(b"{}").hexdigest()),
        "adapter_model.safetensors": FileFacts(3, hashlib.sha256(b"abc").hexdigest()),
    }


def test_the_file_that_vllm_reads_counts(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    for name in ("adapter_model.pt", "adapter_model.bin", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
        assert weight_file(tmp_path) == name
        before = adapter_digest(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"other")
    assert adapter_digest(tmp_path) == before


def test_differs_by_weights_and_by_configuration(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "a", seed=1)
    same = write_adapter(tmp_path / "b", seed=1)
    weights = write_adapter(tmp_path / "c", seed=2)
    scale = write_adapter(tmp_path / "d", seed=1, lora_alpha=16)
    digests = [adapter_digest(d) for d in (one, same, weights, scale)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_adapter(tmp_path / "a")
    whole = adapter_digest(directory)
    monkeypatch.setattr("trainer_client.digest.PIECE", 7)
    assert adapter_digest(directory) == whole


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_not_ready_yet(tmp_path: Path, missing: str) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / missing).unlink()
    with pytest.raises(IncompleteAdapter, match=missing):
        adapter_digest(directory)

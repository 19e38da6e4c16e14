from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer_client.support import write_adapter
from trainer_client.digest import scan_adapter
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.manifest import MANIFEST_FILE, Manifest, check_manifest, parse_manifest, read_manifest


def made(directory: Path) -> Manifest:
    scan = scan_adapter(directory)
    return Manifest("trl-policy-v7", 7, scan.digest, scan.files)


def test_round_trip(tmp_path: Path) -> None:
    manifest = made(write_adapter(tmp_path / "a"))
    assert parse_manifest(manifest.to_bytes()) == manifest
    body = json.loads(manifest.to_bytes())
    assert {k: body[k] for k in ("format", "name", "version", "digest")} == {
        "format": 1,
        "name": "trl-policy-v7",
        "version": 7,
        "digest": manifest.digest,
    }
    assert sorted(body["files"]) == ["adapter_config.json", "adapter_model.safetensors"]


def test_read_from_a_directory(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    assert read_manifest(directory) is None
    (directory / MANIFEST_FILE).write_bytes(made(directory).to_bytes())
    assert read_manifest(directory) == made(directory)


def test_cut_short_is_not_ready_yet_and_an_unknown_format_is_an_error(tmp_path: Path) -> None:
    text = made(write_adapter(tmp_path / "a")).to_bytes()
    with pytest.raises(IncompleteAdapter):
        parse_manifest(text[:-9])
    with pytest.raises(AdapterError, match="format 2"):
        parse_manifest(b'{"format": 2}')
    for body in (
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "name": "a", "version": 1, "digest": "d", "files": {"a": 3}}',
    ):
        with pytest.raises(AdapterError):
            parse_manifest(body)


def test_data_that_lags_behind_the_marker_is_not_ready_yet(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    manifest = made(directory)
    check_manifest(directory, manifest, contents=True)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:-1])
    with pytest.raises(IncompleteAdapter, match="of"):
        check_manifest(directory, manifest)
    weights.write_bytes(b"\0" * len(whole))
    check_manifest(directory, manifest)
    with pytest.raises(IncompleteAdapter, match="bytes"):
        check_manifest(directory, manifest, contents=True)
    weights.unlink()
    with pytest.raises(IncompleteAdapter, match="not there"):
        check_manifest(directory, manifest)

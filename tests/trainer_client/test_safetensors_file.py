from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.trainer_client.support import tensors, write_tensors
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.safetensors_file import TensorInfo, read_header


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    values = tensors() | {"half": np.arange(3, dtype="<f2"), "wide": np.arange(4, dtype="<f8").reshape(2, 2)}
    write_tensors(tmp_path / "f", values)
    read = load_file(tmp_path / "f")
    assert sorted(read) == sorted(values)
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file({"b": np.zeros((2, 3), "f4"), "a": np.ones(2, "f2")}, tmp_path / "f", metadata={"format": "pt"})
    found = {t.name: t for t in read_header(tmp_path / "f")}
    size = (tmp_path / "f").stat().st_size
    assert found["b"] == TensorInfo("b", "F32", (2, 3), size - 28, size - 4)
    assert found["a"] == TensorInfo("a", "F16", (2,), size - 4, size)


@given(cut=st.data())
def test_every_prefix_is_incomplete(tmp_path_factory: pytest.TempPathFactory, cut: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("cut") / "f"
    write_tensors(path, tensors())
    whole = path.read_bytes()
    path.write_bytes(whole[: cut.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(IncompleteAdapter):
        read_header(path)


def test_a_file_that_was_only_allocated_is_incomplete(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", tensors())
    whole = (tmp_path / "f").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    for data in (bytes(len(whole)), whole[:8] + bytes(len(whole) - 8)):
        (tmp_path / "f").write_bytes(data)
        with pytest.raises(IncompleteAdapter):
            read_header(tmp_path / "f")
    assert length % 8 == 0


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff" * 16, "absurd"),
        (struct.pack("<Q", 4) + b"oops", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (header(x=GOOD) + bytes(9), "1 bytes more"),
        (header(x=GOOD | {"data_offsets": [4, 12]}) + bytes(12), "hole"),
        (header(x=GOOD, y=GOOD) + bytes(8), "overlap"),
        (header(x=GOOD | {"shape": [3]}) + bytes(8), "do not hold"),
        (header(x=GOOD | {"shape": [-2]}) + bytes(8), "natural"),
        (header(x=GOOD | {"dtype": "F3"}) + bytes(8), "F3"),
        (header(x={"dtype": "F32"}), "malformed"),
        (header(x=GOOD | {"shape": 4}) + bytes(8), "malformed"),
    ],
)
def test_contradictions_are_broken_for_good(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(AdapterError, match=reason) as raised:
        read_header(tmp_path / "f")
    assert not isinstance(raised.value, IncompleteAdapter)

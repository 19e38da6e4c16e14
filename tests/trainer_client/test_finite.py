from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.finite import first_not_finite, is_zero

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def expected(dtype: str, data: bytes) -> int | None:
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        values = wide.view("<f4")
    else:
        values = np.frombuffer(data, NUMPY[dtype])
    bad = np.flatnonzero(~np.isfinite(values))
    return int(bad[0]) if len(bad) else None


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@given(
    data=st.binary(max_size=256), hot=st.lists(st.tuples(st.integers(0, 31), st.sampled_from([0x7F, 0x80, 0xF0, 0xFF])))
)
def test_agrees_with_numpy_on_any_bytes(dtype: str, data: bytes, hot: list[tuple[int, int]]) -> None:
    raw = bytearray(data[: len(data) // 8 * 8])
    for place, value in hot:
        if place < len(raw):
            raw[place] = value
    assert first_not_finite(dtype, bytes(raw)) == expected(dtype, bytes(raw))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_finds_the_one_bad_item(bad: float) -> None:
    values = [1e38, -1e38, 0.0, -0.0, 1.5, bad, bad]
    assert first_not_finite("F32", struct.pack("<7f", *values)) == 5
    assert first_not_finite("F32", struct.pack("<5f", *values[:5])) is None


def test_eight_bit_floats() -> None:
    assert first_not_finite("F8_E4M3", bytes([0x7E, 0xFE, 0x00])) is None
    assert first_not_finite("F8_E4M3", bytes([0x00, 0xFF])) == 1
    assert first_not_finite("F8_E5M2", bytes([0x7B, 0x7C])) == 1


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_zero(dtype: str) -> None:
    size = {"F64": 8, "F32": 4, "F8_E5M2": 1}.get(dtype, 2)
    negative = b"\0" * (size - 1) + b"\x80"
    assert is_zero(dtype, b"\0" * size * 5)
    assert is_zero(dtype, negative * 3 + b"\0" * size)
    assert not is_zero(dtype, negative * 3 + b"\1" + b"\0" * (size - 1))
    assert not is_zero(dtype, b"\0" * (size - 1) + b"\x40")

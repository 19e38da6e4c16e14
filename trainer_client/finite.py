"""Is a run of floats finite, is it all zeros: answered on the raw bytes, without numpy or torch.

A float is infinite or NaN exactly when its exponent bits are all ones. Those bits sit in the last byte or two of each
little-endian item, so a strided slice and a few searches in C decide a whole piece; only a piece with a suspicious top
byte is looked at closer.
"""

from __future__ import annotations

# dtype -> (bytes an item, exponent mask of the top byte, exponent mask of the byte below)
_EXPONENT = {
    "F64": (8, 0x7F, 0xF0),
    "F32": (4, 0x7F, 0x80),
    "BF16": (2, 0x7F, 0x80),
    "F16": (2, 0x7C, 0x00),
    "F8_E5M2": (1, 0x7C, 0x00),
    "F8_E4M3": (1, 0x7F, 0x00),  # has no infinity: only all ones is NaN
}
FLOATS = frozenset(_EXPONENT)


# Top bytes that a number which is not finite may have: two to eight values, each looked for with one memchr.
_SUSPECTS = {
    dtype: [bytes([value]) for value in range(256) if value & top == top] for dtype, (_, top, _) in _EXPONENT.items()
}


def first_not_finite(dtype: str, data: bytes) -> int | None:
    """Index of the first infinite or NaN item in `data` (a whole number of items of `dtype`), or None."""
    size, _, low_mask = _EXPONENT[dtype]
    tops = data[size - 1 :: size]
    found: list[int] = []
    for suspect in _SUSPECTS[dtype]:
        index = tops.find(suspect)
        while index >= 0:
            if low_mask == 0 or data[index * size + size - 2] & low_mask == low_mask:
                found.append(index)
                break
            index = tops.find(suspect, index + 1)
    return min(found, default=None)


def is_zero(dtype: str, data: bytes) -> bool:
    """Whether every item is +0 or -0."""
    size = _EXPONENT[dtype][0]
    if not data.strip(b"\0"):
        return True
    return not any(data[i::size].strip(b"\0") for i in range(size - 1)) and not data[size - 1 :: size].strip(b"\0\x80")

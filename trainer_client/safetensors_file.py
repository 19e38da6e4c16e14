"""The safetensors format, read and written by hand: a length, a JSON header, the bytes.

By hand because three things matter here that the library does not offer: a truncated file is told from a broken one, a
full disk raises OSError with its errno, and neither torch nor numpy is needed. Format: 8 bytes little-endian header
length, the header (`{name: {dtype, shape, data_offsets}}`, optionally `__metadata__`), then the data without holes
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_client.errors import AdapterError, IncompleteAdapter

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the library's own limit


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `start` and `end` are absolute offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor to write: contiguous, row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    owner: object = None  # kept alive for as long as the view of its memory


def read_header(path: str | os.PathLike[str]) -> list[TensorInfo]:
    """The file's tensors in the order of their bytes.

    Raises IncompleteAdapter when the file is shorter than it says (or all zeros so far), AdapterError when it
    contradicts itself.
    """
    name = os.path.basename(path)
    with open(path, "rb") as handle:
        total = os.fstat(handle.fileno()).st_size
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length == 0:
            raise IncompleteAdapter(name, f"{total} bytes and no header (yet)")
        if length > MAX_HEADER:
            raise AdapterError(name, "is not a safetensors file (its header length is absurd)")
        text = handle.read(length)
    if len(text) < length:
        raise IncompleteAdapter(name, f"ends inside its header ({total} bytes)")
    try:
        header: Any = json.loads(text)
    except ValueError:
        if not text.strip(b"\0"):
            raise IncompleteAdapter(name, "its header is all zeros (so far)") from None
        raise AdapterError(name, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise AdapterError(name, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = sorted((_entry(key, value, 8 + length) for key, value in header.items()), key=lambda t: (t.start, t.end))
    at = 8 + length
    for tensor in tensors:
        if tensor.start != at:
            raise AdapterError(tensor.name, "its bytes overlap another tensor's or leave a hole")
        at = tensor.end
    if total < at:
        raise IncompleteAdapter(name, f"{total} bytes of {at} that its header names")
    if total > at:
        raise AdapterError(name, f"{total - at} bytes more than its header names")
    return tensors


def _entry(key: str, value: Any, base: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        raise AdapterError(key, "its entry in the safetensors header is malformed") from None
    if not whole:
        raise AdapterError(key, "its shape or offsets are not natural numbers")
    if dtype not in DTYPE_BYTES:
        raise AdapterError(key, f"dtype {dtype} is not known here")
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise AdapterError(key, f"{end - start} bytes do not hold shape {list(shape)} of {dtype}")
    return TensorInfo(key, dtype, shape, base + start, base + end)


def encode(tensors: Mapping[str, TensorBytes]) -> Iterable[bytes | memoryview]:
    """The file's pieces in order: the header, then each tensor's bytes, largest items first so that all are aligned."""
    order = sorted(tensors, key=lambda n: (-DTYPE_BYTES[tensors[n].dtype], n))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = tensors[name]
        size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield tensors[name].data

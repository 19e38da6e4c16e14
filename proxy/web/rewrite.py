"""The model's name where it differs between client and replica: put in on the way up, given back on the way down.

A name that was bound again goes upstream under another one (see `proxy.control.desired`), and `<name>-latest` as the
version that it means. Everything else in the bodies stays as it was written.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_ERROR_LIMIT = 1 << 20


class _Named(msgspec.Struct):
    model: Any = None


_decode_named = msgspec.json.Decoder(_Named).decode
_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, TypeError)


def model_in(body: bytes) -> str | None:
    """The model that an engine would read from `body`; None for none, for an empty name and for what is no JSON.

    Python's own JSON reader, which vLLM uses, takes more than the standard: NaN, UTF-16, a byte order mark, lone
    surrogates. A body that only it can read must not slip past the adapters' bindings.
    """
    try:
        model = _decode_named(body).model
    except _UNREADABLE:
        loaded = _load(body)
        model = loaded.get("model") if loaded is not None else None
    if not isinstance(model, str) or not model:
        return None
    return model.encode(errors="replace").decode()  # half of a surrogate pair could not be written into an error


def with_model(body: bytes, name: str) -> bytes:
    """`body` with `model` set to `name`; the other values keep their bytes, the keys their order.

    A body that only Python's reader takes is written anew, with the same values.
    """
    try:
        fields = _decode_raws(body)
    except _UNREADABLE:
        loaded = _load(body)
        if loaded is None:
            return body
        loaded["model"] = name
        return json.dumps(loaded).encode()
    fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    return msgspec.json.encode(fields)


def _load(body: bytes) -> dict[str, Any] | None:
    try:
        loaded = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None


class GiveBack:
    """Replaces the upstream name in a response, however it is cut into chunks.

    In a good answer only as the value of a `model` key: within a JSON string the quotes of that text would be escaped,
    so what a model generated cannot be hit. In an error everywhere: the name stands in the message. At most the length
    of the pattern is held back, and only if the chunk ends in the beginning of one.
    """

    __slots__ = ("_held", "_pairs")

    def __init__(self, upstream: str, name: str, *, anywhere: bool) -> None:
        old, new = _quoted(upstream), _quoted(name)
        if anywhere:
            self._pairs = [(old[1:-1], new[1:-1])]
        else:
            self._pairs = [(b'"model":' + space + old, b'"model":' + space + new) for space in (b"", b" ")]
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be passed on now."""
        data = self._held + chunk if self._held else chunk
        for old, new in self._pairs:
            data = data.replace(old, new)
        keep = max(_overlap(data, old) for old, _ in self._pairs)
        self._held = data[len(data) - keep :] if keep else b""
        return data[: len(data) - keep] if keep else data

    def rest(self) -> bytes:
        """What was held back, at the end of the body."""
        held, self._held = self._held, b""
        return held


def _quoted(name: str) -> bytes:
    return msgspec.json.encode(name)


def _overlap(data: bytes, pattern: bytes) -> int:
    """How many bytes at the end of `data` could be the beginning of `pattern`."""
    for length in range(min(len(data), len(pattern) - 1), 0, -1):
        if data.endswith(pattern[:length]):
            return length
    return 0

"""The JSON answers to the parts of a batch, put together as the answer to the whole. Pure.

Every value keeps its bytes but the answers' indices and the sums. As vLLM does it: `id`, `created`, transfer parameters
and all else at the top are those of the first prompt; the counts of `usage` are sums, but the tokens found in the cache
are the last prompt's alone; there are no `metrics` of several prompts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from proxy.errors import Unmergeable
from proxy.web.batch import Places

_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.encode
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, IndexError, KeyError)

_NULL: Final = msgspec.Raw(b"null")
_INDEX: Final = re.compile(rb'\s*\{\s*"index":\s?([0-9]{1,18})(?=[,}])')
"""The beginning of a choice as vLLM writes it."""


Moved = tuple[bytes, memoryview]
"""A choice in two pieces: its beginning, with the index in it, and the rest as it came."""


class PartAnswer:
    """The answer to one part: `choices` by their place in the whole, and all else at the top."""

    __slots__ = ("choices", "first", "last", "top")

    def __init__(self, body: bytes, places: Places) -> None:
        """Raises Unmergeable for what is no answer to as many prompts."""
        try:
            self.top = top = _decode_raws(body)
            self.choices = dict([moved(choice, places) for choice in _decode_list(top["choices"])])
        except _UNREADABLE:
            raise Unmergeable("a replica's answer to a part of the batch cannot be read") from None
        if len(self.choices) != len(places):
            raise Unmergeable("a replica gave more or fewer answers than a part of the batch asks for")
        top["choices"] = _NULL
        self.first = min(places.positions)
        self.last = max(places.positions)


def merge(parts: Sequence[PartAnswer]) -> bytes:
    """The answer to the whole; together the parts hold all places."""
    first = min(parts, key=lambda part: part.first)
    last = max(parts, key=lambda part: part.last)
    choices: dict[int, Moved] = {}
    for part in parts:
        choices |= part.choices
    top = dict(first.top)
    if "usage" in top:
        top["usage"] = added([part.top.get("usage", _NULL) for part in parts], last.top.get("usage", _NULL))
    if "metrics" in top:
        top["metrics"] = _NULL
    pieces: list[bytes | memoryview] = []  # megabytes are copied once
    for name, value in top.items():
        pieces.append(b"%b%b:" % (b"," if pieces else b"{", _encode(name)))
        if name == "choices":
            pieces += listed([choices[place] for place in sorted(choices)])
        else:
            pieces.append(memoryview(value))
    pieces.append(b"}")
    return b"".join(pieces)


def listed(choices: Sequence[Moved]) -> list[bytes | memoryview]:
    """The pieces of a JSON list of them."""
    pieces: list[bytes | memoryview] = []
    for begin, rest in choices:
        pieces += (b"," if pieces else b"[", begin, rest)
    pieces.append(b"]")
    return pieces


def moved(choice: msgspec.Raw, places: Places) -> tuple[int, Moved]:
    """A choice's place in the whole, and the choice with that as its `index`."""
    begin = _INDEX.match(choice)
    if begin is not None:
        place = places.of(int(begin.group(1)))
        return place, (b'{"index":%d' % place, memoryview(choice)[begin.end() :])
    fields = _decode_raws(choice)
    place = places.of(int(fields["index"]))
    fields["index"] = msgspec.Raw(b"%d" % place)
    return place, (b"", memoryview(_encode(fields)))


def added(usages: Sequence[msgspec.Raw], details: msgspec.Raw) -> msgspec.Raw:
    """The sum of `usages`: every count at the top is added up, all else is as in `details`, which is one of them."""
    said: list[Any] = [_decode_any(usage) for usage in usages]
    whole = _decode_any(details)
    if not isinstance(whole, dict) or not all(isinstance(each, dict) for each in said):
        return details
    for name in whole:
        counts = [each.get(name) for each in said]
        if all(type(count) is int for count in counts):
            whole[name] = sum(counts)
    return msgspec.Raw(_encode(whole))

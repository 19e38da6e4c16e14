"""The event streams that answer the parts of a batch, as events of one stream. Pure: bytes in, bytes out.

As vLLM does it: every event is about one choice and says so by its index; all carry the same `id`, `created` and
`model`; at the end, if it was asked for, one event without choices has the usage of all, in which the tokens found in
the cache are those of whichever prompt answered first; then `[DONE]`. An error is an event, and ends all of them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from proxy.errors import Phase, Unmergeable, UpstreamError
from proxy.web.batch import Places
from proxy.web.batch_merge import added, listed, moved

DONE: Final = b"data: [DONE]\n\n"
LONGEST_EVENT: Final = 256 << 20
"""Bytes. A prompt of a million tokens that is echoed with log-probabilities is one event."""

_END: Final = b"\n\n"
_DATA: Final = b"data:"
_CHOICES: Final = b'"choices":[{"index":'
_NEXT_CHOICE: Final = b'{"index":'
_FINGERPRINT: Final = b'"system_fingerprint":'
_DIGITS: Final = 18
_NOTHING: Final = b'"choices":[]}'
_SHARED: Final = ("id", "object", "created", "model", "system_fingerprint")
"""Fields that have one value in all events."""

_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.encode
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, IndexError, KeyError)


class Cutter:
    """Cuts a stream into its events, however it is cut into chunks."""

    __slots__ = ("_held", "_size")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, without the empty lines that end them. Raises Unmergeable for one that
        grows without end."""
        held = self._held
        if held and _END not in chunk and not (chunk[:1] == b"\n" and held[-1][-1:] == b"\n"):
            if chunk:
                held.append(chunk)
                self._size += len(chunk)
            if self._size > LONGEST_EVENT:
                raise Unmergeable("a replica's event has no end")
            return []
        events = (b"".join((*held, chunk)) if held else chunk).split(_END)
        rest = events.pop()
        self._held = [rest] if rest else []
        self._size = len(rest)
        return events


class Common:
    """What all events of the merged stream share: what the first one said. `first` are the places of the part that it
    came from (no more of it, so that nothing refers to itself in a circle: see `proxy.garbage`)."""

    __slots__ = ("_fields", "first")

    def __init__(self) -> None:
        self._fields: dict[str, msgspec.Raw] = {}
        self.first: Places | None = None

    def stamp(self, event: dict[str, msgspec.Raw], places: Places) -> None:
        if self.first is None:
            self.first = places
        for name in _SHARED:
            if name in event:
                event[name] = self._fields.setdefault(name, event[name])

    @property
    def response_id(self) -> str | None:
        raw = self._fields.get("id")
        try:
            return _decode_text(raw) if raw is not None else None
        except _UNREADABLE:
            return None


class PartEvents:
    """The stream of one part. `last_event` is the one without choices, if there is one, and `usage` what it tells;
    `error` an error event, after which nothing counts; `done` says that the stream came to its proper end.
    """

    __slots__ = ("_common", "_cutter", "_head", "_new_head", "_places", "done", "error", "last_event", "usage")

    def __init__(self, places: Places, common: Common) -> None:
        self._places = places
        self._common = common
        self._cutter = Cutter()
        self._head = self._new_head = b""  # of an event, up to its choices: as it came, as it goes
        self.last_event: dict[str, msgspec.Raw] = {}
        self.usage: msgspec.Raw | None = None
        self.error: bytes | None = None
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """What goes to the client for it. Raises Unmergeable for what is no event of a completion."""
        events = []
        for event in self._cutter.feed(chunk):
            if self.done or self.error is not None:
                break
            event = self._moved(event)
            if event:
                events.append(event)
        return b"".join(events)

    @property
    def first(self) -> bool:
        """Whether it was the first of all to say something."""
        return self._common.first is self._places

    def end(self) -> None:
        """The stream is over. Raises UpstreamError if it has not come to its end."""
        if not self.done:
            raise UpstreamError("the replica's stream ended before its end", Phase.MID_STREAM)

    def _moved(self, event: bytes) -> bytes:
        at = event.find(_CHOICES)
        if at > 0 and event.rfind(_FINGERPRINT) < 0:
            start = at + len(_CHOICES)
            end = event.find(b",", start)
            index = event[start:end][:_DIGITS] if end > 0 else b""
            if index.isdigit() and event.find(_NEXT_CHOICE, end) < 0 and (head := self._head_of(event[:at])):
                try:
                    place = self._places.of(int(index))
                except IndexError:
                    raise Unmergeable("a replica answered something that was not asked for") from None
                return b"%b%b%d%b\n\n" % (head, _CHOICES, place, event[end:])
        return self._moved_slowly(event)

    def _head_of(self, head: bytes) -> bytes:
        """The beginning of an event with the shared fields; the same in all events of a part. Empty if it is odd."""
        if head != self._head:
            try:
                fields = _decode_raws(head[len(_DATA) :] + _NOTHING)
            except _UNREADABLE:
                return b""
            if not head.startswith(_DATA) or "error" in fields:
                return b""
            self._common.stamp(fields, self._places)
            self._head = head
            self._new_head = b"data: " + _encode(fields).removesuffix(_NOTHING)
        return self._new_head

    def _moved_slowly(self, event: bytes) -> bytes:
        if event.startswith(b":") or not event:
            return b""  # a comment
        data = event[len(_DATA) :].strip() if event.startswith(_DATA) else b""
        if data == b"[DONE]":
            self.done = True
            return b""
        try:
            fields = _decode_raws(data)
            if "error" in fields:
                self.error = event
                return b""
            choices = _decode_list(fields["choices"])
            self._common.stamp(fields, self._places)
            if not choices:
                self.usage = fields.get("usage")
                self.last_event = fields
                return b""
            fields["choices"] = msgspec.Raw(b"".join(listed([moved(choice, self._places)[1] for choice in choices])))
        except _UNREADABLE:
            raise Unmergeable("a replica's event cannot be read") from None
        return b"data: %b\n\n" % _encode(fields)


def usage_event(parts: list[PartEvents]) -> bytes:
    """The event with the usage of the whole; nothing unless all parts had one."""
    usages = [part.usage for part in parts if part.usage is not None]
    if len(usages) != len(parts):
        return b""
    first = next((part for part in parts if part.first), parts[0])
    fields = {name: value for name, value in first.last_event.items() if name != "metrics"}
    fields["usage"] = added(usages, fields["usage"])
    return b"data: %b\n\n" % _encode(fields)

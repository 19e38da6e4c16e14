"""What a finished answer says of the work it took, read after its bytes have gone out. Never raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from proxy.lease import Usage
from proxy.web.usage_scan import TAIL, last_bytes, scan

LIMIT = 4 << 20
"""Bytes of an answer that are kept to be read afterwards; from a larger one nothing is learned."""

SCAN_FROM = 64 << 10
"""Bytes of a JSON answer from which on it is searched instead of decoded, see `usage_scan`."""


class Learned(NamedTuple):
    """`response_id` is the `id` that the engine gave the answer."""

    usage: Usage | None
    response_id: str | None


NOTHING = Learned(None, None)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The names of completions, of /v1/responses and of /v1/messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Choice(msgspec.Struct):
    token_ids: msgspec.Raw = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None
    choices: list[_Choice] | None = None


class _Event(_Answer):
    response: _Answer | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode
_STREAM_ID = re.compile(rb'data: \{"id":\s?"([^"\\]*)"')
_T = TypeVar("_T")


def read(media: bytes, kept: list[bytes]) -> Learned:
    """From the body (or, for an event stream, its end), in the chunks that came; `media` is its content type."""
    if media.startswith(b"application/json"):
        return of_answer(*kept)
    return of_stream(last_bytes(kept, TAIL)) if media.startswith(b"text/event-stream") else NOTHING


def of_answer(*chunks: bytes) -> Learned:
    """From a JSON answer. The output's token ids are those of its only choice (in a large answer, of its last one)."""
    if sum(map(len, chunks)) >= SCAN_FROM:
        return _of_large(chunks)
    answer = _decode(_decode_answer, b"".join(chunks))
    if answer is None:
        return NOTHING
    return Learned(_usage(answer.usage, answer.choices or ()), answer.id)


def _of_large(chunks: Sequence[bytes]) -> Learned:
    found = scan(chunks)
    said = _usage(_decode(_decode_usage, found.usage), ()) if found.usage is not None else None
    if said is not None and found.token_ids is not None:
        said = replace(said, output_ids=found.token_ids)
    return Learned(said, found.response_id)


def _decode(decode: Callable[[bytes], _T], body: bytes) -> _T | None:
    try:
        return decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def of_stream(tail: bytes) -> Learned:
    """From the last bytes of an event stream: the last event that tells its usage; without one, the last `id`."""
    end = len(tail)
    while (at := tail.rfind(b'"usage":', 0, end)) >= 0:
        start, stop = tail.rfind(b"data:", 0, at), tail.find(b"\n", at)
        if start < 0:
            break
        end = at
        event = _decode(_decode_event, tail[start + 5 : stop if stop >= 0 else len(tail)])
        if event is None:
            continue
        answer = event.response or event
        if answer.usage is not None:
            return Learned(_usage(answer.usage, ()), answer.id)
    named = _STREAM_ID.match(tail, max(0, tail.rfind(b'data: {"id":')))
    return Learned(None, named.group(1).decode("latin-1")) if named is not None else NOTHING


def _usage(said: _Usage | None, choices: Sequence[_Choice]) -> Usage | None:
    if said is None:
        return None
    details = said.prompt_tokens_details or said.input_tokens_details
    ids = bytes(choices[0].token_ids) if len(choices) == 1 else b"null"
    return Usage(
        prompt_tokens=said.prompt_tokens if said.prompt_tokens is not None else said.input_tokens,
        cached_tokens=details.cached_tokens if details is not None else said.cache_read_input_tokens,
        output_tokens=said.completion_tokens if said.completion_tokens is not None else said.output_tokens,
        output_ids=ids if ids != b"null" else None,
    )

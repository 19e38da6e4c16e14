"""A request body, reduced to what routing needs: model, salt, sizes and the prompts as bytes that can be hashed.

Nothing here judges a request: what cannot be read is left out, `prompts` is then empty, and the body is forwarded as
it came so that the engine itself gives the answer. All work is linear in the body.

The costly part of a body is a long list of token ids. It is never decoded: the list is found by its brackets, cut out
of the body and kept as a view, and only the small rest is decoded as JSON.
"""

from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from proxy.routing.prompt import TOKENS, Kind, Prompt

MAX_PROMPTS: Final = 1024
"""Prompts of one batch that are read; the others of a longer batch follow them."""

_BIG: Final = 2**53
_SPACE: Final = b" \t\r\n"
_QUOTE: Final = b'"'


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """What routing needs from a body. `prompts` is empty when there is nothing to route by.

    `max_tokens` is the limit for each sequence as the client set it, `n` the number of sequences a prompt.
    `reads_cache` is False where the engine will not reuse cached blocks (it was asked for log-probabilities of the
    prompt itself).
    """

    model: str | None = None
    salt: str = ""
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    prompts: tuple[Prompt, ...] = ()
    reads_cache: bool = True


_EMPTY: Final = RouteRequest()
_NONE: Final = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The fields of all routed endpoints that matter here, with the types that a well-formed body has."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    token_ids: msgspec.Raw = _NONE
    sampling_params: msgspec.Raw = _NONE
    chat_template: msgspec.Raw = _NONE
    chat_template_kwargs: msgspec.Raw = _NONE


_RAW_FIELDS: Final = frozenset(name for name, kind in _Body.__annotations__.items() if kind is msgspec.Raw)
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def parse(path: str, body: bytes) -> RouteRequest:
    """Read the body of a POST to `path`. Never raises.

    >>> parse("/v1/completions", b'{"model": "m", "prompt": [1, 2, 3]}').prompts[0].canonical()
    b'1,2,3,'
    """
    reader = _READERS.get(path)
    if reader is None:
        return _EMPTY
    try:
        return reader(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, AttributeError):
        return _EMPTY


def _completions(body: bytes) -> RouteRequest:
    fields, cut = _read(body, b'"prompt"', "prompt")
    return _request(fields, (cut,) if cut is not None else _prompts(fields.prompt))


def _generate(body: bytes) -> RouteRequest:
    fields, cut = _read(body, b'"token_ids"', "token_ids")
    sampling = _any(fields.sampling_params)
    if isinstance(sampling, dict):
        fields.n, fields.max_tokens = _whole(sampling.get("n")), _whole(sampling.get("max_tokens"))
        fields.prompt_logprobs = _whole(sampling.get("prompt_logprobs"))
    return _request(fields, (cut,) if cut is not None else _prompts(fields.token_ids)[:1])


def _chat(body: bytes) -> RouteRequest:
    fields = _fields(body)
    messages = _any(fields.messages)
    if not isinstance(messages, list):
        return _request(fields, ())
    return _request(fields, (_conversation(fields, _any(fields.system), messages),))


def _responses(body: bytes) -> RouteRequest:
    fields = _fields(body)
    asked = _any(fields.input)
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list):
        return _request(fields, ())
    return _request(fields, (_conversation(fields, _any(fields.instructions), asked),))


_READERS: Final = {
    "/v1/completions": _completions,
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _chat,
    "/inference/v1/generate": _generate,
}
ROUTED_PATHS: Final = frozenset(_READERS)


def _request(fields: _Body, prompts: tuple[Prompt, ...]) -> RouteRequest:
    limits = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
    limit = next((value for value in limits if value is not None), None)
    n = fields.n
    return RouteRequest(
        model=fields.model,
        salt=fields.cache_salt or "",
        stream=fields.stream is True,
        n=1 if n is None else min(max(n, 1), 1024),
        max_tokens=None if limit is None else min(max(limit, 0), _BIG),
        prompts=prompts,
        reads_cache=fields.prompt_logprobs is None,
    )


# Reading the body.


def _read(body: bytes, quoted: bytes, name: str) -> tuple[_Body, Prompt | None]:
    """The fields, and the token ids under `name` as a view if they are one flat list."""
    span = _flat_list(body, quoted)
    if span is None:
        return _fields(body), None
    start, end = span
    fields = _fields(b"%b0%b" % (body[: start - 1], body[end + 1 :]))
    if bytes(getattr(fields, name)) != b"0":
        return _fields(body), None  # the list belonged to something nested, or the key came twice: the last one counts
    return fields, _tokens(memoryview(body)[start:end])


def _flat_list(body: bytes, quoted: bytes) -> tuple[int, int] | None:
    """Where the inside of the list after the key begins and ends, if it holds neither strings nor lists nor objects.

    A key in JSON is followed by a colon and not preceded by a backslash, which a string's content never achieves.
    """
    at = body.find(quoted)
    if at < 0 or body[at - 1 : at] == b"\\":
        return None
    start = body.find(b"[", at, at + len(quoted) + 16)
    if start < 0 or body[at + len(quoted) : start].strip(_SPACE) != b":":
        return None
    start += 1
    end = body.find(b"]", start)
    if end < 0 or body.find(_QUOTE, start, end) >= 0 or body.find(b"[", start, end) >= 0:
        return None
    if not body[start : start + 24].lstrip(_SPACE)[:1].isdigit():
        return None
    return start, end


def _fields(body: bytes) -> _Body:
    """Decode the fields, each on its own if one of them has a type that it should not have."""
    try:
        return _decode_body(body)
    except (msgspec.ValidationError, UnicodeDecodeError):
        pass
    fields = _Body()
    for name, raw in _decode_raws(body).items():
        if name in _RAW_FIELDS:
            setattr(fields, name, raw)
        elif name in _Body.__struct_fields__:
            setattr(fields, name, _lenient(name, _any(raw)))
    return fields


def _lenient(name: str, value: Any) -> Any:
    if name in ("model", "cache_salt"):
        return value if isinstance(value, str) else None
    if name == "stream":
        return value if isinstance(value, bool) else None
    return _whole(value)


def _whole(value: Any) -> int | None:
    """A number as an int; None for what is none (booleans too)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return int(min(max(value, -_BIG), _BIG))


def _any(raw: msgspec.Raw) -> Any:
    """The decoded value, or None if there is none or it cannot be decoded."""
    if raw is _NONE:
        return None
    try:
        return _decode_any(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


# Prompts.


def _prompts(raw: msgspec.Raw) -> tuple[Prompt, ...]:
    """The value of `prompt`: a text, token ids, or a list of either."""
    one = _one(raw)
    if one is not None:
        return (one,)
    if _first(raw) != b"[":
        return ()
    prompts = []
    for item in _decode_list(raw)[:MAX_PROMPTS]:
        prompt = _one(item)
        if prompt is None:
            return ()  # a mixed or broken batch: the engine will say so
        prompts.append(prompt)
    return tuple(prompts)


def _one(raw: msgspec.Raw) -> Prompt | None:
    first = _first(raw)
    if first == _QUOTE:
        return _text(raw)
    view = memoryview(raw)
    if first == b"[" and bytes(view[1:64]).lstrip(_SPACE)[:1].isdigit():
        content = bytes(view)
        inner = content[content.find(b"[") + 1 : content.rfind(b"]")]
        return None if _QUOTE in inner or b"[" in inner or b"{" in inner else _tokens(inner)
    return None


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:64]).lstrip(_SPACE)[:1]


def _tokens(inner: bytes | memoryview) -> Prompt:
    return Prompt(TOKENS, inner, xxh3_64_intdigest(inner))


def _text(raw: msgspec.Raw) -> Prompt:
    try:
        data = _decode_text(raw).encode()
    except (msgspec.MsgspecError, ValueError):
        data = bytes(memoryview(raw)).strip(_SPACE)[1:-1]  # lone surrogates: the escapes themselves will do
    return Prompt(Kind.TEXT, data, xxh3_64_intdigest(data))


def _conversation(fields: _Body, system: Any, messages: list[Any]) -> Prompt:
    """Tools, system text and messages in the order in which chat templates write them."""
    parts: list[bytes] = []
    for raw in (fields.chat_template, fields.chat_template_kwargs, fields.tools):
        value = _any(raw)
        if value:
            parts.append(_encode(value))
    if system:
        parts.append(_message({"role": "system", "content": system}))
    parts.extend(map(_message, messages))
    data = b"".join(parts)
    return Prompt(Kind.CHAT, data, xxh3_64_intdigest(data))


def _message(message: Any) -> bytes:
    """One message; the order of its keys and the white space between them do not matter."""
    if not isinstance(message, dict):
        return _encode(message) + b"\x00"
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str) and isinstance(content, str) and len(message) == 2:
        return f"{role}\x00{content}\x00".encode(errors="surrogatepass")
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    return b"%b\x00%b\x00%b" % (
        str(role).encode(errors="surrogatepass"),
        _content(content),
        _encode(rest) + b"\x00" if rest else b"",
    )


def _content(content: Any) -> bytes:
    """Text parts count as the text they hold: many clients write a plain string as one part."""
    if isinstance(content, str):
        return content.encode(errors="surrogatepass")
    if not isinstance(content, list):
        return b"" if content is None else _encode(content)
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
        parts.append(text.encode(errors="surrogatepass") if isinstance(text, str) else _encode(part))
    return b"".join(parts)

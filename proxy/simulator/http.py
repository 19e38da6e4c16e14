"""What the route handlers see of a request, and what they answer with; vLLM's error bodies."""

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import msgspec

_encode = msgspec.json.Encoder().encode

JSON_TYPE = (b"content-type", b"application/json")


class HttpError(Exception):
    """An answer other than the handler's normal one."""

    def __init__(self, status: int, body: Any, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(status)
        self.response = json_response(body, status, headers)


@dataclass(slots=True)
class Request:
    """``headers`` have lower-case names; ``json`` is None until a handler asked for the body's JSON."""

    method: str
    path: str
    query_string: bytes
    headers: dict[str, str]
    body: bytes
    json: Any = None

    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.query_string.decode("latin-1"), keep_blank_values=True)


@dataclass(slots=True)
class Response:
    """Either ``body``, or ``stream`` (each item one chunk)."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    stream: AsyncGenerator[bytes, None] | None = field(default=None)


def json_response(content: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Response:
    return Response(status, _encode(content), (JSON_TYPE, *headers))


def event_stream(chunks: AsyncGenerator[bytes, None]) -> Response:
    return Response(200, b"", ((b"content-type", b"text/event-stream; charset=utf-8"),), chunks)


def sse(content: Any) -> bytes:
    """One server-sent event of the OpenAI kind."""
    return b"data: " + _encode(content) + b"\n\n"


def named_sse(name: str, content: Any) -> bytes:
    """One server-sent event of the Anthropic and Responses kind."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(content) + b"\n\n"


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": sanitize(message), "type": kind, "param": param, "code": status}}


def error(status: int, message: str, kind: str, param: str | None = None) -> HttpError:
    """vLLM's ``{"error": {...}}``."""
    return HttpError(status, error_body(message, kind, status, param))


def bad_request(message: str, param: str | None = None, value: Any = None) -> HttpError:
    """A VLLMValidationError: its text carries the parameter and the value."""
    extras = [f"parameter={param}"] if param is not None else []
    extras += [f"value={value}"] if value is not None else []
    return error(400, message + (f" ({', '.join(extras)})" if extras else ""), "BadRequestError", param)


def invalid(errors: list[Any], param: str | None = None) -> HttpError:
    """What FastAPI's validation turns into; ``errors`` as pydantic lists them, printed as Python does."""
    label = "error" if len(errors) == 1 else "errors"
    text = f"{len(errors)} validation {label}:\n" + "".join(f"  {item}\n" for item in errors)
    return error(400, text, "Bad Request", param)


# vLLM hides paths in its error messages, of the directories that it knows.
_KNOWN_PATH = re.compile(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+")
_FILE_PATH = re.compile(r"(?:/[\w\-]+)+/[\w\-]+\.\w+")


def sanitize(message: str) -> str:
    return _FILE_PATH.sub("<path>", _KNOWN_PATH.sub("<path>", message)).strip()


def parse_json(request: Request) -> Any:
    """The body's JSON, for routes that insist on the content type; HttpError 400 in vLLM's words otherwise."""
    media_type = request.headers.get("content-type", "").lower().partition(";")[0]
    if media_type != "application/json":
        raise invalid(["Unsupported Media Type: Only 'application/json' is allowed"])
    if request.json is None:
        try:
            request.json = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            where = {"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error", "input": {}}
            raise invalid([{**where, "ctx": {"error": str(problem)}}], "body.0") from None
    return request.json


def parse_object(request: Request) -> dict[str, Any]:
    """``parse_json`` that wants an object; vLLM answers 500 to anything else."""
    content = parse_json(request)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise error(500, f"'{kind}' object has no attribute 'get'", "InternalServerError")
    return content


_TYPES: dict[type, tuple[str, str]] = {
    int: ("int_type", "Input should be a valid integer"),
    float: ("float_type", "Input should be a valid number"),
    bool: ("bool_type", "Input should be a valid boolean"),
    str: ("string_type", "Input should be a valid string"),
    list: ("list_type", "Input should be a valid list"),
    dict: ("dict_type", "Input should be a valid dictionary"),
}


def typed(body: dict[str, Any], name: str, kind: type, default: Any = None, required: bool = False) -> Any:
    """Field ``name`` of a body, of Python type ``kind``; null counts as absent. HttpError 400 as pydantic words it."""
    value = body.get(name)
    if value is None:
        if required:
            raise invalid(
                [{"type": "missing", "loc": ("body", name), "msg": "Field required", "input": body}], f"body.{name}"
            )
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        name_of, text = _TYPES[kind]
        raise invalid([{"type": name_of, "loc": ("body", name), "msg": text, "input": value}], f"body.{name}")
    return value

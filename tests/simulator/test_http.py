from typing import Any

import msgspec
import pytest

from proxy.simulator.http import (
    HttpError,
    Request,
    bad_request,
    error,
    invalid,
    named_sse,
    parse_json,
    parse_object,
    sanitize,
    sse,
    typed,
)


def body(problem: HttpError) -> Any:
    return msgspec.json.decode(problem.response.body)["error"]


def request(content: bytes, kind: str = "application/json; charset=utf-8") -> Request:
    return Request("POST", "/x", b"a=1&a=2&b=", {"content-type": kind}, content)


def test_error_bodies() -> None:
    assert body(error(404, "gone", "NotFoundError", "model")) == {
        "message": "gone",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert body(bad_request("no.", "n", 2))["message"] == "no. (parameter=n, value=2)"
    assert body(bad_request("no."))["message"] == "no."
    assert body(invalid(["x"], "body.a"))["message"] == "1 validation error:\n  x"
    assert body(invalid(["x", "y"]))["message"].startswith("2 validation errors:")


def test_paths_are_hidden_as_vllm_hides_them() -> None:
    assert sanitize("found for /tmp/a/b-1.2 ") == "found for <path>"
    assert sanitize("found for /data/a") == "found for /data/a"
    assert sanitize("in /data/a/file.py") == "in <path>"


def test_json() -> None:
    assert parse_json(request(b"[1]")) == [1]
    assert request(b"").query() == {"a": ["1", "2"], "b": [""]}
    for content, kind in ((b"{}", "text/plain"), (b"{", "application/json")):
        with pytest.raises(HttpError) as problem:
            parse_json(request(content, kind))
        assert problem.value.response.status == 400
    with pytest.raises(HttpError) as problem:
        parse_object(request(b"[1]"))
    assert problem.value.response.status == 500
    assert body(problem.value)["message"] == "'list' object has no attribute 'get'"


def test_fields() -> None:
    fields = {"i": 3, "f": 2.0, "b": True, "s": "x", "none": None}
    assert (typed(fields, "i", int), typed(fields, "i", float), typed(fields, "f", int)) == (3, 3.0, 2)
    assert (typed(fields, "none", int, 7), typed(fields, "absent", str)) == (7, None)
    for name, kind in (("b", int), ("s", int), ("i", str), ("i", bool), ("s", list), ("s", dict)):
        with pytest.raises(HttpError) as problem:
            typed(fields, name, kind)
        assert body(problem.value)["param"] == f"body.{name}"
    with pytest.raises(HttpError) as problem:
        typed({}, "x", str, required=True)
    assert "Field required" in body(problem.value)["message"]


def test_events() -> None:
    assert sse({"a": 1}) == b'data: {"a":1}\n\n'
    assert named_sse("e", {"a": 1}) == b'event: e\ndata: {"a":1}\n\n'

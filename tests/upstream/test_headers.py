import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import BadRequest, UpstreamError
from proxy.upstream import headers as rules
from proxy.upstream.headers import HOP_BY_HOP, BadFraming, block, downstream, framing, upstream

KEPT = [(b"content-type", b"application/json"), (b"x-request-id", b"7"), (b"x-twice", b"a"), (b"x-twice", b"b")]


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_hop_by_hop_goes_in_neither_direction(name: bytes) -> None:
    lines = [*KEPT, (name, b"whatever")]
    assert upstream(lines) == KEPT
    assert downstream(lines) == KEPT


@pytest.mark.parametrize("choose", [upstream, downstream])
@pytest.mark.parametrize(
    "connection",
    [
        [b"x-gone"],
        [b"close, X-Gone"],
        [b"x-gone ,keep-alive"],
        [b",, x-gone ,"],
        [b"keep-alive", b"x-gone"],
        [b"x-other", b"x-gone"],
    ],
)
def test_what_connection_lists_goes_in_neither_direction(choose: object, connection: list[bytes]) -> None:
    lines = [(b"x-gone", b"1"), *((b"connection", value) for value in connection), *KEPT, (b"x-gone", b"2")]
    assert choose(lines) == KEPT  # type: ignore[operator]


@pytest.mark.parametrize(
    "name",
    [
        b"authorization",
        b"proxy-authorization",
        b"x-api-key",
        b"cookie",
        b"host",
        b"expect",
        b"content-length",
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-proto",
        b"x-real-ip",
    ],
)
def test_not_upstream_in_any_spelling(name: bytes) -> None:
    for spelling in (name, name.upper(), name.title()):
        assert upstream([*KEPT, (spelling, b"x")]) == KEPT


def test_downstream_keeps_what_describes_the_body() -> None:
    lines = [(b"content-length", b"9"), (b"content-encoding", b"zstd"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]
    assert downstream([*lines, (b"date", b"now"), (b"server", b"uvicorn"), (b"alt-svc", b'h3=":443"')]) == lines


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (b"/elsewhere?x=1", True),
        (b"elsewhere", True),
        (b"http://replica-0:8000/x", False),
        (b"//replica-0/x", False),
    ],
)
@pytest.mark.parametrize("name", [b"location", b"content-location"])
def test_address_of_a_replica_stays_here(name: bytes, value: bytes, kept: bool) -> None:
    assert downstream([(name, value), *KEPT]) == [*([(name, value)] if kept else []), *KEPT]


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\n", b"a\n", b"\xc3\xa4", b"a\0", b"transfer-encoding\t"])
def test_malformed_name(name: bytes) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest):
            upstream([(name, b"x")])


def test_memory_of_names_is_bounded() -> None:
    for number in range(3000):
        assert upstream([(b"x-%d" % number, b"")])
        assert upstream([(b"x-%d" % number, b"")])
    assert len(rules._goes_upstream) <= 1024


def test_block() -> None:
    assert block([]) == b""
    assert block([(b"a", b"1"), (b"b", b""), (b"a", b"\xff\t2")]) == b"a: 1\r\nb: \r\na: \xff\t2\r\n"


@given(st.lists(st.binary(max_size=6), max_size=4))
def test_block_never_has_more_lines_than_it_was_given(values: list[bytes]) -> None:
    lines = [(b"x", value) for value in values]
    if any(byte in value for value in values for byte in (b"\r", b"\n", b"\0")):
        with pytest.raises(BadRequest):
            block(lines)
    else:
        assert block(lines).split(b"\r\n") == [*(b"x: " + value for value in values), b""]


@pytest.mark.parametrize("target", ["/", "/v1/completions", "/a?b=c&d=%20", "//x/../y;z", '/"quoted"'])
def test_target(target: str) -> None:
    rules.check_target(target)


@pytest.mark.parametrize("target", ["", "*", "v1", "/a b", "/a\n", "/a\r\nx: y", "/#x", "/\x7f", "/ä", "http://h/"])
def test_bad_target(target: str) -> None:
    with pytest.raises(BadRequest):
        rules.check_target(target)


@pytest.mark.parametrize("token", ["", "a b", "a\n", "\na", "a\x7f", "ä"])
def test_bad_token_is_not_shown(token: str) -> None:
    with pytest.raises(UpstreamError) as caught:
        rules.check_token(token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], (None, False)),
        ([(b"content-length", b"0")], (0, False)),
        ([(b"x", b"y"), (b"content-length", b"0012")], (12, False)),
        ([(b"transfer-encoding", b"Chunked")], (None, True)),
    ],
)
def test_framing(headers: list[tuple[bytes, bytes]], expected: tuple[int | None, bool]) -> None:
    assert framing(200, headers) == expected


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (101, []),
        (200, [(b"content-length", b"1"), (b"content-length", b"1")]),
        (200, [(b"content-length", b"1, 1")]),
        (200, [(b"content-length", b"+1")]),
        (200, [(b"content-length", b"")]),
        (200, [(b"content-length", "١".encode())]),
        (200, [(b"content-length", b"9" * 19)]),
        (200, [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")]),
        (200, [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")]),
        (200, [(b"transfer-encoding", b"gzip, chunked")]),
        (200, [(b"transfer-encoding", b"identity")]),
    ],
)
def test_ambiguous_framing(status: int, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(BadFraming):
        framing(status, headers)

from __future__ import annotations

import pytest

from proxy.upstream.discreet import MAX_SAID, discreet
from proxy.upstream.transport import Endpoint

PLACE = Endpoint("https://vllm-0.test:8443/replica", lambda: "tok-123")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no adapter found for /data/v1", "no adapter found for /data/v1"),
        ("Bearer tok-123 is not valid", "Bearer *** is not valid"),
        ("https://vllm-0.test:8443/replica/pause refused", "(replica)/pause refused"),
        ("vllm-0.test:8443 refused", "(replica) refused"),
        ("name vllm-0.test not resolved", "name (replica) not resolved"),
        ("", ""),
    ],
)
def test_struck_out(said: str, shown: str) -> None:
    assert discreet(said, PLACE) == shown


def test_shortened_after_it_was_cleaned() -> None:
    said = "x" * (MAX_SAID - 3) + "tok-123"
    assert discreet(said, PLACE) == "x" * (MAX_SAID - 3) + "***"


@pytest.mark.parametrize("token", [None, ""])
def test_no_token(token: str | None) -> None:
    assert discreet("a b", Endpoint("http://[::1]:8000", lambda: token)) == "a b"


def test_an_address_that_is_none() -> None:
    assert discreet("http://[ x", Endpoint("http://[")) == "(replica) x"

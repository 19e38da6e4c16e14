from __future__ import annotations

import pytest

from proxy.errors import ConfigError
from proxy.replica_settings import check_url


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("http://a:8000", "http://a:8000"),
        (" HTTP://LocalHost:8000/ ", "http://localhost:8000"),
        ("http://a:80", "http://a"),
        ("https://a:443/", "https://a"),
        ("https://a:80", "https://a:80"),
        ("http://[FE80::1]:8000", "http://[fe80::1]:8000"),
        ("http://a/Team/One/", "http://a/Team/One"),
    ],
)
def test_one_replica_has_one_address(given: str, written: str) -> None:
    assert check_url(given) == written
    assert check_url(written) == written


@pytest.mark.parametrize(
    "given", ["", None, "a:8000", "ftp://a", "http://", "http://a:99999", "http://a?x", "http://u:p@a"]
)
def test_what_is_no_address(given: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_url(given)
    assert "p@" not in caught.value.message

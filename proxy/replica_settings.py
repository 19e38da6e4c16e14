"""Which replicas there are and which token each gets: URLs, dns:// groups, [[replica]] tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from proxy.control.discovery import Group
from proxy.errors import ConfigError
from proxy.upstream.tokens import TokenSource
from proxy.upstream.transport import Endpoint

DEFAULT_TOKEN_ENV = "HF_TOKEN"
TABLE_KEYS = ("url", "token_env", "token_file", "kv_events")


def check_url(url: object, where: str = "URL") -> str:
    """A replica's base URL as it is always written here: scheme and host in small letters, no port that the scheme
    implies, no trailing slash. Raises ConfigError that says what is wrong, without userinfo."""
    if not isinstance(url, str) or not url.strip():
        raise ConfigError(f"{where}: a replica's URL is empty; give one like http://host:8000")
    url = url.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_ok = urlsplit(""), False
    shown = url.rpartition("@")[2]
    if "://" not in url:
        raise ConfigError(f"{where}: {shown!r} has no scheme; write http://{shown}")
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{where}: {shown!r} is neither http:// nor https://; write http://host:port")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{where}: user names and passwords in a URL end up in logs; use --token-env or --token-file")
    if not parts.hostname or not port_ok or parts.query or parts.fragment or any(c <= " " for c in url):
        raise ConfigError(f"{where}: {url!r} is not a replica's address; write http://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = 443 if parts.scheme == "https" else 80
    port = "" if parts.port in (None, usual) else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def read_token(variable: str | None, file: str | None, environment: Mapping[str, str], where: str = "") -> TokenSource:
    """The token that these settings name. Without any, $HF_TOKEN when it is set, else none is sent."""
    try:
        if file is not None and variable is not None:
            raise ConfigError("give --token-env or --token-file, not both")
        if file is not None:
            where = where or "--token-file: "
            return TokenSource.from_file(file)
        if variable is not None:
            where = where or "--token-env: "
            return TokenSource.from_environment(variable, environment)
        if environment.get(DEFAULT_TOKEN_ENV, "").strip():
            where = where or "--token-env: "
            return TokenSource.from_environment(DEFAULT_TOKEN_ENV, environment)
    except ConfigError as error:
        raise ConfigError(where + error.message) from None
    return TokenSource.none()


def check_group(url: str) -> Group:
    """`dns://name:port` as a group. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or not port or parts.path not in ("", "/") or parts.username or parts.query:
        raise ConfigError(f"URL: {url!r} is not a group of replicas; write dns://name:port")
    return Group(name, port)


def read_replicas(
    urls: Sequence[str], tables: Any, default: TokenSource, environment: Mapping[str, str]
) -> tuple[tuple[Endpoint, ...], tuple[Group, ...]]:
    """Single replicas, and names that stand for several. Flags win over the variable, that over the TOML tables."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("--config: replicas are written as [[replica]] tables with a url each")
    if not urls:
        urls = environment.get("LORAFLEET_REPLICAS", "").replace(",", " ").split()
    groups = tuple(dict.fromkeys(check_group(url) for url in urls if url.startswith("dns://")))
    single = [url for url in urls if not url.startswith("dns://")]
    if groups and not single:
        return (), groups
    return _endpoints(single, tables, default, environment), groups


def _endpoints(
    urls: Sequence[str], tables: list[dict[str, Any]], default: TokenSource, environment: Mapping[str, str]
) -> tuple[Endpoint, ...]:
    found: list[Endpoint] = [Endpoint(check_url(url), default) for url in urls]
    if not urls:
        for number, table in enumerate(tables, start=1):
            where = f"--config: [[replica]] number {number}"
            unknown = sorted(set(table) - set(TABLE_KEYS))
            if unknown:
                raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(TABLE_KEYS)}")
            own = "token_env" in table or "token_file" in table
            token = (
                read_token(table.get("token_env"), table.get("token_file"), environment, f"{where}: ")
                if own
                else default
            )
            found.append(Endpoint(check_url(table.get("url"), where), token))
    if not found:
        raise ConfigError(
            "URL: no replica given; name at least one, like `lorafleet serve http://host:8000` (or LORAFLEET_REPLICAS)"
        )
    seen: set[tuple[str, str, int | None, str]] = set()
    for endpoint in found:
        parts = urlsplit(endpoint.base)
        key = (parts.scheme, parts.hostname or "", parts.port, parts.path)
        if key in seen:
            raise ConfigError(f"URL: replica {endpoint.base} is given twice; leave one out")
        seen.add(key)
    return tuple(found)

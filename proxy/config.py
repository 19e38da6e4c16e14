"""The settings of `lorafleet serve`: frozen, checked before anything starts, each complaint naming the flag.

A flag wins over its environment variable (LORAFLEET_<FLAG>), that over the TOML file, that over the default.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from proxy.control.discovery import Group
from proxy.control.settings import ControlSettings
from proxy.errors import ConfigError
from proxy.replica_settings import check_url, read_replicas, read_token
from proxy.upstream.tokens import TokenSource
from proxy.upstream.transport import Endpoint

POLICIES = ("prefix", "consistent_hash", "least_loaded", "round_robin")
DEFAULT_KEY_ENV = "LORAFLEET_API_KEY"


@dataclass(frozen=True, slots=True)
class Options:
    """The flags as given; None where nobody gave one. Field names are the flags with underscores."""

    host: str | None = None
    port: int | None = None
    token_env: str | None = None
    token_file: str | None = None
    api_key_env: str | None = None
    insecure_no_auth: bool | None = None
    policy: str | None = None
    pause: str | None = None
    pause_lease_secs: float | None = None
    pause_queue: int | None = None
    load_deadline_secs: float | None = None
    adapter_root: Sequence[str] | None = None
    min_ready: int | None = None
    state_dir: str | None = None
    max_body_mib: int | None = None
    wait_ready_secs: float | None = None
    unload_drain_secs: float | None = None
    probe_secs: float | None = None
    kv_events: bool | None = None
    kv_events_port: int | None = None
    strict: bool | None = None
    verify_load: bool | None = None
    transport: str | None = None
    receipts: str | None = None
    receipts_max_mib: int | None = None
    log_level: str | None = None


DEFAULTS = Options(
    host="127.0.0.1",
    port=8000,
    api_key_env=DEFAULT_KEY_ENV,
    insecure_no_auth=False,
    policy="prefix",
    pause="eager",
    pause_lease_secs=600.0,
    pause_queue=4096,
    load_deadline_secs=300.0,
    adapter_root=(),
    max_body_mib=256,
    wait_ready_secs=30.0,
    unload_drain_secs=120.0,
    probe_secs=1.0,
    kv_events=False,
    kv_events_port=5557,
    strict=False,
    verify_load=False,
    transport="lean",
    receipts_max_mib=256,
    log_level="info",
)

RANGES: dict[str, tuple[float, float]] = {
    "kv_events_port": (1, 65535),
    "port": (0, 65535),
    "pause_lease_secs": (0, 7 * 86400),
    "pause_queue": (0, 1_000_000),
    "load_deadline_secs": (0.1, 86400),
    "min_ready": (1, 100_000),
    "max_body_mib": (1, 16384),
    "wait_ready_secs": (0, 86400),
    "unload_drain_secs": (0, 86400),
    "probe_secs": (0.05, 60),
    "receipts_max_mib": (1, 1_000_000),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "policy": POLICIES,
    "pause": ("eager", "lazy"),
    "transport": ("lean", "aiohttp"),
    "log_level": ("debug", "info", "warning", "error"),
}


@dataclass(frozen=True, slots=True)
class Secret:
    """A string that no repr shows."""

    value: str

    def __repr__(self) -> str:
        return "Secret(***)"


@dataclass(frozen=True, slots=True)
class KvEvents:
    """`port` is where replicas publish cache events, `endpoints` (by base URL) where some do so elsewhere."""

    port: int
    endpoints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """What `serve` runs with. Durations in seconds, sizes in bytes."""

    host: str
    port: int
    endpoints: tuple[Endpoint, ...]
    groups: tuple[Group, ...]
    default_token: TokenSource
    api_key: Secret | None
    policy: str
    pause_mode: str
    control: ControlSettings
    min_ready: int
    state_dir: Path
    max_body_bytes: int
    wait_ready_secs: float
    pause_queue: int
    transport: str
    kv_events: KvEvents | None
    receipts: Path | None
    receipts_max_bytes: int
    log_level: str


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_toml(path: str | None) -> dict[str, Any]:
    """The TOML file as a dict; empty without one. Raises ConfigError naming --config."""
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}; name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from None
    known = {field.name for field in fields(Options)} | {"replica"}
    for key in tree:
        if key.replace("-", "_") not in known:
            raise ConfigError(f"--config: {path}: unknown setting {key!r}; known are {', '.join(sorted(known))}")
    return {key.replace("-", "_"): value for key, value in tree.items()}


def build(
    urls: Sequence[str],
    options: Options,
    *,
    config: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Merge and check everything. Raises ConfigError with one line that names the flag and the mend."""
    tree = read_toml(config)
    chosen = {field.name: _pick(field.name, options, tree) for field in fields(Options)}
    default_token = read_token(chosen["token_env"], chosen["token_file"], environment)
    endpoints, groups = read_replicas(urls, tree.get("replica", []), default_token, environment)
    host, api_key_env = chosen["host"], chosen["api_key_env"]
    key = environment.get(api_key_env, "").strip()
    if not key and api_key_env != DEFAULT_KEY_ENV:
        raise ConfigError(f"--api-key-env: environment variable {api_key_env} is empty; set it or leave the flag out")
    if not key and not is_loopback(host) and not chosen["insecure_no_auth"]:
        raise ConfigError(
            f"--host {host} can be reached from other machines, and lorafleet adds your token to what it forwards: "
            f"set a key for clients in ${api_key_env}, or say --insecure-no-auth"
        )
    least = len(endpoints) + len(groups)
    min_ready = chosen["min_ready"] if chosen["min_ready"] is not None else least
    if min_ready > least and not groups:
        raise ConfigError(f"--min-ready {min_ready} is more than the {len(endpoints)} replicas given; lower it")
    return Settings(
        host=host,
        port=chosen["port"],
        endpoints=endpoints,
        groups=groups,
        default_token=default_token,
        api_key=Secret(key) if key else None,
        policy=chosen["policy"],
        pause_mode=chosen["pause"],
        control=ControlSettings(
            lazy_pause=chosen["pause"] == "lazy",
            pause_lease_secs=chosen["pause_lease_secs"],
            load_deadline_secs=chosen["load_deadline_secs"],
            adapter_roots=_roots(chosen["adapter_root"]),
            strict=chosen["strict"],
            verify_load=chosen["verify_load"],
            unload_drain_secs=chosen["unload_drain_secs"],
            probe_secs=chosen["probe_secs"],
        ),
        min_ready=min_ready,
        state_dir=Path(chosen["state_dir"]) if chosen["state_dir"] else default_state_dir(chosen["port"], environment),
        max_body_bytes=chosen["max_body_mib"] << 20,
        wait_ready_secs=chosen["wait_ready_secs"],
        pause_queue=chosen["pause_queue"],
        kv_events=_kv_events(chosen, tree.get("replica", [])),
        transport=chosen["transport"],
        receipts=Path(chosen["receipts"]) if chosen["receipts"] else None,
        receipts_max_bytes=chosen["receipts_max_mib"] << 20,
        log_level=chosen["log_level"],
    )


def default_state_dir(port: int, environment: Mapping[str, str]) -> Path:
    """$XDG_STATE_HOME (or ~/.local/state)/lorafleet/<port>."""
    base = environment.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "lorafleet" / str(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _pick(name: str, options: Options, tree: Mapping[str, Any]) -> Any:
    value = getattr(options, name)
    if value is None and name in tree:
        value = _typed(name, tree[name])
    if value is None:
        value = getattr(DEFAULTS, name)
    if name in RANGES and value is not None:
        low, high = RANGES[name]
        if not low <= value <= high:  # NaN fails too
            raise ConfigError(f"{flag(name)} {value:g} is out of range; choose {low:g} to {high:g}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigError(f"{flag(name)} {value!r} is not one of {', '.join(CHOICES[name])}")
    return value


def _typed(name: str, value: Any) -> Any:
    """A TOML value as the flag's type. Raises ConfigError."""
    default = getattr(DEFAULTS, name)
    wanted: tuple[type, ...]
    if name == "adapter_root":
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise ConfigError(f"--config: {name} must be a string or a list of strings")
    if isinstance(default, bool):
        wanted = (bool,)
    elif isinstance(default, float):
        wanted = (int, float)
    elif isinstance(default, int) or name == "min_ready":
        wanted = (int,)
    else:
        wanted = (str,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"--config: {name} must be {' or '.join(t.__name__ for t in wanted)}, not {value!r}")
    return value


def _kv_events(chosen: Mapping[str, Any], tables: list[dict[str, Any]]) -> KvEvents | None:
    if not chosen["kv_events"]:
        return None
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("--kv-events needs pyzmq; install it with: pip install 'lorafleet[kv-events]'")
    own = {check_url(t["url"]): t["kv_events"] for t in tables if "kv_events" in t}
    for endpoint in own.values():
        if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
            raise ConfigError(f"--config: kv_events {endpoint!r} is no endpoint; write tcp://host:port")
    return KvEvents(chosen["kv_events_port"], own)


def _roots(roots: Sequence[str]) -> tuple[Path, ...]:
    for root in roots:
        if not os.path.isabs(root):
            raise ConfigError(f"--adapter-root {root!r} is not absolute; write the full path")
        if not os.path.isdir(root):
            raise ConfigError(f"--adapter-root {root!r} is not a directory; create it or name another")
    return tuple(Path(root) for root in roots)

"""The control plane from a trainer's side: a small synchronous client."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from trainer_client import fleet_view
from trainer_client.errors import FleetRefused, FleetUnreachable
from trainer_client.fleet_view import Limits

KEY_VARIABLE = "LORAFLEET_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
_TRIES = 4
_FIRST_WAIT = 0.2  # seconds before the second try; doubles, jittered
_GATEWAY = {502, 503, 504}
# A load may take minutes and has no total timeout here; a peer that vanished without a word is noticed by keep-alive.
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, option), value)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, option)
]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the fleet serves, the status of GET /health, and its JSON body (empty when it had none)."""

    ok: bool
    status: int
    detail: Mapping[str, Any]


class FleetClient:
    """One fleet (or one plain vLLM server). Not for use from several threads at once while `close` is called.

    `api_key` defaults to the environment's LORAFLEET_API_KEY. `timeout` (seconds) bounds the calls that only look;
    calls that change the fleet wait as long as the fleet does, since it has its own deadlines, unless `load_timeout`
    says otherwise. Every call that changes something may be sent again after a broken connection: the fleet answers a
    repeated one as a success without effect. No redirect is followed and no proxy of the environment is used: the key
    goes to `url` and nowhere else.

    All calls raise FleetUnreachable when there is no answer, FleetRefused when the answer is no.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout: float = 30.0,
        *,
        connect_timeout: float = 5.0,
        load_timeout: float | None = None,
    ) -> None:
        self.url = _checked_url(url)
        key = (os.environ.get(KEY_VARIABLE) if api_key is None else api_key) or ""
        self._key = _checked_key(key.strip())
        self._looking = httpx.Timeout(timeout, connect=connect_timeout)
        self._changing = httpx.Timeout(30.0, connect=connect_timeout, read=load_timeout)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self._key}"} if self._key else {},
            follow_redirects=False,
            trust_env=False,
            # Certificates take longer to read than most calls take; without TLS there is nothing to check.
            transport=httpx.HTTPTransport(verify=self.url.startswith("https:"), socket_options=_KEEPALIVE),
        )

    def __repr__(self) -> str:
        return f"FleetClient({_shown(self.url)!r})"

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- changes ----------------------------------------------------------------------------------------------------

    def load(self, name: str, path: str | os.PathLike[str], digest: str | None = None) -> None:
        """Load the adapter on all replicas, or on none. `path` is absolute, as the replicas see it.

        `digest` (see `trainer_client.digest`) lets the fleet tell a repeated load from other weights under the name.
        """
        where = os.fspath(path)
        if not os.path.isabs(where):
            raise ValueError(f"path {where!r} is relative; replicas need an absolute one")
        body = {"lora_name": name, "lora_path": where, "load_inplace": False}
        if digest:
            body["digest"] = digest
        try:
            self._change("/v1/load_lora_adapter", json=body)
        except FleetRefused as error:
            # A plain vLLM server says so when the first try did arrive and only its answer was lost.
            if not (error.repeated and "already been loaded" in error.message):
                raise

    def unload(self, name: str, *, missing_ok: bool = False) -> bool:
        """Unload it everywhere. Returns whether it was loaded; FleetRefused (404) if not, unless `missing_ok`."""
        try:
            self._change("/v1/unload_lora_adapter", json={"lora_name": name})
        except FleetRefused as error:
            if error.status == 404 and (missing_ok or error.repeated):
                return False
            raise
        return True

    def pause(self, mode: str = "keep") -> None:
        """Stop generation on all replicas. `keep` freezes what runs, `wait` lets it end, `abort` ends it."""
        self._change("/pause", params={"mode": mode})

    def resume(self) -> None:
        """Go on after a pause."""
        self._change("/resume")

    @contextlib.contextmanager
    def paused(self, mode: str = "keep") -> Iterator[None]:
        """Pause for the length of a `with` block, and resume however it ends."""
        try:
            self.pause(mode)
        except FleetUnreachable:
            # The answer was lost, so the fleet may be paused.
            with contextlib.suppress(FleetUnreachable, FleetRefused):
                self.resume()
            raise
        try:
            yield
        finally:
            self.resume()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        """Forget every cached prefix.

        vLLM answers 200 with `{"success": false}` and does nothing while requests run; that is a FleetRefused here.
        With `reset_running_requests` it succeeds and prefills everything that runs again.
        """
        params = {"reset_running_requests": "true"} if reset_running_requests else {}
        answer = self._change("/reset_prefix_cache", params=params)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise FleetRefused(200, "nothing was reset, because requests are running")

    # -- membership -------------------------------------------------------------------------------------------------

    def add_replica(self, url: str) -> int:
        """Let a replica join: adapters and pause state first, traffic second. Its index."""
        return int(self._change("/fleet/replicas", json={"url": url})["index"])

    def drain_replica(self, index: int) -> None:
        """Give it no new work; what it has it finishes."""
        self._change(f"/fleet/replicas/{index}/drain")

    def undrain_replica(self, index: int) -> None:
        """Let a drained replica serve again."""
        self._change(f"/fleet/replicas/{index}/undrain")

    def remove_replica(self, index: int) -> None:
        """Forget a replica for good. Refused while it has work or is the last one that serves."""
        self._call("DELETE", f"/fleet/replicas/{index}", self._changing, {})

    # -- looks ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """GET /fleet: replicas, adapters, pause, counters."""
        answer = self._look("/fleet")
        return answer if isinstance(answer, dict) else {}

    def models(self) -> list[dict[str, Any]]:
        """The data of GET /v1/models: the base model first, then the adapters that may be asked for."""
        answer = self._look("/v1/models")
        return list(answer.get("data") or []) if isinstance(answer, dict) else []

    def adapters(self) -> frozenset[str]:
        """Every adapter name that the fleet or one of its replicas knows, routable or not."""
        try:
            return fleet_view.adapter_names(self.status())
        except FleetRefused as error:
            if error.status not in (404, 405):
                raise
        return fleet_view.model_names(self.models())

    def limits(self) -> Limits:
        """The smallest LoRA limits among the replicas; unknown ones are None."""
        try:
            answer = self._look("/server_info", params={"config_format": "json"})
        except FleetRefused as error:
            if error.status in (404, 405, 501):
                return Limits(None, None)
            raise
        return fleet_view.limits(answer if isinstance(answer, dict) else {})

    def health(self) -> Health:
        """One GET /health, not repeated. A 503 is an answer, not an error."""
        response = self._once("GET", "/health", self._looking, {})
        try:
            detail = response.json()
        except ValueError:
            detail = {}
        return Health(response.status_code == 200, response.status_code, detail if isinstance(detail, dict) else {})

    def wait_ready(self, timeout: float = 600.0, poll: float = 0.5) -> Health:
        """Wait until the fleet serves. Raises FleetUnreachable after `timeout` seconds, with the last thing seen."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                health = self.health()
                if health.ok:
                    return health
                last = f"last answer {health.status} {dict(health.detail) or ''}".rstrip()
            except FleetUnreachable as error:
                last = str(error)
            if time.monotonic() + poll > deadline:
                raise FleetUnreachable(f"not ready after {timeout:g} s: {last}")
            time.sleep(poll)

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _change(self, path: str, **options: Any) -> Any:
        return self._call("POST", path, self._changing, options)

    def _look(self, path: str, **options: Any) -> Any:
        return self._call("GET", path, self._looking, options)

    def _call(self, method: str, path: str, timeout: httpx.Timeout, options: dict[str, Any]) -> Any:
        """The decoded answer (None when it is no JSON), after a few tries while the connection breaks."""
        wait = _FIRST_WAIT
        for attempt in range(_TRIES):
            try:
                response = self._once(method, path, timeout, options)
                break
            except FleetUnreachable as error:
                if attempt == _TRIES - 1 or isinstance(error.__cause__, httpx.ReadTimeout):
                    raise
                time.sleep(wait * random.uniform(0.5, 1.5))
                wait *= 2
        if response.is_success:
            try:
                return response.json()
            except ValueError:
                return None
        raise self._failure(response, repeated=attempt > 0)

    def _once(self, method: str, path: str, timeout: httpx.Timeout, options: dict[str, Any]) -> httpx.Response:
        try:
            return self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            what = fleet_view.one_line(self._redact(str(error))) or type(error).__name__
            raise FleetUnreachable(f"{_shown(self.url)}{path}: {what}") from error

    def _failure(self, response: httpx.Response, repeated: bool) -> FleetRefused | FleetUnreachable:
        status = response.status_code
        if response.is_redirect:
            return FleetRefused(status, f"{_shown(self.url)} answered with a redirect, which is not followed")
        said = fleet_view.refusal(status, self._redact(response.text))
        if status in _GATEWAY and not said.shaped:
            return FleetUnreachable(f"{_shown(self.url)}: something on the way answered {status}: {said.message}")
        message = said.message
        if status == 401:
            message += f" (the key is read from {KEY_VARIABLE}: {'set' if self._key else 'not set'})"
        return FleetRefused(status, message, said.replicas, repeated=repeated)

    def _redact(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _checked_url(url: str) -> str:
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url {_shown(url)!r} needs a scheme and a host, as in {DEFAULT_URL}")
    if parts.query or parts.fragment:
        raise ValueError(f"url {_shown(url)!r} must not have a query or a fragment")
    return f"{parts.scheme}:{url.strip().partition(':')[2]}".rstrip("/")


def _checked_key(key: str) -> str:
    if not key.isascii() or not all(c.isprintable() and c != " " for c in key):
        raise ValueError(f"the API key (from {KEY_VARIABLE}) has characters that no HTTP header can carry")
    return key


def _shown(url: str) -> str:
    """The URL without user information, which may hold a password."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"

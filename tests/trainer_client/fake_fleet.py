"""A fleet of one thread: answers as the proxy does, remembers what it was asked, and misbehaves on demand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Any]


@dataclass
class FakeFleet:
    """`before` may return an answer instead of the usual one, or "reset" (close before acting), "lost" (act, close)."""

    key: str | None = None
    max_loras: int = 8
    max_lora_rank: int = 16
    plain_vllm: bool = False
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)
    paused: bool = False
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    before: Callable[[str, Any], Answer | str | None] = lambda path, body: None

    def __enter__(self) -> FakeFleet:
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                raw = self.rfile.read(length)
                fleet._serve(self, json.loads(raw) if raw else None)

            do_GET = do_POST = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, path: str) -> list[Any]:
        return [body for _, at, body in self.calls if at == path]

    def changes(self) -> list[tuple[str, str]]:
        """Loads and unloads in order, with the names."""
        short = {"/v1/load_lora_adapter": "load", "/v1/unload_lora_adapter": "unload"}
        return [(short[at], body["lora_name"]) for _, at, body in self.calls if at in short]

    def _serve(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        parts = urlsplit(handler.path)
        self.calls.append((handler.command, parts.path, body))
        self.headers.append({k.lower(): v for k, v in handler.headers.items()})
        odd = self.before(parts.path, body)
        if odd == "reset":
            self._cut(handler)
            return
        if self.key is not None and handler.headers.get("authorization") != f"Bearer {self.key}":
            answer: Answer = (401, _error(401, "no key"))
        elif isinstance(odd, tuple):
            answer = odd
        else:
            answer = self._answer(parts.path, parse_qs(parts.query), body)
        if odd == "lost":
            self._cut(handler)
            return
        status, value = answer
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        handler.send_response(status)
        if status in (301, 302, 307, 308):
            handler.send_header("location", "http://127.0.0.1:9/elsewhere")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    @staticmethod
    def _cut(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        if path == "/v1/load_lora_adapter":
            name = body["lora_name"]
            known = self.adapters.get(name)
            if self.plain_vllm and known is not None:
                return 400, _error(400, f"The lora adapter '{name}' has already been loaded.")
            self.adapters[name] = {"name": name, "path": body["lora_path"], "digest": body.get("digest")}
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return 404, _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            return 200, "Success"
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return 200, {"status": "ok", "mode": query.get("mode", [None])[0]}
        if path == "/reset_prefix_cache":
            return 200, {"success": "reset_running_requests" in query}
        if path == "/health":
            return 200, {"ready": 1, "total": 1}
        if path == "/fleet" and not self.plain_vllm:
            replica = {"index": 0, "url": "http://r0", "state": "ready", "in_flight": 2, "adapters": [*self.adapters]}
            return 200, {"replicas": [replica], "adapters": [*self.adapters.values()], "paused": self.paused}
        if path == "/v1/models":
            base = {"id": "tiny", "root": "/m", "parent": None, "max_model_len": 4096}
            rows = [{"id": n, "root": a["path"], "parent": "tiny"} for n, a in self.adapters.items()]
            return 200, {"object": "list", "data": [base, *rows]}
        if path == "/server_info":
            lora = {"max_loras": self.max_loras, "max_lora_rank": self.max_lora_rank}
            return 200, {"vllm_config": {"lora_config": lora}}
        return 404, _error(404, "Not Found")


def _error(status: int, message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "X", "param": None, "code": status} | more}


error_body = _error

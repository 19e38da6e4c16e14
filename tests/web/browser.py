"""A browser and a scripted proxy for the status page's tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

from proxy.web.page import page

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class ScriptedProxy:
    """Serves the page as the proxy does, and `fleet` at /fleet: a dict, an int (a status without a body), or None, in
    which case the connection is closed without an answer."""

    def __init__(self) -> None:
        self.fleet: Any = {}
        self.key: str | None = None
        self.asked: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/":
                    self.reply(200, page().body, [(n.decode(), v.decode()) for n, v in page().headers])
                    return
                proxy.asked.append(self.path)
                if proxy.key is not None and self.headers["authorization"] != f"Bearer {proxy.key}":
                    self.reply(401, b"{}", [])
                elif proxy.fleet is None:
                    self.close_connection = True
                elif isinstance(proxy.fleet, int):
                    self.reply(proxy.fleet, b"", [])
                else:
                    self.reply(200, json.dumps(proxy.fleet).encode(), [("content-type", "application/json")])

            def reply(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
                self.send_response(status)
                for name, value in [*headers, ("content-length", str(len(body)))]:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._handler = Handler
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def chromium(profile: str, *flags: str) -> Iterator[WebDriver]:
    """Headless Chromium with a fresh profile. Without it the test is skipped, in CI (CI=true) it fails."""
    driver = shutil.which("chromedriver")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or binary is None:
        missing = "chromium and chromedriver are needed: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()

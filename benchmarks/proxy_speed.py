"""How fast the proxy alone is: one core for it, nginx answering behind it, wrk in front, peers side by side in one run.

    python -m benchmarks.proxy_speed [--seconds 3] [--sizes 100 600 8000 32000] [--rounds 2]

Needs wrk and nginx (Debian: wrk, nginx-light), two cores, and vllm-router (pip) for the comparison. Core 0 runs nginx
and wrk, core 1 the proxy under test; peers take turns within each round; what is compared is the ratio of their means.
Prints a table and writes out/proxy_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPT = HERE / "wrk_groups.lua"
BINARIES = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def completion(tokens: int, logprobs: bool) -> str:
    """A completion's JSON with `tokens` output ids."""
    ids = [7 * i % 50_000 for i in range(tokens)]
    choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "length"}
    if logprobs:
        choice["logprobs"] = {"token_logprobs": [-(i % 997) / 1000 for i in range(tokens)]}
    usage = {"prompt_tokens": 600, "completion_tokens": tokens, "total_tokens": 600 + tokens}
    return json.dumps(
        {"id": "c", "object": "text_completion", "created": 1, "model": "base", "choices": [choice], "usage": usage},
        separators=(",", ":"),
    )


def nginx_conf(work: Path, ports: list[int]) -> str:
    """Two fake replicas: the answers of /v1/completions come from a file, the rest is what a proxy asks at start."""
    info = {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "model": "/m", "max_model_len": 65536},
            "parallel_config": {"data_parallel_size": 1},
            "lora_config": {"max_lora_rank": 16, "max_loras": 6},
            "cache_config": {"block_size": 16, "num_gpu_blocks": 65536, "kv_cache_size_tokens": 1048576},
        }
    }
    models = {"object": "list", "data": [{"id": "base", "root": "/m", "parent": None, "max_model_len": 65536}]}
    listens = " ".join(f"listen 127.0.0.1:{port} backlog=4096;" for port in ports)
    fixed = "".join(
        f"location = {path} {{ return 200 '{json.dumps(body)}'; }}\n"
        for path, body in (
            ("/health", {}),
            ("/v1/models", models),
            ("/server_info", info),
            ("/is_paused", {"is_paused": False}),
            ("/version", {"version": "0.27.1"}),
            ("/reset_prefix_cache", {"success": True}),
        )
    )
    return f"""
worker_processes 1; daemon off; pid {work}/pid; error_log {work}/error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 10000000; client_body_buffer_size 8m; client_max_body_size 64m;
  default_type application/json;
  client_body_temp_path {work}/b; proxy_temp_path {work}/p; fastcgi_temp_path {work}/f;
  uwsgi_temp_path {work}/u; scgi_temp_path {work}/s;
  server {{ {listens} root {work};
    {fixed}
    location / {{ error_page 405 =200 $uri; try_files /answer.json =404; error_page 405 =200 /answer.json; }}
    location = /answer.json {{ }}
  }}
}}
"""


class Peer:
    """A proxy under test, pinned to core 1."""

    def __init__(self, name: str, command: list[str], port: int) -> None:
        self.name, self.port = name, port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the peer
        self._process = subprocess.Popen(
            ["taskset", "-c", "1", *command], stdout=self._log, stderr=self._log, start_new_session=True
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.1)
        self._log.seek(0)
        raise SystemExit(f"{name} did not start:\n{self._log.read().decode(errors='replace')[-2000:]}")

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wrk(self, tokens: int, connections: int, seconds: float) -> dict[str, float]:
        """Requests/s, MB/s and p50 in ms of one run. Raises SystemExit when an answer was not 2xx."""
        out = subprocess.run(
            [
                "taskset",
                "-c",
                "0",
                "wrk",
                "-t1",
                f"-c{connections}",
                f"-d{seconds:g}s",
                "--latency",
                "-s",
                str(SCRIPT),
                f"http://127.0.0.1:{self.port}",
            ],
            env={**os.environ, "NTOK": str(tokens), "MODEL": "base"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if "Non-2xx" in out or "Socket errors" in out:
            raise SystemExit(f"{self.name}: errors\n{out}")
        return {
            "requests": float(_find(r"Requests/sec:\s+([\d.]+)", out)),
            "mb": _unit(_find(r"Transfer/sec:\s+(\S+)", out)),
            "p50_ms": _millis(_find(r"\s50%\s+(\S+)", out)),
        }


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"wrk said:\n{text}")
    return found.group(1)


def _unit(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([KMG]?B)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"B": 1e-6, "KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]


def _millis(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def peers(stack: ExitStack, urls: list[str], work: Path, transports: list[str]) -> list[Peer]:
    found = []
    for transport in transports:
        port = free_port()
        command = [
            str(BINARIES / "lorafleet"),
            "serve",
            *urls,
            "--port",
            str(port),
            "--transport",
            transport,
            "--state-dir",
            str(work / transport),
            "--log-level",
            "warning",
        ]
        found.append(Peer(f"lorafleet ({transport})", command, port))
    router = BINARIES / "vllm-router"
    if router.exists():
        port = free_port()
        command = [
            str(router),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--worker-urls",
            *urls,
            "--policy",
            "cache_aware",
            "--log-level",
            "error",
            "--prometheus-port",
            str(free_port()),
        ]
        found.append(Peer("vllm-router", command, port))
    for peer in found:
        stack.callback(peer.stop)
    return found


def compare(
    found: list[Peer], tokens: int, connections: int, seconds: float, rounds: int
) -> dict[str, dict[str, float]]:
    """Means over the rounds; peers take turns within each."""
    sums: dict[str, dict[str, float]] = {peer.name: {} for peer in found}
    for _ in range(rounds):
        for peer in found:
            for key, value in peer.wrk(tokens, connections, seconds).items():
                sums[peer.name][key] = sums[peer.name].get(key, 0.0) + value / rounds
    return sums


def show(title: str, results: dict[str, dict[str, float]], key: str) -> None:
    base = results.get("vllm-router", {}).get(key)
    cells = "  ".join(
        f"{name} {values[key]:>9,.2f}" + (f" ({values[key] / base:.2f}x)" if base else "")
        for name, values in results.items()
    )
    print(f"{title:<34} {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 600, 8000, 32000])
    parser.add_argument("--transports", nargs="+", default=["lean", "aiohttp"])
    options = parser.parse_args()
    for tool in ("wrk", "nginx", "taskset"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing (Debian: wrk, nginx-light, util-linux)")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        work.chmod(0o755)
        ports = [free_port(), free_port()]
        (work / "nginx.conf").write_text(nginx_conf(work, ports))
        (work / "answer.json").write_text(completion(16, logprobs=True))
        nginx = subprocess.Popen(["taskset", "-c", "0", "nginx", "-c", str(work / "nginx.conf")])
        stack.callback(nginx.wait)
        stack.callback(nginx.terminate)
        found = peers(stack, [f"http://127.0.0.1:{port}" for port in ports], work, options.transports)
        for tokens in options.sizes:
            got = compare(found, tokens, 32, options.seconds, options.rounds)
            results[f"{tokens} tokens, 32 connections"] = got
            show(f"{tokens} tokens, requests/s", got, "requests")
        got = compare(found, 600, 1, options.seconds, options.rounds)
        results["600 tokens, 1 connection"] = got
        show("600 tokens, 1 connection, p50 ms", got, "p50_ms")
        (work / "answer.json").write_text(completion(70_000, logprobs=True))
        got = compare(found, 600, 32, options.seconds, options.rounds)
        results["1 MB answers, 32 connections"] = got
        show("1 MB answers, MB/s", got, "mb")
    versions = {name: _version(name) for name in ("lorafleet", "vllm-router", "aiohttp", "uvicorn", "uvloop")}
    machine = {"machine": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version(), **versions}
    print(json.dumps(machine))
    out = Path("out")
    out.mkdir(exist_ok=True)
    body = {"date": time.strftime("%Y-%m-%d"), **machine, "results": results}
    (out / "proxy_speed.json").write_text(json.dumps(body, indent=1))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()

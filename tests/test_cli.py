"""The command line as a user meets it: exit codes, one line on stderr, every flag with its variable."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import fields

import pytest

from proxy.config import Options


def lorafleet(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LORAFLEET_", "HF_TOKEN"))}
    return subprocess.run(
        [sys.executable, "-m", "proxy.cli", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **env},
    )


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["serve"], "URL"),
        (["serve", "http://a", "http://a"], "twice"),
        (["serve", "a:1"], "scheme"),
        (["serve", "http://a", "--port", "99999"], "--port"),
        (["serve", "http://a", "--port", "x"], "--port"),
        (["serve", "http://a", "--nope"], "--nope"),
        (["serve", "http://a", "--token-env", "UNSET_ONE"], "--token-env"),
        (["serve", "http://a", "--config", "/no/such"], "--config"),
        (["load", "onlyname"], "PATH"),
        (["nosuchcommand"], "nosuchcommand"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args: list[str], named: str) -> None:
    done = lorafleet(*args)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert named.lower() in done.stderr.lower()


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = lorafleet("serve", "http://127.0.0.1:9", "--port", port)
    assert done.returncode == 2
    assert done.stderr == f"lorafleet: --port {port} is in use; stop what listens there or choose another port\n"


def test_a_variable_stands_for_its_flag() -> None:
    done = lorafleet("serve", "http://a", LORAFLEET_POLICY="best")
    assert done.returncode == 2
    assert "--policy" in done.stderr


def test_help_shows_every_flag_with_its_variable() -> None:
    text = lorafleet("serve", "--help").stdout
    for field in fields(Options):
        assert "--" + field.name.replace("_", "-") in text
    shown = re.sub(r"\s+", "", text)
    for field in fields(Options):
        assert f"LORAFLEET_{field.name.upper()}" in shown


def test_nothing_to_talk_to_is_exit_1() -> None:
    done = lorafleet("status", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\S*\n", lorafleet("version").stdout)

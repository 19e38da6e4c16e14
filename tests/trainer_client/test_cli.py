from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.trainer_client.fake_fleet import FakeFleet, error_body
from tests.trainer_client.support import visible, write_adapter
from trainer_client import cli
from trainer_client.digest import adapter_digest

SECRET = "canary-77aa01"


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    app = typer.Typer()
    cli.register(app)
    return CliRunner().invoke(app, list(arguments), env=env)


def test_publish(tmp_path: Path, root: Path, fleet: FakeFleet) -> None:
    source = write_adapter(tmp_path / "a")
    done = run("publish", str(source), "--root", str(root), "--url", fleet.url)
    assert done.exit_code == 0, done.output
    assert f"trl-policy-v1 at {root / 'trl-policy-v1'}, loaded, {adapter_digest(source)}" in done.stdout
    done = run("publish", str(source), "--root", str(root), "--name", "p", "--no-load", "--json")
    body = json.loads(done.stdout)
    assert (body["name"], body["loaded"], body["digest"]) == ("p-v1", False, adapter_digest(source))
    assert visible(root) == ["p-v1", "trl-policy-v1"] and sorted(fleet.adapters) == ["trl-policy-v1"]


def test_publish_again_and_again_keeps_the_window(tmp_path: Path, root: Path, fleet: FakeFleet) -> None:
    source = write_adapter(tmp_path / "a")
    for _ in range(3):
        done = run("publish", str(source), "--root", str(root), "--url", fleet.url, "--max-staleness", "0")
        assert done.exit_code == 0
    assert sorted(fleet.adapters) == ["trl-policy-v3"] and visible(root) == ["trl-policy-v2", "trl-policy-v3"]


def test_load_and_unload(tmp_path: Path, fleet: FakeFleet) -> None:
    source = write_adapter(tmp_path / "a")
    done = run("load", "x", str(source), "--url", fleet.url, "--json")
    assert json.loads(done.stdout) == {
        "name": "x",
        "path": str(source),
        "digest": adapter_digest(source),
        "loaded": True,
    }
    assert fleet.adapters["x"]["digest"] == adapter_digest(source)
    assert run("load", "y", "/only/on/replicas", "--url", fleet.url).stdout == "y loaded\n"
    assert fleet.adapters["y"]["digest"] is None
    assert run("load", "z", str(source), "--path-on-replicas", "/mnt/a", "--url", fleet.url).exit_code == 0
    assert fleet.adapters["z"] == {"name": "z", "path": "/mnt/a", "digest": adapter_digest(source)}
    assert run("unload", "x", "--url", fleet.url).stdout == "x unloaded\n"


def test_pause_resume_status(fleet: FakeFleet) -> None:
    assert run("pause", "--url", fleet.url).stdout == "paused (keep)\n"
    assert json.loads(run("status", "--url", fleet.url, "--json").stdout)["paused"] is True
    assert json.loads(run("resume", "--url", fleet.url, "--json").stdout) == {"paused": False}
    table = run("status", "--url", fleet.url)
    assert table.exit_code == 0 and "ready" in table.stdout


def test_refused_is_one_line_on_stderr_and_exit_1(tmp_path: Path, root: Path, fleet: FakeFleet) -> None:
    broken = write_adapter(tmp_path / "a", use_dora=True)
    for arguments in (
        ("publish", str(broken), "--root", str(root), "--url", fleet.url),
        ("publish", str(tmp_path / "none"), "--root", str(root), "--no-load"),
        ("load", "x", str(broken), "--url", fleet.url),
        ("unload", "x", "--url", fleet.url),
        ("status", "--url", "http://127.0.0.1:9"),
    ):
        done = run(*arguments)
        assert done.exit_code == 1, arguments
        assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    fleet.before = lambda path, body: (409, error_body(409, "slots:\nfull"))
    assert run("pause", "--url", fleet.url).stderr == "error: slots: full (status 409)\n"


def test_wrong_usage_is_exit_2_before_anything_starts(tmp_path: Path, root: Path, fleet: FakeFleet) -> None:
    source = str(write_adapter(tmp_path / "a"))
    for arguments in (
        ("publish", source),
        ("publish", source, "--root", str(root), "--name", "a/b"),
        ("publish", source, "--root", str(root), "--max-staleness", "-1"),
        ("publish", source, "--root", str(root), "--keep", "0"),
        ("publish", source, "--root", str(root), "--path-on-replicas", "rel"),
        ("publish", source, "--root", str(root), "--url", "nowhere"),
        ("load", "x", "org/adapter", "--url", fleet.url),
        ("load", "x", source, "--path-on-replicas", "rel", "--url", fleet.url),
        ("pause", "--mode", "forever", "--url", fleet.url),
        ("status", "--url", fleet.url, "--api-key-env", "NOT_SET_HERE"),
        ("resume", "--oops"),
    ):
        assert run(*arguments).exit_code == 2, arguments
    assert not root.exists() and fleet.calls == []


def test_flags_come_from_the_environment(tmp_path: Path, root: Path, fleet: FakeFleet) -> None:
    fleet.key = SECRET
    source = write_adapter(tmp_path / "a")
    env = {
        "LORAFLEET_URL": fleet.url,
        "LORAFLEET_API_KEY_ENV": "MY_KEY",
        "MY_KEY": SECRET,
        "LORAFLEET_ROOT": str(root),
        "LORAFLEET_NAME": "p",
        "LORAFLEET_JSON": "1",
    }
    done = run("publish", str(source), env=env)
    assert json.loads(done.stdout)["name"] == "p-v1"
    refused = run("status", env=env | {"MY_KEY": "other-" + SECRET})
    assert refused.exit_code == 1 and SECRET not in refused.output


@pytest.mark.parametrize("name", ["publish", "load", "unload", "pause", "resume", "status"])
def test_every_flag_has_its_variable_and_help(name: str) -> None:
    done = run(name, "--help", env={"COLUMNS": "200"})
    assert done.exit_code == 0
    app = typer.Typer()
    cli.register(app)
    command: Any = typer.main.get_command(app)
    for parameter in command.commands[name].params:
        flag = parameter.opts[0]
        assert parameter.help, flag
        if flag.startswith("--") and flag != "--help":
            assert parameter.envvar == "LORAFLEET_" + flag.removeprefix("--").replace("-", "_").upper()

"""Settings: precedence, and each complaint in one line that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import DEFAULTS, Options, Settings, build, default_state_dir, is_loopback
from proxy.errors import ConfigError

URL = "http://a:8000"


def settings(
    options: Options | None = None, urls: tuple[str, ...] = (URL,), config: str | None = None, **env: str
) -> Settings:
    return build(urls, options or Options(), config=config, environment=env)


def complaint(
    options: Options | None = None, urls: tuple[str, ...] = (URL,), config: str | None = None, **env: str
) -> str:
    with pytest.raises(ConfigError) as caught:
        build(urls, options or Options(), config=config, environment=env)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_are_the_contract() -> None:
    got = settings(HOME="/h")
    assert (got.host, got.port, got.policy, got.pause_mode, got.min_ready) == ("127.0.0.1", 8000, "prefix", "eager", 1)
    assert got.control.pause_lease_secs == 600
    assert got.control.load_deadline_secs == 300
    assert got.max_body_bytes == 256 << 20
    assert got.api_key is None
    assert got.endpoints[0].token() is None


def test_a_flag_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('port = 9000\npolicy = "round_robin"\npause-lease-secs = 5\n')
    got = settings(Options(port=9100), config=str(file))
    assert (got.port, got.policy, got.control.pause_lease_secs) == (9100, "round_robin", 5)


def test_tables_give_each_replica_its_own_token(tmp_path: Path) -> None:
    token = tmp_path / "t"
    token.write_text("from-file\n")
    file = tmp_path / "f.toml"
    file.write_text(
        f'[[replica]]\nurl = "http://a:1"\ntoken_env = "A"\n[[replica]]\nurl = "http://b:1"\ntoken_file = "{token}"\n'
        '[[replica]]\nurl = "http://c:1"\n'
    )
    got = settings(urls=(), config=str(file), A="from-env", HF_TOKEN="default")
    assert [endpoint.token() for endpoint in got.endpoints] == ["from-env", "from-file", "default"]
    assert "from-" not in repr(got)


def test_hf_token_is_sent_when_nothing_else_is_named() -> None:
    assert settings(HF_TOKEN="t").endpoints[0].token() == "t"
    assert settings(HF_TOKEN="").endpoints[0].token() is None


def test_replicas_from_the_environment() -> None:
    got = build([], Options(), environment={"LORAFLEET_REPLICAS": "http://a:1, http://b:2/"})
    assert [endpoint.base for endpoint in got.endpoints] == ["http://a:1", "http://b:2"]


def test_a_name_that_stands_for_several_replicas() -> None:
    got = settings(urls=("dns://vllm.svc:8000",))
    assert got.endpoints == ()
    assert str(got.groups[0]) == "dns://vllm.svc:8000"
    assert got.min_ready == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (Options(port=65536), "--port"),
        (Options(probe_secs=float("nan")), "--probe-secs"),
        (Options(pause_lease_secs=-1.0), "--pause-lease-secs"),
        (Options(policy="best"), "--policy"),
        (Options(pause="never"), "--pause"),
        (Options(min_ready=2), "--min-ready"),
        (Options(adapter_root=["relative"]), "--adapter-root"),
        (Options(adapter_root=["/no/such/dir"]), "--adapter-root"),
        (Options(token_env="NOPE"), "--token-env"),
        (Options(token_file="/no/such"), "--token-file"),
        (Options(api_key_env="NOPE"), "--api-key-env"),
        (Options(host="0.0.0.0"), "--insecure-no-auth"),
    ],
)
def test_a_wrong_setting_is_named(options: Options, named: str) -> None:
    assert named in complaint(options)


@pytest.mark.parametrize(
    "urls",
    [
        (),
        ("",),
        ("a:8000",),
        ("ftp://a",),
        ("http://",),
        ("http://a:b",),
        ("http://u:p@a:1",),
        ("http://a/?x=1",),
        (URL, URL + "/"),
        ("dns://a",),
    ],
)
def test_replicas_that_are_none(urls: tuple[str, ...]) -> None:
    said = complaint(urls=urls)
    assert "URL" in said
    assert "u:p" not in said


def test_an_empty_token_variable_that_was_named() -> None:
    assert "MY_TOKEN" in complaint(Options(token_env="MY_TOKEN"), MY_TOKEN=" ")


@pytest.mark.parametrize(
    "text", ["port = ", "colour = 1", "port = true", 'port = "1"', "replica = 3", "[[replica]]\nx=1"]
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f.toml"
    file.write_text(text)
    assert "--config" in complaint(urls=(), config=str(file))


def test_a_file_that_cannot_be_read() -> None:
    assert "--config" in complaint(config="/no/such.toml")


def test_other_machines_need_a_key() -> None:
    assert settings(Options(host="0.0.0.0"), LORAFLEET_API_KEY="k").api_key is not None
    assert settings(Options(host="0.0.0.0", insecure_no_auth=True)).api_key is None
    assert "k" not in repr(settings(Options(host="0.0.0.0"), LORAFLEET_API_KEY="kkkkk").api_key).replace("Secret", "")


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


def test_state_lies_in_the_users_directory_by_port() -> None:
    assert default_state_dir(8123, {"XDG_STATE_HOME": "/s"}) == Path("/s/lorafleet/8123")


def test_every_default_passes_its_own_check() -> None:
    assert settings(DEFAULTS).port == 8000

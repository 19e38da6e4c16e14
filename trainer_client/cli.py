"""The commands of a trainer and its operator: publish, load, unload, pause, resume, status.

Exit codes: 0 done, 1 refused or failed (the reason on stderr, one line), 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer_client import errors

if TYPE_CHECKING:
    from trainer_client.client import FleetClient

Url = Annotated[str, typer.Option("--url", envvar="LORAFLEET_URL", help="The fleet's address.")]
KeyEnv = Annotated[
    str,
    typer.Option("--api-key-env", envvar="LORAFLEET_API_KEY_ENV", help="Environment variable that holds the key."),
]
Json = Annotated[bool, typer.Option("--json", envvar="LORAFLEET_JSON", help="Print JSON instead of text.")]
OnReplicas = Annotated[
    str | None,
    typer.Option(
        "--path-on-replicas",
        envvar="LORAFLEET_PATH_ON_REPLICAS",
        help="Where the replicas have mounted the root, if elsewhere than here.",
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_KEY_ENV = "LORAFLEET_API_KEY"


def publish(
    directory: Annotated[str, typer.Argument(help="Adapter that PEFT or TRL wrote.", metavar="DIR")],
    root: Annotated[str, typer.Option("--root", envvar="LORAFLEET_ROOT", help="Directory of the versions.")],
    name: Annotated[str, typer.Option("--name", envvar="LORAFLEET_NAME", help="The policy's name.")] = "trl-policy",
    max_staleness: Annotated[
        int,
        typer.Option(
            "--max-staleness", envvar="LORAFLEET_MAX_STALENESS", min=0, help="Older versions that stay loaded."
        ),
    ] = 2,
    keep: Annotated[
        int | None,
        typer.Option("--keep", envvar="LORAFLEET_KEEP", min=1, help="Versions whose files stay, if more than that."),
    ] = None,
    no_load: Annotated[
        bool, typer.Option("--no-load", envvar="LORAFLEET_NO_LOAD", help="Only write the version; ask no fleet.")
    ] = False,
    path_on_replicas: OnReplicas = None,
    url: Url = DEFAULT_URL,
    api_key_env: KeyEnv = DEFAULT_KEY_ENV,
    as_json: Json = False,
) -> None:
    """Publish DIR as the next version, and load it on every replica."""
    from trainer_client.publisher import AdapterPublisher

    with _reported():
        client = None if no_load else _client(url, api_key_env)
        with _usage():
            publisher = AdapterPublisher(
                root,
                name,
                keep=keep,
                client=client,
                max_staleness=max_staleness,
                replica_root=path_on_replicas,
            )
        with publisher:
            done = publisher.publish(directory)
    text = f"{done.name} at {done.path}, {'loaded' if done.loaded else 'not loaded'}, {done.digest}"
    _say(done.to_dict(), text, as_json)
    for warning in done.warnings:
        typer.echo(f"warning: {warning}", err=True)


def load(
    name: Annotated[str, typer.Argument(help="Model name to load it under.")],
    path: Annotated[str, typer.Argument(help="The adapter's directory.")],
    path_on_replicas: Annotated[
        str | None,
        typer.Option(
            "--path-on-replicas",
            envvar="LORAFLEET_PATH_ON_REPLICAS",
            help="The same directory as the replicas see it, if elsewhere than here.",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key_env: KeyEnv = DEFAULT_KEY_ENV,
    as_json: Json = False,
) -> None:
    """Load the adapter in PATH under NAME on every replica."""
    from trainer_client.digest import adapter_digest
    from trainer_client.verify import verify_adapter

    here = os.path.abspath(path)
    if not os.path.isabs(path) and not os.path.isdir(here):
        raise typer.BadParameter(f"{path!r} is no directory here; give an absolute path if only the replicas have it")
    target = path_on_replicas or here
    if not os.path.isabs(target):
        raise typer.BadParameter(f"--path-on-replicas {target!r} is relative; replicas need an absolute path")
    with _reported():
        digest = None
        if os.path.isdir(here):
            verify_adapter(here)
            digest = adapter_digest(here)
        with _client(url, api_key_env) as client:
            client.load(name, target, digest)
    _say({"name": name, "path": target, "digest": digest, "loaded": True}, f"{name} loaded", as_json)


def unload(
    name: Annotated[str, typer.Argument(help="Model name to unload.")],
    url: Url = DEFAULT_URL,
    api_key_env: KeyEnv = DEFAULT_KEY_ENV,
    as_json: Json = False,
) -> None:
    """Unload NAME from every replica."""
    with _reported(), _client(url, api_key_env) as client:
        client.unload(name)
    _say({"name": name, "loaded": False}, f"{name} unloaded", as_json)


def pause(
    mode: Annotated[str, typer.Option("--mode", envvar="LORAFLEET_MODE", help="keep, wait or abort.")] = "keep",
    url: Url = DEFAULT_URL,
    api_key_env: KeyEnv = DEFAULT_KEY_ENV,
    as_json: Json = False,
) -> None:
    """Pause generation on every replica."""
    if mode not in ("keep", "wait", "abort"):
        raise typer.BadParameter(f"--mode {mode!r} is none of keep, wait, abort")
    with _reported(), _client(url, api_key_env) as client:
        client.pause(mode)
    _say({"paused": True, "mode": mode}, f"paused ({mode})", as_json)


def resume(url: Url = DEFAULT_URL, api_key_env: KeyEnv = DEFAULT_KEY_ENV, as_json: Json = False) -> None:
    """Resume generation on every replica."""
    with _reported(), _client(url, api_key_env) as client:
        client.resume()
    _say({"paused": False}, "resumed", as_json)


def status(url: Url = DEFAULT_URL, api_key_env: KeyEnv = DEFAULT_KEY_ENV, as_json: Json = False) -> None:
    """Show replicas and adapters."""
    with _reported(), _client(url, api_key_env) as client:
        body = client.status()
    if as_json:
        _say(body, "", True)
    else:
        from trainer_client.status_table import print_status

        print_status(body)


Index = Annotated[int, typer.Argument(min=0, help="The replica's index, as `lorafleet status` shows it.")]


def list_replicas(url: Url = DEFAULT_URL, api_key_env: KeyEnv = DEFAULT_KEY_ENV, as_json: Json = False) -> None:
    """Index, state and address of every replica."""
    with _reported(), _client(url, api_key_env) as client:
        rows = client.status().get("replicas", [])
    _say(rows, "\n".join(f"{row['index']}  {row['state']:<9} {row['url']}" for row in rows), as_json)


def add_replica(
    replica_url: Annotated[str, typer.Argument(metavar="REPLICA_URL", help="Like http://host:8000.")],
    url: Url = DEFAULT_URL,
    api_key_env: KeyEnv = DEFAULT_KEY_ENV,
    as_json: Json = False,
) -> None:
    """Let a replica join; it gets adapters and pause state first, traffic second."""
    with _reported(), _client(url, api_key_env) as client:
        index = client.add_replica(replica_url)
    _say({"index": index, "state": "joining"}, f"replica {index} joins", as_json)


def drain_replica(
    index: Index, url: Url = DEFAULT_URL, api_key_env: KeyEnv = DEFAULT_KEY_ENV, as_json: Json = False
) -> None:
    """Give a replica no new work; what it has it finishes."""
    with _reported(), _client(url, api_key_env) as client:
        client.drain_replica(index)
    _say({"index": index, "state": "draining"}, f"replica {index} drains", as_json)


def undrain_replica(
    index: Index, url: Url = DEFAULT_URL, api_key_env: KeyEnv = DEFAULT_KEY_ENV, as_json: Json = False
) -> None:
    """Let a drained replica serve again."""
    with _reported(), _client(url, api_key_env) as client:
        client.undrain_replica(index)
    _say({"index": index, "state": "joining"}, f"replica {index} joins again", as_json)


def remove_replica(
    index: Index, url: Url = DEFAULT_URL, api_key_env: KeyEnv = DEFAULT_KEY_ENV, as_json: Json = False
) -> None:
    """Forget a replica for good."""
    with _reported(), _client(url, api_key_env) as client:
        client.remove_replica(index)
    _say({"index": index, "state": "removed"}, f"replica {index} removed", as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`, which may have others."""
    for command in (publish, load, unload, pause, resume, status):
        app.command()(command)
    replicas = typer.Typer(no_args_is_help=True, help="List, add, drain and remove replicas of a running fleet.")
    for name, member_command in (
        ("list", list_replicas),
        ("add", add_replica),
        ("drain", drain_replica),
        ("undrain", undrain_replica),
        ("remove", remove_replica),
    ):
        replicas.command(name)(member_command)
    app.add_typer(replicas, name="replicas")


def main() -> None:
    """The commands of this package alone (`python -m trainer_client.cli`)."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Publish and control adapters of a fleet.")
    register(app)
    app()


def _client(url: str, api_key_env: str) -> FleetClient:
    from trainer_client.client import FleetClient

    key = os.environ.get(api_key_env)
    if not key and api_key_env != DEFAULT_KEY_ENV:
        raise typer.BadParameter(f"--api-key-env names {api_key_env}, which is not set or empty")
    with _usage():
        return FleetClient(url, api_key=key or "")


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """A value that a flag gave and that cannot be used: wrong usage, exit 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """What was refused or failed: its reason on one line of stderr, exit 1."""
    try:
        yield
    except (errors.TrainerClientError, OSError) as error:
        typer.echo(" ".join(f"error: {error}".split()), err=True)
        raise typer.Exit(1) from None


def _say(body: Any, text: str, as_json: bool) -> None:
    typer.echo(json.dumps(body, indent=1) if as_json else text)


if __name__ == "__main__":
    main()

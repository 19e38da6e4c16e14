"""The command line: parses and prints, decides nothing. Exit codes: 0 done, 1 refused or failed, 2 wrong usage."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import trainer_client.cli
from proxy import __version__
from proxy.config import DEFAULTS, POLICIES, Options, build
from proxy.errors import ConfigError

# Typer may carry click inside it; its exceptions are found through one that it exports.
UsageError: type[Any] = typer.BadParameter.__mro__[1]
ClickException: type[Any] = UsageError.__mro__[1]
NoArgsIsHelpError: type[Any] = getattr(sys.modules[UsageError.__module__], "NoArgsIsHelpError", UsageError)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One endpoint in front of a fleet of vLLM replicas, for reinforcement learning with LoRA adapters.",
)
trainer_client.cli.register(app)


def _flag(name: str, help_: str, **more: Any) -> Any:
    """An option with its LORAFLEET_ variable; the default is filled in later, so that TOML can come between."""
    default = getattr(DEFAULTS, name)
    if default not in (None, ()) and not isinstance(default, bool):
        help_ += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    dashed = "--" + name.replace("_", "-")
    shown = help_.replace("[", r"\[")  # or it would be taken for markup and left out
    return typer.Option(dashed, envvar=f"LORAFLEET_{name.upper()}", help=shown, show_default=False, **more)


def _replayed(name: str, help_: str, **more: Any) -> Any:
    """An option of `replay`."""
    return typer.Option("--" + name.replace("_", "-"), envvar=f"LORAFLEET_REPLAY_{name.upper()}", help=help_, **more)


@app.command()
def serve(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...",
            help="One URL per vLLM replica, or dns://name:port for all of a name (or LORAFLEET_REPLICAS, --config).",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", envvar="LORAFLEET_CONFIG", help=r"TOML file: flags by name, and \[\[replica]] tables."
        ),
    ] = None,
    host: Annotated[str | None, _flag("host", "Address to listen on.")] = None,
    port: Annotated[int | None, _flag("port", "Port to listen on; 0 takes a free one.")] = None,
    token_env: Annotated[
        str | None,
        _flag("token_env", "Environment variable with the Bearer token for every replica. [default: HF_TOKEN if set]"),
    ] = None,
    token_file: Annotated[
        str | None, _flag("token_file", "File with the token instead; read again when it changes.")
    ] = None,
    api_key_env: Annotated[
        str | None, _flag("api_key_env", "Environment variable with the key that clients must send.")
    ] = None,
    insecure_no_auth: Annotated[
        bool | None,
        _flag("insecure_no_auth", "Serve other machines without a key. Everybody who reaches it is trusted."),
    ] = None,
    policy: Annotated[
        str | None, _flag("policy", "How to route: prefix, consistent_hash, least_loaded or round_robin.")
    ] = None,
    pause: Annotated[
        str | None,
        _flag("pause", "eager: /pause stops the replicas. lazy: a keep-pause is remembered, adapter loads need none."),
    ] = None,
    pause_lease_secs: Annotated[
        float | None, _flag("pause_lease_secs", "A pause that nobody ends is ended after this; 0 = never.")
    ] = None,
    pause_queue: Annotated[
        int | None, _flag("pause_queue", "Requests that may wait at the proxy while it is paused or nobody is ready.")
    ] = None,
    load_deadline_secs: Annotated[
        float | None, _flag("load_deadline_secs", "How long a replica may take to see and load an adapter.")
    ] = None,
    adapter_root: Annotated[
        list[str] | None, _flag("adapter_root", "Adapters must lie below it; may be given more than once.")
    ] = None,
    min_ready: Annotated[
        int | None,
        _flag("min_ready", "/health is 503 until so many have been ready once. [default: all replicas]"),
    ] = None,
    state_dir: Annotated[
        str | None,
        _flag("state_dir", "Journal of the desired state. [default: ~/.local/state/lorafleet/PORT]"),
    ] = None,
    max_body_mib: Annotated[int | None, _flag("max_body_mib", "Largest request body, in MiB.")] = None,
    wait_ready_secs: Annotated[
        float | None, _flag("wait_ready_secs", "How long a request waits for a replica before it gets 503.")
    ] = None,
    unload_drain_secs: Annotated[
        float | None, _flag("unload_drain_secs", "How long completions under an unloaded name may go on.")
    ] = None,
    probe_secs: Annotated[float | None, _flag("probe_secs", "Time between two looks at a replica.")] = None,
    kv_events: Annotated[
        bool | None, _flag("kv_events", "Read vLLM's own cache events (extra kv-events): the index knows, not guesses.")
    ] = None,
    kv_events_port: Annotated[
        int | None, _flag("kv_events_port", "Where each replica publishes them; or kv_events in its TOML table.")
    ] = None,
    strict: Annotated[bool | None, _flag("strict", "A replica that is down fails loads, pauses and the like.")] = None,
    verify_load: Annotated[
        bool | None, _flag("verify_load", "After a load, prove by log-probabilities that all replicas serve it.")
    ] = None,
    transport: Annotated[
        str | None, _flag("transport", "Connections to replicas: lean (fewer layers) or aiohttp.")
    ] = None,
    receipts: Annotated[
        str | None,
        _flag("receipts", "File that gets one JSON line for each finished completion; prompts are not written."),
    ] = None,
    receipts_max_mib: Annotated[
        int | None, _flag("receipts_max_mib", "Size at which that file is turned over, in MiB; five older ones stay.")
    ] = None,
    log_level: Annotated[str | None, _flag("log_level", "debug, info, warning or error.")] = None,
) -> None:
    """Make the replicas look like one vLLM server."""
    given = dict(locals())
    options = Options(**{key: value for key, value in given.items() if key not in ("urls", "config") and value != []})
    from proxy.server import run_server

    run_server(build(urls or [], options, config=config))


@app.command()
def doctor(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL...", help="The replicas (or LORAFLEET_REPLICAS).")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", envvar="LORAFLEET_CONFIG", help="The TOML file that serve is given.")
    ] = None,
    token_env: Annotated[str | None, _flag("token_env", "Environment variable with the Bearer token.")] = None,
    token_file: Annotated[str | None, _flag("token_file", "File with the token instead.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter", envvar="LORAFLEET_ADAPTER", help="An adapter directory that all replicas should see."
        ),
    ] = None,
    max_staleness: Annotated[
        int, typer.Option("--max-staleness", envvar="LORAFLEET_MAX_STALENESS", min=0, help="The trainer's (TRL: 4).")
    ] = 4,
    rank: Annotated[
        int | None, typer.Option("--rank", envvar="LORAFLEET_RANK", min=1, help="The adapter's LoRA rank.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", envvar="LORAFLEET_JSON", help="Print JSON.")] = False,
) -> None:
    """Is this fleet fit for adapter-only RL? One line a check; exit 1 when not."""
    from proxy.doctor_view import run_doctor

    settings = build(urls or [], Options(token_env=token_env, token_file=token_file), config=config)
    if not settings.endpoints:
        raise ConfigError("URL: doctor examines addresses, not dns:// names; give the replicas' URLs")
    if adapter is not None and not adapter.startswith("/"):
        raise ConfigError(f"--adapter {adapter!r} is not absolute; write the path as the replicas see it")
    code = run_doctor(settings.endpoints, adapter=adapter, max_staleness=max_staleness, rank=rank, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def replay(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="What serve --receipts wrote; older ones too.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            envvar="LORAFLEET_REPLAY_POLICY",
            help=r"How to route; may be given more than once. \[default: prefix and round_robin]",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", envvar="LORAFLEET_REPLAY_ALL", help="All policies.")] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            envvar="LORAFLEET_REPLAY_REPLICAS",
            min=1,
            max=1024,
            help=r"Simulated replicas. \[default: as many as the file names]",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            envvar="LORAFLEET_REPLAY_CONCURRENCY",
            min=1,
            help="So many requests at a time, as fast as they are answered, instead of when they came.",
        ),
    ] = None,
    prefill_tps: Annotated[float, _replayed("prefill_tps", "Prompt tokens a second.", min=1)] = 20_000,
    decode_tps: Annotated[float, _replayed("decode_tps", "Generated tokens a second of a lone request.", min=0.1)] = 60,
    decode_slowdown: Annotated[
        float, _replayed("decode_slowdown", "How much each further request lengthens a decode step.", min=0)
    ] = 0.01,
    capacity_tokens: Annotated[int, _replayed("capacity_tokens", "KV cache of a replica.", min=16)] = 400_000,
    block_size: Annotated[int, _replayed("block_size", "Tokens of a KV block.", min=1, max=4096)] = 16,
    limit: Annotated[
        int | None,
        typer.Option("--limit", envvar="LORAFLEET_REPLAY_LIMIT", min=1, help="Only so many requests, the first ones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", envvar="LORAFLEET_JSON", help="Print JSON.")] = False,
) -> None:
    """Recorded traffic through other policies, on simulated replicas with a virtual clock; prints the comparison."""
    from proxy.replay_view import run_replay

    policies = POLICIES if every else tuple(dict.fromkeys(policy or ("prefix", "round_robin")))
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policy {name!r} is not one of {', '.join(POLICIES)}")
    code = run_replay(
        files,
        policies,
        replicas=replicas,
        capacity_tokens=capacity_tokens,
        block_size=block_size,
        prefill_tps=prefill_tps,
        decode_tps=decode_tps,
        decode_slowdown=decode_slowdown,
        concurrency=concurrency,
        limit=limit,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", envvar="LORAFLEET_KEEP_DEMO", help="Stay up afterwards for a look at the page.")
    ] = False,
) -> None:
    """An embedded fleet, a GRPO-shaped load and ten publishes; prints what happened."""
    from proxy.demo_view import run_demo

    raise typer.Exit(run_demo(keep=keep))


def main() -> None:
    """Run the command; one line on stderr when the usage is wrong."""
    if os.environ.get("LORAFLEET_PORT", "").startswith("tcp://"):  # Kubernetes sets it for a service of our name
        del os.environ["LORAFLEET_PORT"]
    try:
        code = app(standalone_mode=False)
    except ConfigError as error:
        _say(error.message)
        sys.exit(2)
    except NoArgsIsHelpError as error:
        typer.echo(error.ctx.get_help() if error.ctx else error.format_message())
        sys.exit(2)
    except UsageError as error:
        _say(f"{error.format_message()} (see lorafleet --help)")
        sys.exit(2)
    except ClickException as error:
        _say(error.format_message())
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _say(message: str) -> None:
    print(f"lorafleet: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""What makes a fleet fit for adapter-only RL: pure checks over what its replicas said.

Each check gives lines of (level, what, detail, fix). `proxy.doctor` asks the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.control.facts import Facts
from proxy.control.versions import KNOWN_BAD_LOADS, loads_are_safe, numbers


@dataclass(frozen=True, slots=True)
class Line:
    """`level` is ok, warn or fail. `fix` is what to do, empty for ok. `replica` is None for the whole fleet."""

    level: str
    replica: int | None
    what: str
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """What one replica answered. Statuses are HTTP statuses, None where no answer came.

    `load_route` is the status of a load request without a name: 400 from vLLM itself, 404 where the route is missing.
    `probe` is "" when the probe adapter was loaded, the reason when not, None when none was given. `engines` counts
    the looks at /v1/models, each on a connection of its own, that listed the probe, against `looks`.
    """

    replica: int
    reachable: bool
    error: str = ""
    models_status: int | None = None
    without_token: int | None = None
    token_sent: bool = False
    facts: Facts | None = None
    server_info: int | None = None
    is_paused: bool | None = None
    paused_status: int | None = None
    load_route: int | None = None
    adapters: Sequence[str] = ()
    probe: str | None = None
    looks: int = 0
    engines: int = 0


def examine(one: Examined, max_staleness: int, rank: int | None) -> list[Line]:
    """All lines about one replica."""
    n = one.replica
    if not one.reachable:
        return [Line("fail", n, "reachable", one.error, "start it, and check the address and the network between")]
    if one.models_status in (401, 403):
        fix = "name its token with --token-env or --token-file"
        return [Line("fail", n, "token", f"/v1/models answered {one.models_status}", fix)]
    if one.facts is None:
        fix = "is this a vLLM server?"
        return [Line("fail", n, "models", f"/v1/models answered {one.models_status} {one.error}".strip(), fix)]
    lines = [_token(one), _version(n, one.facts), *_endpoints(one), *_lora(n, one.facts, max_staleness, rank)]
    lines += [_parallel(n, one.facts), _paused(one), _leftovers(one), *_probe(one)]
    return lines


ALIKE: tuple[tuple[str, Callable[[Facts], object], str], ...] = (
    ("base model", lambda facts: facts.base_models[0] if facts.base_models else None, "fail"),
    ("dtype", lambda facts: facts.dtype, "fail"),
    ("max_model_len", lambda facts: facts.max_model_len, "fail"),
    ("version", lambda facts: facts.version, "warn"),
    ("block size", lambda facts: facts.block_size, "warn"),
    ("max_loras", lambda facts: facts.max_loras, "warn"),
)
"""What is compared, and how bad a difference is."""


def compare(replicas: Sequence[Examined]) -> list[Line]:
    """What must be the same on all replicas."""
    known = [(one.replica, one.facts) for one in replicas if one.facts is not None]
    lines = []
    for what, read, level in ALIKE:
        values = {n: read(facts) for n, facts in known}
        distinct = set(values.values())
        if len(distinct) <= 1:
            lines.append(Line("ok", None, f"same {what}", str(next(iter(distinct), None))))
        else:
            shown = ", ".join(f"replica {n}: {value}" for n, value in values.items())
            lines.append(Line(level, None, f"same {what}", shown, "start all replicas with the same command"))
    return lines


def _token(one: Examined) -> Line:
    if one.without_token in (401, 403):
        return Line("ok", one.replica, "token", "demanded and accepted")
    if one.token_sent:
        return Line("ok", one.replica, "token", "sent; the replica does not demand one")
    return Line("ok", one.replica, "token", "none sent, none demanded")


def _version(n: int, facts: Facts) -> Line:
    found = numbers(facts.version)
    if found is None:
        return Line("warn", n, "version", f"{facts.version}", "lorafleet was tried with vLLM 0.27.1 and 0.32.0")
    if found[:2] <= KNOWN_BAD_LOADS:
        detail = f"{facts.version}: a load while others decode can answer them with another adapter (vLLM #47724)"
        return Line("fail", n, "version", detail, "upgrade to 0.27.1 or later")
    if not loads_are_safe(facts.version):
        return Line("warn", n, "version", f"{facts.version}: not known to be free of vLLM #47724", "upgrade to 0.27.1")
    return Line("ok", n, "version", str(facts.version))


def _endpoints(one: Examined) -> list[Line]:
    n, lines = one.replica, []
    if one.server_info == 200 and one.paused_status == 200:
        lines.append(Line("ok", n, "dev endpoints", "/server_info and /is_paused answer"))
    else:
        detail = f"/server_info {one.server_info}, /is_paused {one.paused_status}"
        lines.append(Line("fail", n, "dev endpoints", detail, "set VLLM_SERVER_DEV_MODE=1 in its environment"))
    if one.load_route == 404:
        fix = "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        lines.append(Line("fail", n, "runtime LoRA updating", "/v1/load_lora_adapter does not exist", fix))
    else:
        lines.append(Line("ok", n, "runtime LoRA updating", "on"))
    return lines


def _lora(n: int, facts: Facts, max_staleness: int, rank: int | None) -> list[Line]:
    if facts.max_loras is None or facts.max_lora_rank is None:
        return [Line("fail", n, "LoRA", "no lora_config in /server_info", "start it with --enable-lora")]
    wanted = max_staleness + 2
    lines = [
        Line("ok", n, "max_loras", f"{facts.max_loras} (max_staleness {max_staleness} needs {wanted})")
        if facts.max_loras >= wanted
        else Line(
            "fail",
            n,
            "max_loras",
            f"{facts.max_loras}, max_staleness {max_staleness} needs {wanted}",
            f"start it with --max-loras {wanted}",
        )
    ]
    if rank is not None and facts.max_lora_rank < rank:
        lines.append(
            Line(
                "fail",
                n,
                "max_lora_rank",
                f"{facts.max_lora_rank}, the adapter has {rank}",
                f"start it with --max-lora-rank {rank}",
            )
        )
    else:
        lines.append(Line("ok", n, "max_lora_rank", str(facts.max_lora_rank)))
    return lines


def _parallel(n: int, facts: Facts) -> Line:
    size = facts.data_parallel_size
    if size in (None, 1):
        return Line("ok", n, "data_parallel_size", "1")
    fix = "start one server per engine (--data-parallel-size 1) and give lorafleet one URL for each"
    return Line("fail", n, "data_parallel_size", f"{size}: a load would reach one engine only", fix)


def _paused(one: Examined) -> Line:
    if one.is_paused:
        return Line("warn", one.replica, "paused", "it is paused now", "POST /resume, or start lorafleet, which does")
    return Line("ok", one.replica, "paused", "no")


def _leftovers(one: Examined) -> Line:
    if not one.adapters:
        return Line("ok", one.replica, "leftovers", "no adapter is loaded")
    names = ", ".join(one.adapters[:8]) + (" ..." if len(one.adapters) > 8 else "")
    fix = "fine for a running fleet; of an earlier run: unload them, or AdapterPublisher.start_run() does"
    return Line("warn", one.replica, "leftovers", names, fix)


def _probe(one: Examined) -> list[Line]:
    n = one.replica
    if one.probe is None:
        return [Line("warn", n, "probe adapter", "not tried", "give --adapter DIR, one that all replicas should see")]
    if one.probe:
        fix = "mount the same directory under the same path on every replica"
        return [Line("fail", n, "probe adapter", one.probe, fix)]
    lines = [Line("ok", n, "probe adapter", "seen, loaded and unloaded")]
    if one.engines < one.looks:
        detail = f"{one.engines} of {one.looks} looks listed it: more than one API server is behind this address"
        lines.append(Line("fail", n, "one server", detail, "give lorafleet the address of each server (no balancer)"))
    else:
        lines.append(Line("ok", n, "one server", f"{one.looks} looks on separate connections agree"))
    return lines

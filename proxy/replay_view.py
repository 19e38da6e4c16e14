"""What `lorafleet replay` prints: one row for what was recorded, one for each policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from proxy.replay import Hardware, replay
from proxy.replay_trace import Trace, read
from proxy.simulator.offline import Tally


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison; None where it is not known. Seconds are virtual ones but for what was recorded."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int | None
    reuse: float | None
    of_endless: float | None
    balance: float
    wall_secs: float
    first_token_secs: float | None


def recorded(trace: Trace) -> Row:
    """What the receipts say happened. The time to first token is that of the streamed answers."""
    receipts = [one.receipt for one in trace.calls]
    counted = [(r.prompt_tokens, r.cached_tokens) for r in receipts if r.prompt_tokens and r.cached_tokens is not None]
    cached, prompt = sum(c for _, c in counted), sum(p for p, _ in counted)
    streamed = [r.first_byte_secs for r in receipts if r.stream and r.first_byte_secs is not None]
    shares = [sum(1 for r in receipts if r.replica == index) for index in range(trace.replicas)]
    return Row(
        name="as recorded",
        requests=len(receipts),
        prompt_tokens=sum(r.prompt_tokens or 0 for r in receipts),
        cached_tokens=cached if counted else None,
        reuse=cached / prompt if prompt else None,
        of_endless=None,
        balance=max(shares) * len(shares) / max(1, len(receipts)),
        wall_secs=max(one.at + one.receipt.total_secs for one in trace.calls),
        first_token_secs=sum(streamed) / len(streamed) if streamed else None,
    )


def replayed(policy: str, tally: Tally) -> Row:
    return Row(
        name=policy,
        requests=tally.requests,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        reuse=tally.reuse,
        of_endless=tally.of_endless,
        balance=tally.balance,
        wall_secs=tally.wall_secs,
        first_token_secs=tally.first_token_secs / max(1, tally.requests),
    )


def run_replay(
    files: Sequence[str],
    policies: Sequence[str],
    *,
    replicas: int | None,
    capacity_tokens: int,
    block_size: int,
    prefill_tps: float,
    decode_tps: float,
    decode_slowdown: float,
    concurrency: int | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Print the comparison. Returns the exit code: 1 when the files hold nothing to replay.

    Raises ConfigError for a file that cannot be read and for a request that does not fit a replica.
    """
    trace = read(files, limit)
    if not trace.calls:
        print(f"lorafleet: nothing to replay in {', '.join(files)}; {_left_out(trace)}", file=sys.stderr)
        return 1
    hardware = Hardware(
        replicas=replicas or trace.replicas,
        capacity_tokens=capacity_tokens,
        block_size=block_size,
        prefill_tps=prefill_tps,
        decode_tps=decode_tps,
        decode_slowdown=decode_slowdown,
    )
    rows = [recorded(trace)]
    with Console(stderr=True).status("") as status:
        for policy in policies:
            status.update(f"{len(trace.calls)} requests, routed by {policy}")
            rows.append(replayed(policy, replay(trace, policy, hardware, concurrency)))
    if as_json:
        left_out = {name: getattr(trace, name) for name in ("unreadable", "unanswered", "without_prompt", "assumed")}
        shown = {"hardware": asdict(hardware), "concurrency": concurrency, "left_out": left_out}
        print(json.dumps({**shown, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        _print(rows, trace, hardware, concurrency)
    return 0


def _print(rows: Sequence[Row], trace: Trace, hardware: Hardware, concurrency: int | None) -> None:
    how = "as they came" if concurrency is None else f"{concurrency} at a time"
    table = Table(title=f"{len(trace.calls)} requests, {how}, on {hardware.replicas} simulated replicas")
    table.add_column("policy")
    for name in ("reused", "of an endless cache", "largest share / mean", "wall clock", "first token, mean"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            _percent(row.reuse),
            _percent(row.of_endless),
            f"{row.balance:.2f}",
            f"{row.wall_secs:.2f} s",
            "-" if row.first_token_secs is None else f"{row.first_token_secs * 1000:.0f} ms",
        )
    console = Console(file=sys.stdout)
    console.print(table)
    left_out = _left_out(trace)
    if left_out:
        console.print(left_out)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _left_out(trace: Trace) -> str:
    said = (
        (trace.unreadable, "lines are no receipts"),
        (trace.unanswered, "requests got no whole answer"),
        (trace.without_prompt, "requests had no prompt that can be routed by"),
        (trace.assumed, "answers did not tell their length: a usual one was taken"),
    )
    return "; ".join(f"{count} {what}" for count, what in said if count)

"""What `lorafleet doctor` prints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from proxy.doctor import diagnose
from proxy.upstream.transport import Endpoint

SIGNS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def run_doctor(
    endpoints: Sequence[Endpoint], *, adapter: str | None, max_staleness: int, rank: int | None, as_json: bool
) -> int:
    """Print one line a check. Returns 1 when one failed, else 0."""
    lines = asyncio.run(diagnose(endpoints, adapter=adapter, max_staleness=max_staleness, rank=rank))
    failed = [line for line in lines if line.level == "fail"]
    if as_json:
        print(json.dumps({"fit": not failed, "checks": [asdict(line) for line in lines]}, indent=1))
        return 1 if failed else 0
    for line in lines:
        who = "fleet    " if line.replica is None else f"replica {line.replica}"
        fix = f"; {line.fix}" if line.fix and line.level != "ok" else ""
        print(f"{SIGNS[line.level]}  {who}  {line.what}: {line.detail}{fix}")
    print(f"{'not fit' if failed else 'fit'} for adapter-only RL: {len(failed)} of {len(lines)} checks failed")
    return 1 if failed else 0

"""Finished requests as the data path reports them, without a data path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from proxy.lease import Served, Usage
from proxy.routing.request import parse
from proxy.routing.router import Router
from proxy.web.observe import Outcome


class DataPath:
    """Routes prompts with a router of its own and makes outcomes of them, each answered at once."""

    def __init__(self, replicas: int = 2) -> None:
        self.router = Router("prefix")
        self.replicas = list(range(replicas))
        self.now = 0.0
        for index in self.replicas:
            self.router.set_replica(index, key=f"http://r{index}", block_size=16, capacity_tokens=100_000)

    def outcome(
        self,
        prompt: Any,
        *,
        answer: Sequence[int] = (),
        model: str = "p-v1",
        salt: str = "",
        n: int = 1,
        adapter: bool = True,
        path: str = "/v1/completions",
        **changes: Any,
    ) -> Outcome:
        asked: dict[str, Any] = {"model": model, "n": n, "max_tokens": 64}
        asked["messages" if path == "/v1/chat/completions" else "prompt"] = prompt
        if salt:
            asked["cache_salt"] = salt
        request = parse(path, json.dumps(asked).encode())
        self.now += 1.0
        decision = self.router.decide(request, model, self.replicas, self.now)
        self.router.start(decision, self.now)
        count = decision.prompt_tokens
        usage = Usage(count, decision.cached_tokens, max(1, len(answer)), json.dumps(list(answer)).encode())
        if not answer:
            usage = Usage(count, decision.cached_tokens, 8 * n)
        self.router.end(
            decision,
            self.now,
            ok=True,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            output_ids=usage.output_ids,
        )
        known: dict[str, Any] = {
            "path": path,
            "status": 200,
            "replica": decision.replica,
            "decision": decision,
            "served": Served(model, model, "sha256:aa" if adapter else None, adapter),
            "usage": usage,
            "response_id": "cmpl-1",
            "request_bytes": 100,
            "response_bytes": 200,
            "waited_secs": 0.0,
            "first_byte_secs": 0.25,
            "total_secs": 0.5,
            "attempts": 1,
            "left": False,
            "cut": False,
            "n": request.n,
            "max_tokens": request.max_tokens,
            "stream": request.stream,
        }
        return Outcome(**{**known, **changes})

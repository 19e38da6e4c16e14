"""Proof of service: that every replica answers under a name with the same weights, and not with the base model's.

A load can answer 200 and have no effect (ms-swift #9855, vLLM #34186, #55193): the base model then answers under the
policy's name, and nobody notices before the reward curve does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.control.answers import Answer, ReplicaCalls
from proxy.control.desired import Adapter
from proxy.errors import ReplicaAnswer

if TYPE_CHECKING:
    from proxy.fleet import Replica

TOLERANCE = 1e-2
"""How far log-probabilities of the same weights may be apart on two replicas: rounding, with room for bfloat16."""


async def disagreement(
    calls: ReplicaCalls, replicas: Sequence[Replica], adapter: Adapter, base: str, timeout_secs: float
) -> tuple[str, list[ReplicaAnswer]] | None:
    """None when the replicas agree under the adapter and differ from base; otherwise why, and what each one said.

    An adapter whose B matrices are all zero (the first version of a run) answers as base does and is right.
    """
    probes = await asyncio.gather(*(calls.probe(r.endpoint, adapter.upstream, timeout_secs) for r in replicas))
    if any(isinstance(said, Answer) or not said for said in probes):
        return "the probe under the new name failed", [
            _told(r.index, said) for r, said in zip(replicas, probes, strict=True)
        ]
    values = [probe for probe in probes if not isinstance(probe, Answer)]
    if not all(_close(value, values[0]) for value in values):
        return "replicas answer with different weights under the new name", [
            replace(_told(r.index, value), at_fault=True) for r, value in zip(replicas, values, strict=True)
        ]
    of_base = await calls.probe(replicas[0].endpoint, base, timeout_secs)
    if isinstance(of_base, Answer) or not of_base:
        return "the probe of the base model failed", [
            _told(replicas[0].index, of_base),
            *(_told(r.index, value) for r, value in zip(replicas[1:], values[1:], strict=True)),
        ]
    if _close(of_base, values[0], exact=True) and not zero_effect(adapter.path):
        return (
            "the load had no effect: replicas answer under the new name exactly as the base model does",
            [ReplicaAnswer(r.index, 200, "answers as base") for r in replicas],
        )
    return None


def _told(index: int, said: Answer | tuple[float, ...]) -> ReplicaAnswer:
    if isinstance(said, Answer):
        return said.of(index)
    if not said:
        return ReplicaAnswer(index, 200, "named no log-probabilities")
    return ReplicaAnswer(index, 200, f"log-probabilities {_short(said)}", at_fault=False)


def zero_effect(path: str) -> bool:
    """Whether the adapter at `path` changes nothing (every B matrix zero). False when the files cannot be read."""
    from trainer_client.errors import TrainerClientError
    from trainer_client.verify import verify_adapter

    try:
        return verify_adapter(path).all_b_zero
    except (OSError, TrainerClientError):
        return False


def _close(left: tuple[float, ...], right: tuple[float, ...], *, exact: bool = False) -> bool:
    limit = 0.0 if exact else TOLERANCE
    return len(left) == len(right) and all(abs(a - b) <= limit for a, b in zip(left, right, strict=True))


def _short(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values) + "]"

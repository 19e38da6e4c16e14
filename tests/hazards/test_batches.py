"""A batch that is divided is one request: one set of weights, one answer or one error, nothing left behind.

Under publishes (pause, load, resume, unload of an older version), broken calls and clients that leave.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator import expected_tokens
from tests.faults.asgi import Answer
from tests.faults.rig import Rig, quick, rig, weights_of  # noqa: F401

PROMPTS = 4


def choices(answer: Answer) -> dict[int, list[int]]:
    """Token ids by index; of a stream too, which must have come to a good end."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return {choice["index"]: choice["token_ids"] for choice in answer.json()["choices"]}
    assert answer.body.endswith(b"data: [DONE]\n\n")
    found: dict[int, list[int]] = {}
    for event in answer.body.split(b"\n\n")[:-2]:
        for choice in json.loads(event[6:])["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


async def ask(it: Rig, weights: dict[str, str], draw: random.Random, **more: Any) -> bool:
    """One batch under the newest name; whether it was answered. What is answered must be right as a whole."""
    prompts: Any = [it.new_prompt(draw.randrange(5, 60)) for _ in range(PROMPTS)]
    answer = await it.complete("p-latest", prompts, 1 + draw.randrange(12), stream=draw.random() < 0.5, **more)
    if answer.status != 200 or not answer.whole or b'data: {"error"' in answer.body:
        assert answer.status in (None, 200, 502, 503), answer.text
        return False
    name = answer.headers["x-lorafleet-adapter"]
    found = choices(answer)
    assert sorted(found) == list(range(PROMPTS))
    for index, prompt in enumerate(prompts):
        assert found[index] == expected_tokens(weights[name], prompt, len(found[index])), f"{name}: wrong weights"
    return True


@pytest.mark.parametrize("faults", [False, True])
async def test_batches_under_publishes(faults: bool, tmp_path: Path) -> None:
    draw = random.Random(3)
    patient = {"health_timeout_secs": 30.0, "admin_timeout_secs": 30.0}
    async with rig(3, tmp_path, control=patient, decode_tps=3000) as it:
        weights: dict[str, str] = {}

        async def publish(version: int) -> None:
            name, path = f"p-v{version}", it.library.path(version)
            weights[name] = weights_of(path)
            await it.must_load(name, path)

        await publish(1)
        over = False
        good = bad = 0

        async def client() -> None:
            nonlocal good, bad
            while not over:
                if await ask(it, weights, draw):
                    good += 1
                else:
                    bad += 1

        clients = [asyncio.create_task(client()) for _ in range(6)]
        try:
            for version in range(2, 7):
                if faults:
                    replica = draw.choice(it.replicas)
                    replica.faults.add("reset", draw.choice(["completion", "stream"]), times=2)
                    replica.faults.add("reset_body", draw.choice(["completion", "stream"]), times=1)
                assert (await it.pause()).ok
                await publish(version)
                assert (await it.resume()).ok
                if version > 2:
                    await it.must_unload(f"p-v{version - 2}")
                before = good
                await it.until(lambda before=before: good >= before + 6, "answered")  # type: ignore[misc]
        finally:
            over = True
        await asyncio.gather(*clients)
        for replica in it.replicas:
            replica.faults.clear()
        assert faults or not bad
        await it.check()

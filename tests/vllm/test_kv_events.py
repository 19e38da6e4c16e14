"""vLLM's own cache events: the proxy knows what a replica holds although others put it there."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from .proxy import Proxy
from .replica import Replica
from .traffic import complete, prompt, session

pytestmark = pytest.mark.real

PROMPTS, LENGTH = 8, 320


async def test_prompts_that_the_proxy_never_saw_go_where_they_are_cached(
    replicas: list[Replica], serve: Callable[..., Proxy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "events.toml"
    config.write_text(
        "".join(f'[[replica]]\nurl = "{r.url}"\nkv_events = "tcp://127.0.0.1:{r.events_port}"\n' for r in replicas)
    )
    proxy = serve("--kv-events", "--config", str(config))
    prompts = [prompt(7000 + i, LENGTH) for i in range(PROMPTS)]
    async with session(proxy.token) as direct, session() as client:
        await asyncio.sleep(1.0)  # a subscriber hears only what is said after it has connected
        for i, ids in enumerate(prompts):
            await complete(direct, replicas[i % 2].url, "base", ids, tokens=2)
        await asyncio.sleep(0.5)  # events take a moment, and nothing tells that they have arrived
        answers = [await complete(client, proxy.url, "base", ids, tokens=2) for ids in prompts]
    right = sum(answer.replica == str(i % 2) for i, answer in enumerate(answers))
    with capsys.disabled():
        print(f"\nkv events: {right} of {PROMPTS} prompts found, cached {[answer.cached for answer in answers]}")
    assert [answer.replica for answer in answers] == [str(i % 2) for i in range(PROMPTS)]
    assert all(answer.cached >= LENGTH - 32 for answer in answers)
    assert {answer.route for answer in answers} == {"affinity"}

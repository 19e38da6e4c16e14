"""The trainer deletes the files while an engine still pages the adapter in (prime-rl #2395, vLLM #5105): a real
engine core dies of that. With the publisher, files outlive the unload until nothing can read them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import CANARY, Rig, quick, rig, weights_of  # noqa: F401
from trainer_client import AdapterPublisher, FleetClient


async def publish(it: Rig, publisher: AdapterPublisher, seed: int) -> str:
    source = it.library.path(seed, f"made-{seed}", modules=("q_proj", "v_proj"))
    published = await asyncio.to_thread(publisher.publish, source)
    it.names = {name: weights_of(Path(it.parts.fleet.desired.adapters[name].path)) for name in await it.listed()}
    assert published.name in it.names
    return str(published.name)


@pytest.mark.parametrize("max_loras", [3, 4])
async def test_no_engine_dies_of_missing_files(max_loras: int, tmp_path: Path) -> None:
    """Slots are short, completions run on under old versions while new ones come: every engine lives on, and every
    answer is right."""
    async with rig(2, tmp_path, max_loras=max_loras, decode_tps=200.0) as it, it.port() as port:
        client = FleetClient(f"http://127.0.0.1:{port}")
        publisher = AdapterPublisher(tmp_path / "published", max_staleness=1, client=client)
        running: list[asyncio.Task[None]] = []

        async def rollout(name: str) -> None:
            prompt, weights = it.new_prompt(), it.names[name]
            answer = await it.complete(name, prompt, n=60)
            if answer.status != 404:
                from tests.faults.rig import assert_weights

                assert_weights(answer, name, weights, prompt)

        for seed in range(1, 9):
            name = await publish(it, publisher, seed)
            running += [asyncio.create_task(rollout(name)) for _ in range(4)]
            await asyncio.sleep(0.1)
        await asyncio.gather(*running)
        assert [replica.replica.boots for replica in it.replicas] == [1, 1]
        assert not any(replica.replica.live.death for replica in it.replicas)
        it.names = {name: it.names[name] for name in await it.listed()}
        await it.check()
        client.close()

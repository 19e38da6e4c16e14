"""A name bound to other weights answers as a name that was never used, on real vLLM and its real prefix cache."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .proxy import Proxy
from .replica import Replica
from .traffic import complete, prompt, session, stream

pytestmark = pytest.mark.real

PROMPT = prompt(21, 500)
NAME = "trl-policy-v1"


@pytest.mark.parametrize("unload", [True, False], ids=["unloaded first", "loaded over it"])
@pytest.mark.parametrize("same_path", [True, False], ids=["same path", "other path"])
async def test_no_block_of_the_old_weights_is_used(
    replicas: list[Replica],
    serve: Callable[..., Proxy],
    adapters: Path,
    tmp_path: Path,
    same_path: bool,
    unload: bool,
) -> None:
    proxy = serve("--policy", "round_robin")  # so that both replicas hold the old weights' blocks
    path = tmp_path / "policy"
    shutil.copytree(adapters / "v1", path)
    assert proxy.load(NAME, path).status_code == 200
    async with session() as client, session(replicas[0].token) as direct:
        old = [await complete(client, proxy.url, NAME, PROMPT) for _ in range(4)]
        assert {answer.replica for answer in old} == {"0", "1"}
        # While anything runs, vLLM refuses to reset its prefix cache: that must not be what the answer rests on.
        busy = [asyncio.create_task(stream(client, proxy.url, "base", prompt(seed, 50), 900)) for seed in (1, 2)]

        if unload:
            assert (await asyncio.to_thread(proxy.unload, NAME)).status_code == 200
        if same_path:
            shutil.rmtree(path)
            shutil.copytree(adapters / "v2", path)
        else:
            path = adapters / "v2"
        assert (await asyncio.to_thread(proxy.load, NAME, path)).status_code == 200
        new = [await complete(client, proxy.url, NAME, PROMPT) for _ in range(4)]
        await asyncio.gather(*busy)

        with replicas[0].client() as admin:
            fresh = {"lora_name": "never-used", "lora_path": str(adapters / "v2")}
            admin.post("/v1/load_lora_adapter", json=fresh).raise_for_status()
        expected = await complete(direct, replicas[0].url, "never-used", PROMPT)
    assert {answer.replica for answer in new} == {"0", "1"}
    assert expected.tokens != old[0].tokens
    for answer in new:
        assert (answer.model, answer.tokens) == (NAME, expected.tokens)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert proxy.listed() == [NAME]

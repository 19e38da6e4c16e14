"""Behind one address are two engines, or two API servers: a load reaches one of them (aibrix #1675). Such a replica
does not serve, and the reason says how to start it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from proxy.simulator import SimFleet
from tests.faults.rig import CANARY, quick, rig  # noqa: F401


async def test_data_parallel_size_two_is_refused(tmp_path: Path) -> None:
    async with SimFleet(each=[{}, {"data_parallel_size": 2}], api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims, wait=False) as it:
            fleet = it.parts.fleet
            await it.until(lambda: len(fleet.ready()) == 1 and fleet.replicas[1].facts, "seen")
            for _ in range(3):
                await asyncio.sleep(0.1)
                assert [replica.index for replica in fleet.ready()] == [0]
            row = (await it.fleet())["replicas"][1]
            assert "data_parallel_size is 2" in row["last_error"]
            assert "--data-parallel-size 1" in row["last_error"]
            assert (await it.load("a", it.library.path(1))).ok
            assert sims.replicas[1].calls["load"] == 0
            assert (await it.complete("a")).headers["x-lorafleet-replica"] == "0"


async def test_two_servers_behind_one_address_never_answer_wrongly(tmp_path: Path) -> None:
    """Every other call reaches the other engine. Whatever becomes of the load: no answer comes from other weights, and
    a name that is listed is answered."""
    async with SimFleet(3, api_key=CANARY) as sims:
        doors = itertools.cycle([sims.replicas[1].http.app, sims.replicas[2].http.app])

        async def both(scope: Any, receive: Any, send: Any) -> None:
            await next(doors)(scope, receive, send)

        sims.replicas[1].http.app = both
        hidden = sims.replicas.pop()
        try:
            async with rig(2, tmp_path, sims=sims, wait=False) as it:
                await it.until(lambda: it.parts.fleet.ready(), "ready")
                from tests.faults.rig import assert_weights, weights_of

                path = it.library.path(1)
                answer = await it.load("a", path)
                for _ in range(40):
                    said = await it.complete("a", it.new_prompt())
                    if answer.ok:
                        assert said.ok, said.text
                        body = said.json()
                        prompt = body["choices"][0]["prompt_token_ids"]
                        assert_weights(said, "a", weights_of(path), prompt)
                    else:
                        assert said.status == 404
        finally:
            hidden.close()

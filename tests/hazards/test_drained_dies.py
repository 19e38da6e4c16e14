"""A replica that is being drained stops answering, with work in hand: what waits on it is told, as on any other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from proxy.replica_state import State
from tests.faults.rig import quick, rig  # noqa: F401


async def test_its_work_goes_elsewhere_and_it_can_be_removed(tmp_path: Path) -> None:
    async with rig(2, tmp_path, control={"health_timeout_secs": 0.2}) as it:
        it.replicas[1].faults.add("hang", "completion")
        asked = [asyncio.create_task(it.complete("base", it.new_prompt())) for _ in range(2)]
        await it.until(lambda: it.parts.fleet.replicas[1].in_flight, "under way")
        assert (await it.ask("POST", "/fleet/replicas/1/drain")).ok
        assert (await it.ask("DELETE", "/fleet/replicas/1")).status == 409
        it.replicas[1].faults.add("hang")
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*asked)
        assert [(answer.status, answer.headers["x-lorafleet-replica"]) for answer in answers] == [(200, "0")] * 2
        assert it.parts.fleet.replicas[1].state is State.DRAINING
        assert (await it.ask("DELETE", "/fleet/replicas/1")).ok
        it.replicas[1].faults.clear()
        it.sims.replicas = it.sims.replicas[:1]
        await it.check()

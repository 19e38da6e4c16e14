"""Replicas that were added, drained and removed while the proxy ran, after a restart of the proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.replica_state import State
from proxy.simulator import SimFleet
from tests.faults.rig import CANARY, Named, Rig, quick, rig, weights_of  # noqa: F401


def states(it: Rig) -> dict[int, str]:
    return {replica.index: replica.state.value for replica in it.parts.fleet.members()}


async def change(it: Rig, method: str, target: str, body: Any = None) -> None:
    answer = await it.ask(method, f"/fleet/replicas{target}", body)
    assert answer.status in (200, 201), answer.text


async def test_the_fleet_is_the_same_again(tmp_path: Path) -> None:
    async with SimFleet(4, api_key=CANARY, require_token_everywhere=True, max_loras=5) as sims:
        urls = list(sims.urls)
        first_three = Named(sims, urls[:3])
        async with rig(3, tmp_path, state=tmp_path / "state", sims=first_three) as it:
            await it.must_load("a", it.library.path(1))
            await change(it, "POST", "", {"url": urls[3]})
            await it.until(lambda: len(it.parts.fleet.ready()) == 4, "ready")
            await change(it, "POST", "/1/drain")
            await change(it, "DELETE", "/0")
            assert states(it) == {1: "draining", 2: "ready", 3: "ready"}
        async with rig(3, tmp_path, state=tmp_path / "state", sims=first_three, wait=False) as it:
            await it.until(lambda: states(it) == {1: "draining", 2: "ready", 3: "ready"}, "as before")
            assert (await it.ask("GET", "/health")).ok  # nobody waits for those that are out
            for _ in range(4):
                answer = await it.complete("a", it.new_prompt())
                assert answer.ok and answer.headers["x-lorafleet-replica"] in ("2", "3")
            await change(it, "POST", "/1/undrain")
            await change(it, "POST", "", {"url": urls[0]})
            await it.until(lambda: all(r.state is State.READY for r in it.parts.fleet.members()), "ready")
            it.names["a"] = weights_of(it.library.path(1))
            await it.check()
            assert sims.replicas[0].weights("a") == it.names["a"]


async def test_a_journal_that_cannot_be_written(tmp_path: Path) -> None:
    async with SimFleet(2, api_key=CANARY, require_token_everywhere=True) as sims:
        async with rig(1, tmp_path, state=tmp_path / "state", sims=Named(sims, sims.urls[:1])) as it:

            def full(line: object, desired: object) -> None:
                raise OSError(28, "No space left on device")

            it.parts.plane.journal.append = full  # type: ignore[method-assign]
            answer = await it.ask("POST", "/fleet/replicas", {"url": sims.urls[1]})
            assert answer.status == 507
            assert states(it) == {0: "ready"}

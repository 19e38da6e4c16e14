from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.control.answers import Answer, Outcome
from proxy.control.desired import Adapter, Desired, Pause
from proxy.control.facts import Facts
from proxy.control.journal import Line, Recovered
from proxy.control.plane import Plane
from proxy.control.settings import ControlSettings
from proxy.fleet import Fleet
from proxy.routing.router import Router
from proxy.upstream.transport import Endpoint

FACTS = Facts(("base",), None, 4096, max_loras=3)


class Calls:
    """Answers probes, and remembers them."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self.probed: list[str] = []
        self._answer = answer

    async def probe(self, endpoint: Endpoint, model: str, timeout_secs: float) -> Any:
        self.probed.append(model)
        return await self._answer()


async def _fine() -> tuple[float, ...]:
    return (-1.0,)


class MemoryJournal:
    """A journal that forgets."""

    def open(self) -> Recovered:
        return Recovered(Desired())

    def append(self, line: Line, desired: Desired) -> None:
        pass

    def close(self) -> None:
        pass


def plane(calls: Any) -> Plane:
    """One replica with two listed versions and a ghost that was used last."""
    fleet = Fleet([Endpoint("http://r")], Router())
    replica = fleet.replicas[0]
    replica.recent = {}
    fleet.learn(0, FACTS)
    desired = Desired()
    for name in ("v2", "v3"):
        fleet.held(0, name, f"/{name}")
        desired = desired.bind(Adapter(name, f"/{name}", None, name))
    replica.touch("v1")
    fleet.commit(desired)
    return Plane(fleet, calls, MemoryJournal(), ControlSettings())


async def test_listed_versions_are_used_once() -> None:
    calls = Calls(_fine)
    it = plane(calls)
    await it.freshening.freshen(it.fleet.replicas)
    assert calls.probed == ["v2", "v3"]
    assert list(it.fleet.replicas[0].recent or ()) == ["v1", "v2", "v3"]
    await it.freshening.freshen(it.fleet.replicas, loading="v4")
    assert calls.probed == ["v2", "v3"]


async def test_what_is_replaced_may_go() -> None:
    calls = Calls(_fine)
    it = plane(calls)
    await it.freshening.freshen(it.fleet.replicas, loading="v2@1", instead_of="v2")
    assert calls.probed == []


async def test_nothing_is_used_while_the_fleet_is_paused() -> None:
    calls = Calls(_fine)
    it = plane(calls)
    it.fleet.commit(it.fleet.desired.with_pause(Pause("mode=keep", 0.0)))
    await it.freshening.freshen(it.fleet.replicas)
    assert calls.probed == []


async def test_an_answer_that_did_not_come_is_no_use() -> None:
    async def broken() -> Answer:
        return Answer(Outcome.NO_ANSWER, None, "reset")

    it = plane(Calls(broken))
    await it.freshening.freshen(it.fleet.replicas)
    assert list(it.fleet.replicas[0].recent or ()) == ["v2", "v3", "v1"]


async def test_a_pause_waits_for_it() -> None:
    go = asyncio.Event()

    async def slowly() -> tuple[float, ...]:
        await go.wait()
        return (-1.0,)

    calls = Calls(slowly)
    it = plane(calls)
    await it.freshening.settled()
    it.freshening.soon(it.fleet.replicas)
    waiting = asyncio.create_task(it.freshening.settled())
    while not calls.probed:
        await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    await waiting
    assert calls.probed == ["v2", "v3"]

from __future__ import annotations

import asyncio

import pytest

from proxy.control.desired import Pause
from proxy.errors import Unavailable
from proxy.fleet import Fleet
from proxy.replica_state import Event
from proxy.routing.router import Router
from proxy.upstream.transport import Endpoint
from proxy.web.gate import Gate
from tests.web.front import FACTS, commit

PAUSE = Pause("mode=keep", 0.0)


class Waiters:
    """Tasks at a gate, and the order in which they got through."""

    def __init__(self, limit: int = 10) -> None:
        self.fleet = Fleet([Endpoint("http://a")], Router())
        self.fleet.learn(0, FACTS)
        self.gauge: list[int] = []
        self.gate = Gate(self.fleet, limit, self.gauge.append)
        self.through: list[int] = []

    async def come(self, number: int, secs: float | None = None) -> asyncio.Task[None]:
        async def wait() -> None:
            await self.gate.wait(secs)
            self.through.append(number)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    def ready(self) -> None:
        self.fleet.apply(0, Event.CAUGHT_UP)


async def test_they_go_through_in_order_when_somebody_can_serve() -> None:
    waiters = Waiters()
    tasks = [await waiters.come(number) for number in range(5)]
    assert waiters.gauge == [1, 2, 3, 4, 5]
    waiters.ready()
    await asyncio.gather(*tasks)
    assert waiters.through == [0, 1, 2, 3, 4]
    assert (len(waiters.gate), waiters.gauge[-1]) == (0, 0)


async def test_a_change_that_helps_nobody_wakes_nobody() -> None:
    waiters = Waiters()
    task = await waiters.come(0)
    commit(waiters.fleet, waiters.fleet.desired.with_pause(PAUSE))
    waiters.ready()
    await asyncio.sleep(0)
    assert not task.done()
    commit(waiters.fleet, waiters.fleet.desired.with_pause(None))
    await task


async def test_time_runs_out() -> None:
    waiters = Waiters()
    await (await waiters.come(0, secs=0.001))
    assert len(waiters.gate) == 0


async def test_who_leaves_leaves_nothing_behind() -> None:
    waiters = Waiters()
    first, second = await waiters.come(1, secs=100), await waiters.come(2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(waiters.gate) == 1
    waiters.ready()
    await second
    assert waiters.through == [2]
    assert waiters.gauge[-1] == 0


async def test_who_leaves_as_the_gate_opens() -> None:
    waiters = Waiters()
    task = await waiters.come(1)
    waiters.ready()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (waiters.through, len(waiters.gate)) == ([], 0)


async def test_a_full_queue_refuses_newcomers_only() -> None:
    waiters = Waiters(limit=1)
    task = await waiters.come(0)
    with pytest.raises(Unavailable) as refused:
        await waiters.gate.wait(None)
    assert refused.value.retry_after_secs == 5
    again = asyncio.create_task(waiters.gate.wait(None, waited=True))
    await asyncio.sleep(0)
    assert len(waiters.gate) == 2
    waiters.ready()
    await asyncio.gather(task, again)

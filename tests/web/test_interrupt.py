from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from proxy.web.interrupt import Interrupt


async def _caught(act: Callable[[Interrupt, asyncio.Task[bool]], None]) -> bool:
    """Whether an interrupted task says that the interruption was ours; it goes on either way."""
    made: asyncio.Future[Interrupt] = asyncio.get_running_loop().create_future()

    async def work() -> bool:
        interrupt = Interrupt()
        made.set_result(interrupt)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return interrupt.caught()
        raise AssertionError

    task = asyncio.create_task(work())
    act(await made, task)
    return await task


def both(interrupt: Interrupt, task: asyncio.Task[bool]) -> None:
    interrupt.fire()
    task.cancel()


def twice(interrupt: Interrupt, task: asyncio.Task[bool]) -> None:
    interrupt.fire()
    interrupt.fire()


@pytest.mark.parametrize(
    ("act", "ours"),
    [(lambda it, task: it.fire(), True), (twice, True), (lambda it, task: task.cancel(), False), (both, False)],
)
async def test_whose_it_was(act: Callable[[Interrupt, asyncio.Task[bool]], None], ours: bool) -> None:
    assert await _caught(act) is ours


async def test_the_task_goes_on_as_if_nothing_had_happened() -> None:
    interrupt = Interrupt()
    asyncio.get_running_loop().call_soon(interrupt.fire)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    assert interrupt.caught()
    with pytest.raises(TimeoutError):  # a timeout counts cancellations, so none may be left over
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()

from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.control.threads import Threads


async def test_results_and_errors() -> None:
    threads = Threads(2, "test")
    assert await threads(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        await threads(lambda: 1 / 0)
    assert await asyncio.gather(*(threads(lambda n=n: n) for n in range(50))) == list(range(50))


async def test_a_call_that_hangs_holds_up_neither_others_nor_the_end_of_the_process() -> None:
    threads, gone = Threads(2, "test hangs"), threading.Event()
    began: list[int] = []

    def hang(number: int) -> None:
        began.append(number)
        gone.wait()

    hanging = asyncio.create_task(threads(hang, 1))
    assert await threads(lambda: "answered") == "answered"
    also = asyncio.create_task(threads(hang, 2))
    while len(began) < 2:
        await asyncio.sleep(0.001)
    nobody_left = asyncio.create_task(threads(hang, 3))
    await asyncio.sleep(0)
    for task in (hanging, also, nobody_left):
        task.cancel()
    await asyncio.gather(hanging, also, nobody_left, return_exceptions=True)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("test hangs"))
    gone.set()
    assert await threads(lambda: "free again") == "free again"
    assert began == [1, 2]  # what nobody waited for was not begun


async def test_not_more_threads_than_needed() -> None:
    threads = Threads(8, "test few")
    for number in range(20):
        assert await threads(abs, number) == number
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("test few")]) == 1


def test_a_loop_that_ended_meanwhile() -> None:
    go, done = threading.Event(), threading.Event()
    threads = Threads(1, "test late")

    def late() -> None:
        go.wait()
        done.set()

    async def leave() -> None:
        task = asyncio.create_task(threads(late))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    go.set()
    if not done.wait(5):  # cancelled before it was begun
        assert not done.is_set()
    assert asyncio.run(threads(abs, -1)) == 1

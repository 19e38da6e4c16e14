from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.control.queue import Queue, Stopwatch, Turn, TurnLock
from proxy.control.records import TransactionRecord
from proxy.errors import NotFound, TransactionFailed
from tests.control.virtual_time import run


class Stage:
    """A queue in virtual time, changes with events to wait for, and what happened in order."""

    def __init__(self) -> None:
        self.finished: list[TransactionRecord] = []
        loop = asyncio.get_running_loop()
        self.queue = Queue(loop.time, loop.time, self.finished.append)
        self.events: list[str] = []
        self.files = asyncio.Event()

    def brief(self, name: str, secs: float = 1.0) -> Callable[[Stopwatch], Awaitable[str]]:
        async def change(watch: Stopwatch) -> str:
            self.events.append(f"{name} begins")
            await asyncio.sleep(secs)
            self.events.append(f"{name} ends")
            return name

        return change

    def patient(self, name: str) -> Callable[[Turn, Stopwatch], Awaitable[str]]:
        """Has its turn before and after it waits for `files`."""

        async def change(turn: Turn, watch: Stopwatch) -> str:
            async with turn:
                self.events.append(f"{name} asks")
            await self.files.wait()
            async with turn:
                self.events.append(f"{name} goes on")
            return name

        return change

    def start(self, call: Awaitable[Any]) -> asyncio.Task[Any]:
        return asyncio.ensure_future(call)


def staged(scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene(Stage())

    run(main())


def test_one_at_a_time_in_order() -> None:
    async def scene(stage: Stage) -> None:
        one = stage.start(stage.queue.one_at_a_time("pause", None, "p", stage.brief("pause")))
        two = stage.start(stage.queue.one_at_a_time("load", "a", "a", stage.brief("a")))
        three = stage.start(stage.queue.one_at_a_time("resume", None, "r", stage.brief("resume")))
        await asyncio.sleep(0.5)
        assert stage.queue.busy
        assert [record.kind for record in stage.queue.records] == ["pause"]
        assert await asyncio.gather(one, two, three) == ["pause", "a", "resume"]
        assert stage.events == [f"{name} {when}" for name in ("pause", "a", "resume") for when in ("begins", "ends")]
        assert not stage.queue.busy
        assert [(r.kind, r.outcome) for r in stage.finished] == [(k, "committed") for k in ("pause", "load", "resume")]
        assert dict(stage.finished[2].phases)["queue"] == pytest.approx(2.0)

    staged(scene)


def test_who_waits_for_files_holds_nobody_up() -> None:
    async def scene(stage: Stage) -> None:
        load = stage.start(stage.queue.by_turns("load", "a", "a", stage.patient("a")))
        await asyncio.sleep(0.1)
        assert not stage.queue.busy
        assert [(record.kind, record.outcome) for record in stage.queue.records] == [("load", "running")]
        assert await stage.queue.one_at_a_time("pause", None, "p", stage.brief("pause")) == "pause"
        assert await stage.queue.one_at_a_time("load", "b", "b", stage.brief("b")) == "b"
        stage.files.set()
        assert await load == "a"
        assert stage.events == ["a asks", "pause begins", "pause ends", "b begins", "b ends", "a goes on"]
        assert sorted(record.outcome for record in stage.queue.records) == ["committed"] * 3

    staged(scene)


def test_but_the_same_name_waits_for_it() -> None:
    async def scene(stage: Stage) -> None:
        load = stage.start(stage.queue.by_turns("load", "a", "a", stage.patient("a")))
        await asyncio.sleep(0)
        unload = stage.start(stage.queue.one_at_a_time("unload", "a", "u", stage.brief("unload")))
        again = stage.start(stage.queue.by_turns("load", "a", "a2", stage.patient("a again")))
        await asyncio.sleep(60)
        assert stage.events == ["a asks"]
        stage.files.set()
        await asyncio.gather(load, unload, again)
        assert stage.events == [
            "a asks",
            "a goes on",
            "unload begins",
            "unload ends",
            "a again asks",
            "a again goes on",
        ]

    staged(scene)


def test_an_equal_request_attaches_also_while_it_waits() -> None:
    async def scene(stage: Stage) -> None:
        loads = [stage.start(stage.queue.by_turns("load", "a", "same", stage.patient("a"))) for _ in range(5)]
        await asyncio.sleep(1)
        stage.files.set()
        assert await asyncio.gather(*loads) == ["a"] * 5
        assert stage.events == ["a asks", "a goes on"]
        assert len(stage.finished) == 1

    staged(scene)


def test_a_client_that_leaves_changes_nothing() -> None:
    async def scene(stage: Stage) -> None:
        load = stage.start(stage.queue.by_turns("load", "a", "same", stage.patient("a")))
        await asyncio.sleep(1)
        load.cancel()
        stage.files.set()
        await asyncio.sleep(1)
        assert stage.events == ["a asks", "a goes on"]
        assert [record.outcome for record in stage.finished] == ["committed"]

    staged(scene)


def test_a_failure_lets_the_next_one_go() -> None:
    async def scene(stage: Stage) -> None:
        async def fails(watch: Stopwatch) -> None:
            raise TransactionFailed("no", undone=True)

        async def absent(watch: Stopwatch) -> None:
            raise NotFound("what?")

        async def breaks(watch: Stopwatch) -> None:
            raise RuntimeError("a bug")

        calls = [stage.queue.one_at_a_time("load", "a", object(), it) for it in (fails, absent, breaks)]
        results = await asyncio.gather(
            *calls, stage.queue.one_at_a_time("load", "a", "b", stage.brief("b")), return_exceptions=True
        )
        assert [type(result) for result in results] == [TransactionFailed, NotFound, RuntimeError, str]
        assert [record.outcome for record in stage.finished] == ["undone", "failed", "failed", "committed"]

    staged(scene)


def test_cancelled_wherever_it_is() -> None:
    async def scene(stage: Stage) -> None:
        calls = [
            stage.start(stage.queue.one_at_a_time("pause", None, "p", stage.brief("pause", 100))),
            stage.start(stage.queue.by_turns("load", "a", "a", stage.patient("a"))),
            stage.start(stage.queue.one_at_a_time("unload", "a", "u", stage.brief("unload"))),
        ]
        await asyncio.sleep(1)
        await stage.queue.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*calls, return_exceptions=True))
        assert not stage.queue.busy
        assert await stage.queue.one_at_a_time("load", "a", "b", stage.brief("b")) == "b"

    staged(scene)


def test_parts_of_one_change_share_its_turn() -> None:
    async def scene(stage: Stage) -> None:
        lock, taken = TurnLock(), []
        turn = Turn(lock, lambda: taken.append(1))

        async def part(secs: float) -> None:
            async with turn:
                await asyncio.sleep(secs)

        await lock.acquire()
        parts = [stage.start(part(secs)) for secs in (1.0, 3.0, 2.0)]
        await asyncio.sleep(5)
        parts[0].cancel()  # while it waits for the turn: the next part takes over
        await asyncio.sleep(0)
        lock.release()
        await asyncio.sleep(2.5)
        assert lock.locked() and len(taken) == 1
        await asyncio.sleep(1)
        assert not lock.locked()
        await part(1.0)
        assert len(taken) == 2

    staged(scene)


def test_a_phase_that_comes_again_adds_up() -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])
    watch = Stopwatch(lambda: next(now))
    for phase in ("queue", "load", "queue"):
        watch.lap(phase)
    assert watch.phases == (("queue", 5.0), ("load", 2.0))


def test_parts_that_overlap_without_end_do_not_keep_others_out() -> None:
    async def scene(stage: Any) -> None:
        lock, order = TurnLock(), []
        turn = Turn(lock, lambda: None)

        async def part(number: int) -> None:
            await asyncio.sleep(number * 1.0)
            async with turn:
                order.append(f"part {number}")
                await asyncio.sleep(1.5)

        async def other() -> None:
            await asyncio.sleep(1.2)
            async with Turn(lock, lambda: None):
                order.append("other")

        await asyncio.gather(*(part(number) for number in range(4)), other())
        assert order == ["part 0", "part 1", "other", "part 2", "part 3"]
        assert not lock.locked() and not lock.waiting

    staged(scene)

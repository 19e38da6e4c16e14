"""The virtual loop: hours in no time, and an error instead of a hang."""

import asyncio
import time

import pytest

from tests.control.virtual_time import Stuck, run, virtual_loop


def test_hours_pass_at_once_and_in_order():
    seen = []

    async def main():
        async def note(secs):
            await asyncio.sleep(secs)
            seen.append((secs, asyncio.get_running_loop().time()))

        await asyncio.gather(note(7200), note(0.5), note(60))

    before = time.monotonic()
    run(main())
    assert [secs for secs, _ in seen] == [0.5, 60, 7200]
    assert [round(at, 3) for _, at in seen] == [1000.5, 1060, 8200]
    assert time.monotonic() - before < 5


def test_timeouts_work():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().create_future()

    run(main())


def test_waiting_for_nothing_is_an_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck):
        run(main())


def test_step_runs_what_is_ready_and_no_more():
    with virtual_loop() as loop:
        seen = []
        loop.call_soon(lambda: (seen.append(1), loop.call_soon(seen.append, 2)))
        loop.step()
        assert seen == [1]
        assert not loop.idle()
        loop.step()
        assert seen == [1, 2]
        assert loop.time() == 1000.0

"""The engine in real time: its virtual clock is the event loop's, and whoever waits for tokens is woken."""

import asyncio
from collections.abc import Callable

from proxy.simulator.engine import Engine, EngineDead
from proxy.simulator.sequence import EngineRequest, Sequence


class LiveEngine:
    """Turns an ``Engine`` with the running loop; use from that loop only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.death: EngineDead | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[Sequence, asyncio.Future[None]] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._timer: asyncio.Handle | None = None
        self._moment: float | None = None
        """The time of a turn that is about to come: calls before it are made at the same moment, and share a step."""

    def now(self) -> float:
        return self._loop.time() if self._moment is None else self._moment

    def submit(self, request: EngineRequest) -> Sequence:
        """Raises EngineDead after a death, ValueError for what can never fit."""
        if self.death:
            raise self.death
        now = self.now()
        sequence = self.engine.submit(request, now)
        self._waiters[sequence] = self._loop.create_future()
        self.poke(now)
        return sequence

    async def progress(self, sequence: Sequence) -> None:
        """Wait until a watched sequence has new tokens, or any sequence is finished; EngineDead when it never will."""
        waiter = self._waiters.get(sequence)
        if waiter is None:
            return
        await waiter
        if sequence.finish_reason is None:
            self._waiters[sequence] = self._loop.create_future()
        else:
            self._waiters.pop(sequence, None)

    def leave(self, sequence: Sequence) -> None:
        """The client went away: abort if it is not finished."""
        self._waiters.pop(sequence, None)
        if sequence.finish_reason is None and not self.death:
            self.engine.abort([sequence.request.id], self.now())
            self.poke()

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Returns when the pause is complete."""
        complete = self.engine.pause(mode, clear_cache, self.now())
        self.poke()
        if not complete:
            waiter = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    def poke(self, now: float | None = None) -> None:
        """Plan the next turn; call after anything that changed the engine (at ``now``)."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self.now() if now is None else now
        self._moment = None
        when = None if self.death else self.engine.next_event_time()
        if when is None:
            return
        if when <= now:
            self._moment = now
            self._timer = self._loop.call_soon(self._turn)
        else:
            self._timer = self._loop.call_at(when, self._turn)

    def die(self, death: EngineDead) -> None:
        """The engine core is gone, the server not yet: whoever waits gets the exception, and ``on_death`` is called."""
        self.death = death
        for waiter in (*self._waiters.values(), *self._drained):
            if not waiter.done():
                waiter.set_exception(death)
        self.poke()
        self.on_death()

    def stop(self) -> None:
        """The process is gone: nobody is woken any more."""
        self.death = self.death or EngineDead("stopped")
        self.poke()
        for waiter in (*self._waiters.values(), *self._drained):
            waiter.cancel()
        self._waiters.clear()
        self._drained.clear()

    def _turn(self) -> None:
        self._timer = self._moment = None
        try:
            news = self.engine.advance(self.now())
        except EngineDead as death:
            self.die(death)
            return
        for sequence in news:
            waiting = self._waiters.get(sequence)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if self._drained and self.engine.drained:
            for drained in self._drained:
                if not drained.done():
                    drained.set_result(None)
            self._drained.clear()
        self.poke()

"""One vLLM process as far as the control plane can see it: listed names, engine slots, prefix cache, pause, sleep.

Follows vLLM 0.27.1 (see the contract): a name is listed with the path it was loaded from; the engine holds `max_loras`
sets of weights by LRU, an unload forgets the name and not the slot, a name whose slot was taken is read from its path
again when it is used; the prefix cache is keyed by name and prompt and knows nothing of weights; a keep-pause freezes
what runs and empties the cache; a paused engine counts as sleeping.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

BASE = "base-model"
"""Name of the base model, and of its weights."""


class Unknown(Exception):
    """A completion names a model that is not listed."""


class Unreadable(Exception):
    """The slot is gone and the files as well: the engine answers 500."""


@dataclass(frozen=True, slots=True)
class Listed:
    load: int
    path: str


@dataclass(slots=True, eq=False)
class Run:
    """A completion in the engine. `used`: all weights that had a part in it, `stale`: whether blocks of others had."""

    name: str
    prompt: str
    ref: Listed | None
    secs: float
    used: set[str] = field(default_factory=set)
    stale: bool = False
    aborted: bool = False


class Process:
    """`read` opens a path: the weights there, or None."""

    def __init__(self, read: Callable[[str], str | None], max_loras: int) -> None:
        self.read = read
        self.max_loras = max_loras
        self.listed: dict[str, Listed] = {}
        self.slots: OrderedDict[int, str] = OrderedDict()
        self.cache: dict[tuple[str, str], str] = {}
        self.paused: str | None = None
        self.asleep = False
        self.runs: dict[Run, None] = {}
        self.lost_slots: list[str] = []
        self.connections: dict[asyncio.Future[None], None] = {}
        self._loads = 0
        self._waiters: dict[asyncio.Future[None], None] = {}

    # -- adapters ------------------------------------------------------------------------------------------------------

    def load(self, name: str, path: str, *early: str | None) -> None:
        """Raises KeyError when the name is listed, FileNotFoundError and ValueError as the files are.

        `early` are the weights as they were read before, instead of now.
        """
        if name in self.listed:
            raise KeyError(name)
        self._loads += 1
        ref = Listed(self._loads, path)
        self._fill(ref, *early)
        self.listed[name] = ref

    def unload(self, name: str) -> None:
        del self.listed[name]

    def weights_of(self, ref: Listed) -> str:
        """Use a slot, after reading the path again when it was taken."""
        if ref.load not in self.slots:
            self._fill(ref)
        self.slots.move_to_end(ref.load)
        return self.slots[ref.load]

    def _fill(self, ref: Listed, *early: str | None) -> None:
        weights = early[0] if early else self.read(ref.path)
        if weights is None or weights.startswith("partial"):
            raise FileNotFoundError(ref.path)
        if weights == "broken":
            raise ValueError("size mismatch")
        for run in self.runs:
            if run.ref is not None and run.ref.load in self.slots and not self.frozen:
                self.slots.move_to_end(run.ref.load)
        while len(self.slots) >= self.max_loras:
            gone, _ = self.slots.popitem(last=False)
            self.lost_slots += [name for name, listed in self.listed.items() if listed.load == gone]
        self.slots[ref.load] = weights

    # -- switches ------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """What runs stands still."""
        return self.asleep or self.paused == "keep"

    def pause(self, mode: str, clear: bool) -> None:
        self.paused = mode
        if mode == "abort":
            for run in self.runs:
                run.aborted = True
        if clear:
            self.cache.clear()
        self.moved()

    def resume(self) -> None:
        self.paused = None
        self.moved()

    def sleep(self) -> None:
        self.pause("abort", clear=True)
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False
        self.resume()

    def reset(self, force: bool) -> bool:
        if self.runs and not force:
            return False
        self.cache.clear()
        return True

    def moved(self) -> None:
        """Wake whoever waits for a change."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self, secs: float | None = None) -> None:
        """Wait for the next change, or for so long."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(secs):
                await waiter
        except TimeoutError:
            self._waiters.pop(waiter, None)

    # -- completions ---------------------------------------------------------------------------------------------------

    async def generate(self, name: str, prompt: str, secs: float) -> Run:
        """Raises Unknown, Unreadable. Cancelling it aborts the request, as a closed connection does."""
        if name != BASE and name not in self.listed:
            raise Unknown(name)
        run = Run(name, prompt, self.listed.get(name), secs)
        while self.paused is not None or self.asleep:
            await self.change()
        self.runs[run] = None
        try:
            self._prefill(run)
            clock = asyncio.get_running_loop().time
            while run.secs > 1e-9 and not run.aborted:
                if self.frozen:
                    await self.change()
                    if not self.frozen:
                        self._prefill(run)
                else:
                    began = clock()
                    await self.change(run.secs)
                    run.secs -= clock() - began
            self._prefill(run)
        finally:
            self.runs.pop(run, None)
            self.moved()
        return run

    def _prefill(self, run: Run) -> None:
        try:
            weights = self.weights_of(run.ref) if run.ref is not None else BASE
        except (FileNotFoundError, ValueError) as error:
            raise Unreadable(run.name) from error
        run.used.add(weights)
        cached = self.cache.setdefault((run.name, run.prompt), weights)
        run.stale = run.stale or cached != weights

"""`ReplicaCalls` in memory: replicas with a process each, and what can go wrong between them and the proxy."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from proxy.control.answers import Answer, Observed, Outcome
from proxy.control.facts import Facts
from proxy.upstream.transport import Endpoint
from tests.control.files import FakeFiles
from tests.control.process import BASE, Process, Run, Unknown, Unreadable

CALLS = ("load", "unload", "pause", "resume", "reset", "sleep", "wake_up", "health", "models", "facts", "completion")
KINDS = (
    "refused",  # no byte left
    "reset",  # the connection broke, nothing happened
    "lost",  # it happened, the answer did not come back
    "hang",  # nothing happened and nothing came back
    "late",  # it happens, after the caller has given up
    "slow",  # it happens after a while
    "500",
    "503",
    "not visible",
    "exists",  # "already loaded", which is not true
    "garbage",  # 200 with something else in it; it did happen
    "no effect",  # 200, and it did not happen
    "crash",  # the process dies of it
)


HANG_SECS = 45.0
"""After which even a connection that hangs breaks."""


@dataclass(slots=True)
class Fault:
    """What goes wrong at the next `times` calls. `secs`: how slow, how late, or how long the process is away."""

    kind: str
    times: int = 1
    secs: float = 1.0


@dataclass(frozen=True, slots=True)
class Broken(Exception):
    """A completion that got no whole answer. `sent`: the replica may have seen it."""

    sent: bool


@dataclass(eq=False)
class FakeReplica:
    """A machine: its view of the files, its faults, and the process that runs there, if any.

    `cut` breaks the network while the process lives on: "refuse" or "hang". `blind`: its mount of the files is gone.
    """

    base: str
    files: FakeFiles
    loop: asyncio.AbstractEventLoop
    lag: float = 0.0
    max_loras: int = 8
    version: str | None = "0.27.1"
    models: tuple[str, ...] = (BASE,)
    data_parallel_size: int = 1
    process: Process | None = None
    cut: str | None = None
    blind: bool = False
    boots: int = 0
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boot()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.base)

    @property
    def alive(self) -> Process:
        assert self.process is not None, f"{self.base} is down"
        return self.process

    def boot(self) -> None:
        """A fresh process: nothing loaded, nothing cached, not paused."""
        self.kill()
        self.boots += 1
        self.process = Process(self.read, self.max_loras)

    def read(self, path: str) -> str | None:
        return None if self.blind else self.files.read(path, self.lag)

    def kill(self) -> None:
        """The process is gone, and every connection to it with it."""
        process, self.process = self.process, None
        if process is not None:
            for connection in list(process.connections):
                if not connection.done():
                    connection.set_result(None)

    def crash(self, secs: float) -> None:
        """It dies and is back, empty, after `secs`."""
        self.kill()
        self.loop.call_later(secs, lambda: self.boot() if self.process is None else None)

    def fail(self, call: str, kind: str, *, times: int = 1, secs: float = 1.0) -> None:
        self.faults.setdefault(call, []).append(Fault(kind, times, secs))

    def take(self, call: str) -> Fault | None:
        """The fault of this call, if any."""
        waiting = self.faults.get(call)
        if not waiting:
            return None
        fault = waiting[0]
        fault.times -= 1
        if fault.times <= 0:
            waiting.pop(0)
        return fault

    def names(self) -> dict[str, str]:
        """Upstream names as listed, with the weights that a use of each would run on now (its slot is not touched)."""
        process = self.alive
        return {
            name: process.slots.get(ref.load) or self.read(ref.path) or "nothing"
            for name, ref in process.listed.items()
        }


Handler = Callable[[Process], Awaitable[Any]]


class MemoryCalls:
    """`ReplicaCalls` to replicas in memory. `latency` is asked for the seconds of each way.

    What a replica does goes on when the caller stops waiting, as a server does with a request that it has read; only a
    completion ends with its caller.
    """

    def __init__(self, replicas: list[FakeReplica], latency: Callable[[], float] = lambda: 0.0) -> None:
        self._by_base = {replica.base: replica for replica in replicas}
        self._latency = latency
        self._server_side = contextvars.Context()
        self.dead = False

    def add(self, replica: FakeReplica) -> None:
        self._by_base[replica.base] = replica

    # -- ReplicaCalls --------------------------------------------------------------------------------------------------

    async def load(self, endpoint: Endpoint, upstream: str, path: str, timeout_secs: float) -> Answer:
        early: list[str | None] = []

        async def handle(process: Process) -> Answer:
            try:
                process.load(upstream, path, *early)
            except KeyError:
                return Answer(Outcome.EXISTS, 400, f"The lora adapter '{upstream}' has already been loaded.")
            except FileNotFoundError:
                return Answer(Outcome.NOT_VISIBLE, 404, f"No adapter found for {path}")
            except ValueError as error:
                return Answer(Outcome.REFUSED, 500, str(error))
            return Answer(Outcome.OK, 200, f"Success: LoRA adapter '{upstream}' added successfully.")

        def arrived(process: Process) -> None:
            early.append(process.read(path))  # a late load read the files when it came, and lists the name later

        return await self._ask(endpoint, "load", timeout_secs, handle, arrived=arrived)

    async def unload(self, endpoint: Endpoint, upstream: str, timeout_secs: float) -> Answer:
        async def handle(process: Process) -> Answer:
            try:
                process.unload(upstream)
            except KeyError:
                return Answer(Outcome.UNKNOWN_NAME, 404, f"The lora adapter '{upstream}' cannot be found.")
            return Answer(Outcome.OK, 200, f"Success: LoRA adapter '{upstream}' removed successfully.")

        return await self._ask(endpoint, "unload", timeout_secs, handle)

    async def post(self, endpoint: Endpoint, target: str, timeout_secs: float | None, body: bytes = b"") -> Answer:
        path, _, query = target.partition("?")
        said = {key: values[-1] for key, values in parse_qs(query).items()}

        async def handle(process: Process) -> Answer:
            answer: dict[str, Any] = {}
            match path:
                case "/pause":
                    process.pause(said.get("mode", "abort"), said.get("clear_cache", "true") != "false")
                    while said.get("mode") == "wait" and process.runs and process.paused == "wait":
                        await process.change()
                    answer = {"status": "paused"}
                case "/resume":
                    process.resume()
                    answer = {"status": "resumed"}
                case "/sleep":
                    process.sleep()
                case "/wake_up":
                    process.wake()
                case "/reset_prefix_cache":
                    answer = {"success": process.reset("reset_running_requests" in said)}
                case "/abort_requests":
                    answer = {"aborted": len(process.runs)}
                    for run in process.runs:
                        run.aborted = True
                    process.moved()
                case _:
                    return Answer(Outcome.REFUSED, 404, "Not Found")
            return Answer(Outcome.OK, 200, "", json.dumps(answer).encode())

        call = {"/reset_prefix_cache": "reset", "/abort_requests": "abort"}.get(path, path.strip("/"))
        return await self._ask(endpoint, call, timeout_secs if timeout_secs is not None else 1e6, handle)

    async def health(self, endpoint: Endpoint, timeout_secs: float) -> Answer:
        async def handle(process: Process) -> Answer:
            return Answer(Outcome.OK, 200, "")

        return await self._ask(endpoint, "health", timeout_secs, handle)

    async def observe(self, endpoint: Endpoint, timeout_secs: float, *, sleep: bool = False) -> Observed | Answer:
        replica = self._by_base[endpoint.base]

        async def handle(process: Process) -> Observed:
            return Observed(
                adapters={name: ref.path for name, ref in process.listed.items()},
                base_models=replica.models,
                base_root="/models/base",
                max_model_len=4096,
                paused=process.paused is not None,
                asleep=(process.asleep or process.paused is not None) if sleep else None,
            )

        seen = await self._ask(endpoint, "models", timeout_secs, handle)
        if isinstance(seen, Answer) and seen.ok:
            return Answer(Outcome.REFUSED, 200, "/v1/models did not answer with a model list")
        return seen

    async def facts(self, endpoint: Endpoint, observed: Observed, timeout_secs: float) -> Facts:
        replica = self._by_base[endpoint.base]

        async def handle(process: Process) -> Facts:
            return Facts(
                base_models=observed.base_models,
                base_root=observed.base_root,
                max_model_len=observed.max_model_len,
                version=replica.version,
                block_size=16,
                kv_capacity_tokens=4096,
                max_loras=process.max_loras,
                max_lora_rank=16,
                data_parallel_size=replica.data_parallel_size,
                dtype="bfloat16",
            )

        said = await self._ask(endpoint, "facts", timeout_secs, handle)
        if isinstance(said, Facts):
            return said
        return Facts(observed.base_models, observed.base_root, observed.max_model_len)

    async def probe(self, endpoint: Endpoint, model: str, timeout_secs: float) -> tuple[float, ...] | Answer:
        async def handle(process: Process) -> tuple[float, ...] | Answer:
            try:
                run = await process.generate(model, "probe of eight tokens", 0.01)
            except Unknown:
                return Answer(Outcome.REFUSED, 404, f"The model `{model}` does not exist.")
            except Unreadable:
                return Answer(Outcome.REFUSED, 500, "Internal Server Error")
            process.cache.pop((model, run.prompt), None)  # shorter than a block
            return tuple(random.Random(min(run.used)).random() for _ in range(4))

        return await self._ask(endpoint, "probe", timeout_secs, handle)

    # -- the data path -------------------------------------------------------------------------------------------------

    async def complete(self, endpoint: Endpoint, upstream: str, prompt: str, secs: float) -> Run:
        """Raises Broken, Unknown, Unreadable."""

        async def handle(process: Process) -> Run:
            return await process.generate(upstream, prompt, secs)

        answer = await self._ask(endpoint, "completion", 1e6, handle, tied=True)
        if isinstance(answer, Answer):
            raise Broken(sent=answer.outcome is not Outcome.UNREACHABLE)
        assert isinstance(answer, Run)
        return answer

    # -- one call ------------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        endpoint: Endpoint,
        call: str,
        timeout: float,
        handle: Handler,
        *,
        tied: bool = False,
        arrived: Callable[[Process], None] | None = None,
    ) -> Any:
        if self.dead:
            await asyncio.get_running_loop().create_future()
        replica = self._by_base[endpoint.base]
        replica.calls[call] += 1
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(self._latency())
                answer = await self._served(replica, call, timeout, handle, tied, arrived)
                await asyncio.sleep(self._latency())
                return answer
        except TimeoutError:
            return Answer(Outcome.NO_ANSWER, None, f"no whole answer within {timeout:g} s")

    async def _served(
        self,
        replica: FakeReplica,
        call: str,
        timeout: float,
        handle: Handler,
        tied: bool,
        arrived: Callable[[Process], None] | None,
    ) -> Any:
        process = replica.process
        if replica.cut == "hang":
            await asyncio.sleep(HANG_SECS)
            return _lost()
        fault = replica.take(call)
        kind = fault.kind if fault is not None else None
        secs = fault.secs if fault is not None else 0.0
        if process is None or replica.cut == "refuse" or kind == "refused":
            return Answer(Outcome.UNREACHABLE, None, "connection refused")
        match kind:
            case "reset":
                return _lost()
            case "hang":
                await asyncio.sleep(HANG_SECS)
                return _lost()
            case "500":
                return Answer(Outcome.REFUSED, 500, "Internal Server Error")
            case "503":
                return Answer(Outcome.REFUSED, 503, "Service Unavailable")
            case "not visible":
                return Answer(Outcome.NOT_VISIBLE, 404, "No adapter found")
            case "exists":
                return Answer(Outcome.EXISTS, 400, "has already been loaded")
            case "no effect":
                return Answer(Outcome.OK, 200, "")
            case "crash":
                replica.crash(secs)
                return _lost()

        if kind == "late" and arrived is not None:
            arrived(process)

        async def serve() -> Any:
            if kind in ("slow", "late"):
                await asyncio.sleep(secs if kind == "slow" else min(timeout, 60.0) + secs)
            return await handle(process)

        answer = await self._connected(process, serve, tied)
        if kind == "lost":
            return _lost()
        if kind == "garbage" and not tied:
            if call in ("health", "models", "facts"):
                return Answer(Outcome.OK, 200, "", b"\xff garbage")
            return Answer(Outcome.NO_ANSWER, 200, "the answer is not one of vLLM's")  # as VllmCalls.post takes it
        return answer

    async def _connected(self, process: Process, serve: Callable[[], Awaitable[Any]], tied: bool) -> Any:
        """Wait for the answer, or for the process to die."""
        loop = asyncio.get_running_loop()
        connection: asyncio.Future[None] = loop.create_future()
        process.connections[connection] = None
        task = self._server_side.run(loop.create_task, serve())
        task.add_done_callback(lambda _: connection.done() or connection.set_result(None))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await connection
            if not task.done():
                task.cancel()
                return _lost()
            return task.result()
        finally:
            process.connections.pop(connection, None)
            if tied:
                task.cancel()


def _lost() -> Answer:
    return Answer(Outcome.NO_ANSWER, None, "the connection was reset")

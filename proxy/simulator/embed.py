"""Replicas inside the running event loop, each on a port of its own.

async with SimFleet(3, prefill_tps=20_000) as fleet:
    fleet.urls                                  # ["http://127.0.0.1:40123", ...]
    fleet.replicas[1].faults.add("hang", "pause", times=1)
    await fleet.restart(2)
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from proxy.simulator.faults import Faults
from proxy.simulator.httpd import HttpServer
from proxy.simulator.options import ReplicaOptions
from proxy.simulator.replica import Replica
from proxy.simulator.server import App


class SimReplica:
    """One replica with its port. The port is kept while the replica is down, and refuses connections then."""

    def __init__(self, options: ReplicaOptions | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.options = options or ReplicaOptions()
        self.replica = Replica(self.options)
        self.replica.on_restart = self._died
        self.replica.on_refuse = self.replica.faults.refuse_now = self._refuse_for
        self.replica.boot()
        self.http = HttpServer(App(self.replica), host, port, self.options.keep_alive_secs)
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        host = f"[{self.http.host}]" if ":" in self.http.host else self.http.host
        return f"http://{host}:{self.http.port}"

    @property
    def faults(self) -> Faults:
        return self.replica.faults

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each route was called."""
        return self.replica.calls

    @property
    def up(self) -> bool:
        return self.http.listening

    def state(self) -> dict[str, Any]:
        return self.replica.state()

    async def start(self) -> None:
        """Listen (again), with whatever state there is."""
        await self.http.listen()

    def weights(self, name: str) -> str | None:
        """Weights that the engine holds for a listed adapter, None when it holds none."""
        ref = self.replica.loras.get(name)
        held = self.replica.slots.held.get(ref.int_id) if ref else None
        return held[1] if held else None

    def stop(self) -> None:
        """The process dies: state lost, connections cut, new ones refused, until ``start``."""
        self.http.refuse()
        self.http.kill()
        self.replica.boot()

    async def restart(self, down_secs: float = 0.0) -> None:
        """``stop``, wait, ``start``."""
        self.stop()
        await asyncio.sleep(down_secs)
        await self.start()

    def refuse(self, also_open: bool = True) -> None:
        """Refuse new connections and close idle ones, state kept; ``also_open`` cuts those in use too."""
        self.http.refuse()
        self.http.close_idle()
        if also_open:
            self.http.reset_connections()

    def cut(self) -> None:
        """Reset every open connection; new ones are accepted."""
        self.http.reset_connections()

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        self.http.close()
        self.replica.live.stop()

    def _died(self, secs: float | None) -> None:
        self.stop()
        self._start_after(secs)

    def _refuse_for(self, secs: float | None) -> None:
        self.refuse()
        self._start_after(secs)

    def _start_after(self, secs: float | None) -> None:
        if secs is None:
            return
        loop = asyncio.get_running_loop()

        def again() -> None:
            self._timers.discard(timer)
            task = loop.create_task(self.start())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        timer = loop.call_later(secs, again)
        self._timers.add(timer)


class SimFleet:
    """``count`` replicas with the same options, or one for each of ``each`` (on top of the common ones)."""

    def __init__(self, count: int = 0, each: Sequence[Mapping[str, Any]] = (), **options: Any) -> None:
        self._options = [ReplicaOptions(**{**options, **own}) for own in (each or [{}] * count)]
        self.replicas: list[SimReplica] = []

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]

    async def __aenter__(self) -> "SimFleet":
        self.replicas = [SimReplica(options) for options in self._options]
        for replica in self.replicas:
            await replica.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self.replicas:
            replica.close()
        # One turn of the loop, so that transports are closed when the caller goes on.
        await asyncio.sleep(0)

    async def start(self, index: int) -> None:
        await self.replicas[index].start()

    def stop(self, index: int) -> None:
        self.replicas[index].stop()

    async def restart(self, index: int, down_secs: float = 0.0) -> None:
        await self.replicas[index].restart(down_secs)

"""One replica: what its process would hold (engine, adapter names), and what outlives it (faults, call records)."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxy.simulator.adapters import AdapterBroken, AdapterNotFound, read_adapter
from proxy.simulator.engine import Engine, EngineDead
from proxy.simulator.faults import Faults
from proxy.simulator.live import LiveEngine
from proxy.simulator.options import ReplicaOptions
from proxy.simulator.slots import AdapterSlots, LoraRef


@dataclass(frozen=True, slots=True)
class LoadRefused(Exception):
    """A load that vLLM would answer with ``status`` and this error."""

    status: int
    kind: str
    message: str


class Replica:
    """Owner of a replica's state; lives in one event loop."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self.faults = Faults()
        self.faults.clock = asyncio.get_running_loop().time
        self.calls: Counter[str] = Counter()
        self.headers: dict[str, dict[str, str]] = {}
        """Request headers of the last call by route, names in lower case."""
        self.all_headers: list[dict[str, str]] = []
        """Headers of the last 1000 calls, whatever the route."""
        self.boots = 0
        self.on_restart: Callable[[float | None], None] = lambda _secs: None
        """Called when the process dies: seconds until it is back, None for never."""
        self.on_refuse: Callable[[float | None], None] = lambda _secs: None
        """Called to stop listening, state kept: seconds until it listens again, None for never."""
        self._live: LiveEngine | None = None

    def boot(self) -> None:
        """A fresh process: no adapters, empty cache, not paused."""
        if self._live is not None:
            self._live.stop()
        options = self.options
        self.boots += 1
        self.started = time.time()
        self.loras: dict[str, LoraRef] = {}
        self.overrides: dict[int, str] = {}
        """Weights that a fault put in place of what the path holds, by int_id."""
        self.sleep_level = 0
        self._ids = 0
        self._locks: dict[str, asyncio.Lock] = {}
        cpu = options.max_cpu_loras if options.max_cpu_loras is not None else options.max_loras
        self.slots = AdapterSlots(self._read, options.max_loras, max(cpu, options.max_loras))
        self._live = LiveEngine(Engine(options.engine_config(), self.slots))
        self._live.on_death = self._engine_died

    @property
    def live(self) -> LiveEngine:
        assert self._live is not None, "boot() first"
        return self._live

    @property
    def engine(self) -> Engine:
        return self.live.engine

    def die(self, secs: float | None) -> None:
        """The process ends; it is back, empty, after ``secs`` (None: when somebody starts it)."""
        self.on_restart(secs)

    def _engine_died(self) -> None:
        # vLLM answers 500 to those who wait, then shuts its server down.
        live = self.live
        asyncio.get_running_loop().call_later(0.05, lambda: self.die(None) if self._live is live else None)

    # Adapters, as OpenAIServingModels keeps them

    async def load(self, name: str, path: str, inplace: bool = False, wrong_path: str | None = None) -> None:
        """Raises LoadRefused. ``wrong_path``: the lie of the fault ``wrong_weights`` ('' for weights nobody has)."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not name or not path:
                raise LoadRefused(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
            known = self.loras.get(name)
            if known is not None and not inplace:
                raise LoadRefused(
                    400,
                    "InvalidUserInput",
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place,"
                    " set 'load_inplace' to True.",
                )
            live = self.live
            if self.options.load_secs:
                await asyncio.sleep(self.options.load_secs)
            ref = LoraRef(name, known.int_id if known else self._next_id(), path, inplace)
            if wrong_path is not None:
                self.overrides[ref.int_id] = (
                    read_adapter(wrong_path).weights if wrong_path else f"wrong:{uuid.uuid4().hex}"
                )
            if live.death:
                raise LoadRefused(500, "InternalServerError", ENGINE_DEAD)
            try:
                self.slots.activate(ref, fresh=True)
            except AdapterNotFound:
                message = f"Loading lora {name} failed: No adapter found for {path}"
                raise LoadRefused(404, "NotFoundError", message) from None
            except AdapterBroken as error:
                message = (
                    f"Call to add_lora method failed: Worker failed with error '{error}',"
                    " please check the stack trace above for the root cause"
                )
                raise LoadRefused(500, "InternalServerError", message) from None
            self.loras[name] = ref

    def pretend_load(self, name: str, path: str) -> None:
        """List an adapter that has no effect: the base model answers under its name."""
        ref = LoraRef(name, self._next_id(), path)
        self.overrides[ref.int_id] = self.options.base_weights
        self.loras[name] = ref

    def unload(self, name: str) -> bool:
        """Forget a name (its slot stays, as in vLLM); False when it is unknown."""
        return self.loras.pop(name, None) is not None

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _read(self, ref: LoraRef) -> str:
        override = self.overrides.get(ref.int_id)
        if override is not None:
            return override
        weights = read_adapter(ref.path, self.options.max_lora_rank).weights
        return self.options.base_weights if weights == "base" else weights

    # What tests look at

    def record(self, route: str, headers: dict[str, str]) -> None:
        self.calls[route] += 1
        self.headers[route] = headers
        self.all_headers.append(headers)
        if len(self.all_headers) > 1000:
            del self.all_headers[:500]

    def state(self) -> dict[str, Any]:
        """Everything a test may want to know, as JSON."""
        engine, slots = self.engine, self.slots
        counters = engine.counters
        return {
            "boots": self.boots,
            "adapters": {
                name: {"path": ref.path, "int_id": ref.int_id, "weights": slots.held.get(ref.int_id, (None, None))[1]}
                for name, ref in self.loras.items()
            },
            "slots": {
                "held": [name for name, _ in slots.held.values()],
                "reads": slots.reads,
                "evictions": slots.evictions,
            },
            "paused": engine.paused is not None,
            "pause": engine.paused,
            "sleep_level": self.sleep_level,
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "dead": isinstance(self.live.death, EngineDead),
            "cache": {
                "cached_blocks": engine.pool.cached,
                "used_blocks": engine.pool.used,
                "capacity_blocks": engine.pool.capacity,
                "evictions": engine.pool.evictions,
                "queries": counters.queries,
                "hits": counters.hits,
                "misses": counters.misses,
                "resets": counters.resets,
            },
            "prompt_tokens": counters.prompt_tokens,
            "prefilled_tokens": counters.prefilled,
            "generated_tokens": counters.generated,
            "preemptions": counters.preemptions,
            "finished": dict(counters.finished),
            "calls": dict(self.calls),
            "headers": self.headers,
        }


ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""vLLM's answer to whoever was there when its engine core died."""

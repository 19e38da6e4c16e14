"""The engine's adapter slots: an LRU that evicts in silence and reads the directory again when it must.

Follows ``LRUCacheWorkerLoRAManager`` of vLLM 0.27.1: ``max_cpu_loras`` adapters are held, ``max_loras`` of them are
active; a name that the API server lists may long have lost its slot, and is re-read from its path at the next use.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoraRef:
    """An adapter as a request carries it; ``int_id`` identifies one load (a name loaded again gets a new one)."""

    name: str
    int_id: int
    path: str
    load_inplace: bool = False


class WeightSource(Protocol):
    """Where the engine gets the weights of an adapter from."""

    def activate(self, lora: LoraRef, fresh: bool) -> str:
        """Name of the weights, loaded if need be; ``fresh`` when a request starts (load_inplace re-reads then)."""
        ...


class NamedWeights:
    """Weights without files, for offline runs: each name is its own weights."""

    def activate(self, lora: LoraRef, fresh: bool) -> str:
        return f"weights of {lora.name}"


@dataclass(slots=True)
class AdapterSlots:
    """``read`` loads the weights of a ref, or raises; it is the only door to the disk."""

    read: Callable[[LoraRef], str]
    max_loras: int = 8
    max_cpu_loras: int = 8
    held: OrderedDict[int, tuple[str, str]] = field(default_factory=OrderedDict)
    """By int_id, least recently used first: (name, weights)."""
    active: OrderedDict[int, None] = field(default_factory=OrderedDict)
    reads: int = 0
    evictions: int = 0

    def activate(self, lora: LoraRef, fresh: bool) -> str:
        if lora.int_id not in self.held or (lora.load_inplace and fresh):
            # The new one is read first: a broken directory must not cost anybody a slot.
            weights = self.read(lora)
            self.reads += 1
            self._drop(lora.int_id)
            while len(self.held) >= self.max_cpu_loras:
                self._drop(next(iter(self.held)))
                self.evictions += 1
            self.held[lora.int_id] = (lora.name, weights)
        else:
            self.held.move_to_end(lora.int_id)
        if lora.int_id not in self.active and len(self.active) >= self.max_loras:
            self.active.popitem(last=False)
        self.active[lora.int_id] = None
        self.active.move_to_end(lora.int_id)
        return self.held[lora.int_id][1]

    def _drop(self, int_id: int) -> None:
        self.held.pop(int_id, None)
        self.active.pop(int_id, None)

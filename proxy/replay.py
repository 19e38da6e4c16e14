"""Recorded traffic through a policy, on simulated replicas, as fast as the computer goes."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.errors import ConfigError
from proxy.replay_trace import Recorded, Trace
from proxy.simulator.engine import EngineConfig
from proxy.simulator.offline import Flight, OfflineFleet, Tally

SEND_SECS = 5e-5
"""A client in a closed loop sends one request after the other, this far apart."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The simulated replicas. Speeds are tokens a second; `decode_slowdown` is by how much each further sequence in the
    batch lengthens a step (see `proxy.simulator.engine`)."""

    replicas: int
    capacity_tokens: int = 400_000
    block_size: int = 16
    prefill_tps: float = 20_000.0
    decode_tps: float = 60.0
    decode_slowdown: float = 0.01

    def engine(self) -> EngineConfig:
        return EngineConfig(
            block_size=self.block_size,
            capacity_blocks=self.capacity_tokens // self.block_size,
            prefill_tps=self.prefill_tps,
            decode_tps=self.decode_tps,
            decode_slowdown=self.decode_slowdown,
            max_loras=1_000_000,
        )


def replay(trace: Trace, policy: str, hardware: Hardware, concurrency: int | None = None) -> Tally:
    """Run a trace. Requests come when they came, or, with `concurrency`, as soon as fewer than so many are under way.

    A next turn never comes before the answer that it continues. Raises ConfigError when a request does not fit.
    """
    if trace.longest > hardware.capacity_tokens // hardware.block_size * hardware.block_size:
        raise ConfigError(
            f"--capacity-tokens {hardware.capacity_tokens} is less than one request of {trace.longest} tokens; raise it"
        )
    fleet = OfflineFleet(policy, hardware.engine(), hardware.replicas)
    line: _Line = _Arrivals(trace.calls) if concurrency is None else _Closed(trace.calls, concurrency)
    numbers: dict[Flight, int] = {}
    while True:
        due, event = line.due(), fleet.next_event_time()
        if due is not None and (event is None or due[0] <= event):
            at, number = line.pop()
            numbers[fleet.send(trace.calls[number].call, at)] = number
        elif event is not None:
            for flight in fleet.advance(event):
                line.over(numbers.pop(flight), event)
        else:
            return fleet.tally


class _Line:
    """Requests that are to be sent, earliest first. Those that continue an answer join when it is there."""

    def __init__(self, calls: Sequence[Recorded]) -> None:
        self._calls = calls
        self._line: list[tuple[float, int]] = []
        self._blocked: defaultdict[int, list[int]] = defaultdict(list)
        for number, recorded in enumerate(calls):
            if recorded.after is None:
                self._line.append((self._at(recorded), number))
            else:
                self._blocked[recorded.after].append(number)
        heapq.heapify(self._line)

    def _at(self, recorded: Recorded) -> float:
        return recorded.at

    def due(self) -> tuple[float, int] | None:
        """When the next one is to be sent, and its number."""
        return self._line[0] if self._line else None

    def pop(self) -> tuple[float, int]:
        return heapq.heappop(self._line)

    def over(self, number: int, now: float) -> None:
        """An answer is there."""
        for next_one in self._blocked.pop(number, ()):
            heapq.heappush(self._line, (self._released(self._calls[next_one], now), next_one))

    def _released(self, recorded: Recorded, now: float) -> float:
        return max(recorded.at, now + recorded.pause)


class _Arrivals(_Line):
    """As recorded."""


class _Closed(_Line):
    """So many at a time, in the order in which they were recorded."""

    def __init__(self, calls: Sequence[Recorded], concurrency: int) -> None:
        super().__init__(calls)
        self._room = concurrency
        self._now = 0.0
        self._free_at = 0.0

    def _at(self, recorded: Recorded) -> float:
        return 0.0

    def _released(self, recorded: Recorded, now: float) -> float:
        return 0.0

    def due(self) -> tuple[float, int] | None:
        if not self._room or not self._line:
            return None
        return max(self._free_at, self._now), self._line[0][1]

    def pop(self) -> tuple[float, int]:
        at = max(self._free_at, self._now)
        self._free_at = at + SEND_SECS
        self._room -= 1
        return at, super().pop()[1]

    def over(self, number: int, now: float) -> None:
        self._room += 1
        self._now = now
        super().over(number, now)

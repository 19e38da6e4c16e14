"""The last ten minutes, one sample a second, for the status page. Pure: time and readings are passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

SECONDS = 600
MAX_MARKS = 8

ROUTES = ("affinity", "spill", "new", "fallback")
"""Why a replica was chosen, in the order in which the page stacks them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the counters stand at. All grow with the proxy's life but the last four.

    `routes` follows `ROUTES`; `prompt_tokens`, `predicted` and `actual` are tokens of the requests whose replica
    said how much it reused: in their prompts, expected to be cached, and cached.
    """

    routes: tuple[int, int, int, int] = (0, 0, 0, 0)
    prompt_tokens: int = 0
    predicted: int = 0
    actual: int = 0
    in_flight: int = 0
    waiting: int = 0
    blocks: int = 0
    ready: int = 0


@dataclass(slots=True)
class _Second:
    t: int
    grown: list[int]
    now: Reading
    marks: list[tuple[str, str, str | None]]


class History:
    """A ring of seconds. `tick` about once a second, `mark` whenever a transaction ends, `rows` for the page.

    Times are seconds since the proxy started, on a clock that never goes back. A second in which nobody ticked is
    missing; its growth is in the next one.
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        self._ring: deque[_Second] = deque(maxlen=seconds)
        self._last = Reading()
        self._marks: deque[tuple[str, str, str | None]] = deque(maxlen=MAX_MARKS)

    def tick(self, now: float, reading: Reading) -> None:
        """Take a sample; a second one within the same second is added to the first."""
        grown = [max(new - old, 0) for new, old in zip(_counters(reading), _counters(self._last), strict=True)]
        self._last = reading
        t = int(now)
        if self._ring and self._ring[-1].t >= t:
            last = self._ring[-1]
            last.grown = [a + b for a, b in zip(last.grown, grown, strict=True)]
            last.now = reading
            last.marks = (last.marks + list(self._marks))[-MAX_MARKS:]
        else:
            self._ring.append(_Second(t, grown, reading, list(self._marks)))
        self._marks.clear()

    def mark(self, kind: str, outcome: str, name: str | None) -> None:
        """A transaction ended; it is shown in the second of the next tick."""
        self._marks.append((kind, outcome, name))

    def rows(self, after: int = -1) -> list[dict[str, Any]]:
        """Samples with t > `after`, oldest first, as the page gets them. Counters are growth within the second."""
        rows: list[dict[str, Any]] = []
        for second in reversed(self._ring):
            if second.t <= after:
                break
            rows.append(_row(second))
        rows.reverse()
        return rows


def _counters(reading: Reading) -> tuple[int, ...]:
    return (*reading.routes, reading.prompt_tokens, reading.predicted, reading.actual)


def _row(second: _Second) -> dict[str, Any]:
    routes, (prompt, predicted, actual) = second.grown[: len(ROUTES)], second.grown[len(ROUTES) :]
    row: dict[str, Any] = {
        "t": second.t,
        **dict(zip(ROUTES, routes, strict=True)),
        "prompt_tokens": prompt,
        "predicted": predicted,
        "actual": actual,
        "in_flight": second.now.in_flight,
        "waiting": second.now.waiting,
        "ready": second.now.ready,
    }
    if second.marks:
        row["marks"] = [{"kind": kind, "outcome": outcome, "name": name} for kind, outcome, name in second.marks]
    return row

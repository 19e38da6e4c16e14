"""The cells of the fault matrix: what is asked, what goes wrong, on which replicas, and how the fault is struck."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from zlib import crc32

from proxy.simulator import SimReplica

ACTIONS = ("load", "unload", "pause", "resume", "reset", "completion", "stream", "health")
SIZES = (1, 2, 3, 8)
PLACES = ("first", "middle", "last", "all")

FAULTS = {
    "refused": "refuse",
    "reset before headers": "reset",
    "reset in the body": "reset_body",
    "hang": "hang",
    "slow": "slow",
    "500": "500",
    "503": "503",
    "not visible yet": "not_visible",
    "already loaded": "already_loaded",
    "garbage": "garbage",
    "restart": "restart",
    "lost answer": "lost_answer",
}
"""Names in the matrix, and what the simulator calls them."""

LONG = bool(os.environ.get("LORAFLEET_LONG"))
"""All cells, and each with a fault that comes once and one that lasts."""

ELSEWHERE = frozenset(
    {
        "refused",
        "reset before headers",
        "slow",
        "not visible yet",
        "already loaded",
        "restart",
        "lost answer",
    }
)
"""Faults after which a completion is answered all the same while another replica is well: nothing came back yet, or
nothing was wrong with it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`hit` are the replicas with the fault. It comes with the first call, or (`lasting`) with all until it is over."""

    action: str
    fault: str
    size: int
    place: str
    hit: tuple[int, ...]
    lasting: bool

    def __str__(self) -> str:
        kind = "lasting" if self.lasting else "once"
        return f"{self.action} x {self.fault} x {self.place} of {self.size} ({kind})"

    @property
    def some_are_well(self) -> bool:
        return len(self.hit) < self.size


def where(size: int, place: str) -> tuple[int, ...]:
    """Replicas of a place; 'middle' of two is the last."""
    return {"first": (0,), "middle": (size // 2,), "last": (size - 1,), "all": tuple(range(size))}[place]


def cells(action: str) -> list[Cell]:
    """The distinct cells of one action: on one replica all places are one, on two the middle is the last.

    Without LORAFLEET_LONG each comes once, lasting or not by its name, and of those on eight replicas every third.
    """
    found: dict[tuple[str, int, tuple[int, ...], bool], Cell] = {}
    for fault in FAULTS:
        for size in SIZES:
            for place in PLACES:
                hit = where(size, place)
                draw = crc32(f"{action}/{fault}/{size}/{hit}".encode())
                for lasting in (False, True) if LONG else (bool(draw & 1),):
                    if LONG or size < 8 or draw % 3 == 0:
                        found.setdefault((fault, size, hit, lasting), Cell(action, fault, size, place, hit, lasting))
    return list(found.values())


def strike(cell: Cell, replicas: list[SimReplica]) -> None:
    """Put the fault on its replicas."""
    for index in cell.hit:
        replica, kind = replicas[index], FAULTS[cell.fault]
        if cell.fault == "refused" and cell.lasting:
            replica.refuse()
            continue
        secs = {"slow": 0.15, "refuse": 0.1, "restart": 0.1}.get(kind)
        # A process that is gone is not gone again while it starts.
        times = None if cell.lasting and kind not in ("restart", "refuse") else 1
        details = {"secs": secs} if secs is not None else {}
        replica.faults.add(kind, cell.action, times=times, **details)


async def heal(cell: Cell, replicas: list[SimReplica]) -> None:
    """End the fault, whatever of it has not happened yet included."""
    for index in cell.hit:
        replicas[index].faults.clear()
        if cell.fault == "refused" and cell.lasting:
            await replicas[index].start()


async def heal_later(cell: Cell, replicas: list[SimReplica], secs: float) -> None:
    await asyncio.sleep(secs)
    await heal(cell, replicas)

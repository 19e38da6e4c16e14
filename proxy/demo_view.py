"""What `lorafleet demo` shows: a progress bar while it runs, a table when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from proxy import demo

SIDES = {"round_robin": "round robin", "prefix": "prefix routing"}


class Show:
    """Called by the demo as it goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def begin(self, publishes: int, rollouts: int) -> None:
        self._console.print(
            f"[bold]lorafleet demo[/bold]: {demo.REPLICAS} simulated vLLM replicas, {publishes} policy versions, "
            f"{rollouts} rollouts in groups of {demo.GROUP}, twice: round robin, then by prefix"
        )
        for side, words in SIDES.items():
            for what, total in (("rollouts", rollouts), ("publishes", publishes)):
                self._tasks[side, what] = self._progress.add_task(f"{words}: {what}", total=total)
        self._progress.start()

    def step(self, side: str, what: str) -> None:
        self._progress.advance(self._tasks[side, what])

    def stop(self) -> None:
        self._progress.stop()

    def table(self, rows: list[tuple[str, str, str]]) -> None:
        table = Table(title="What happened")
        table.add_column("")
        table.add_column("prefix", justify="right")
        table.add_column("round robin", justify="right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def address(self, address: str, *, up: bool) -> None:
        if up:
            self._console.print(f"Status page: {address}/   (Ctrl-C ends the demo)")
        else:
            self._console.print(f"The status page was at {address}/ ; `lorafleet demo --keep` stays up for a look.")


def run_demo(*, keep: bool) -> int:
    """Returns the exit code: 0 when no answer was wrong and none failed."""
    show = Show(Console(file=sys.stdout))
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(demo.main(show, keep=keep))
    show.stop()
    return 0 if keep else 130

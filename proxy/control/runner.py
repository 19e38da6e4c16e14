"""Executes a `Transaction`: does the calls that it asks for and feeds it the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy.control.loading import Verdict
from proxy.control.transaction import Ask, Effect, Said, Transaction
from proxy.errors import ReplicaAnswer

Call = Callable[[int], Awaitable[Verdict]]

GONE_CHECK_SECS = 0.5


async def run(
    transaction: Transaction, *, ask: Call, undo: Call, gone: Callable[[int], Said | None]
) -> tuple[dict[int, Verdict], dict[int, Verdict]]:
    """Run to the end. Returns the verdict of each replica that was asked, and what those said that could not be put
    back.

    `ask` and `undo` never raise for what a replica does. `gone` says that a replica was declared dead meanwhile, and
    what that counts as: a call that still hangs on it is given up. Cancelling this cancels the calls.
    """
    verdicts: dict[int, Verdict] = {}
    spoilt: dict[int, Verdict] = {}
    tasks: dict[asyncio.Task[Verdict], Effect] = {}

    def start(effects: list[Effect]) -> None:
        for effect in effects:
            call = ask if isinstance(effect, Ask) else undo
            tasks[asyncio.ensure_future(call(effect.replica))] = effect

    start(transaction.begin())
    try:
        while tasks:
            done, hanging = await asyncio.wait(tasks, timeout=GONE_CHECK_SECS, return_when=asyncio.FIRST_COMPLETED)
            answers = [(tasks.pop(task), task.result()) for task in done]
            for task in hanging:
                replica = tasks[task].replica
                if (said := gone(replica)) is not None:
                    task.cancel()
                    answers.append((tasks.pop(task), Verdict(said, ReplicaAnswer(replica, None, "stopped answering"))))
            for effect, verdict in answers:
                said = verdict.said
                if isinstance(effect, Ask):
                    verdicts[effect.replica] = verdict
                else:
                    said = Said.UNDONE if said is Said.OK else Said.NOT_UNDONE
                    if said is Said.NOT_UNDONE:
                        spoilt[effect.replica] = verdict
                start(transaction.advance(effect.replica, said))
    finally:
        for task in tasks:
            task.cancel()
    return verdicts, spoilt

"""Threads for calls that may never come back: a mount whose server is gone hangs every call that touches it.

The event loop's own executor will not do: its few threads are shared by everybody, so that a mount that hangs would
stop the journal as well, and the process waits for them when it ends.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any


class Threads:
    """`await threads(function, *arguments)`; at most `count` run at a time. Who stops waiting (a timeout) leaves the
    thread to its fate; calls that nobody waits for any more are not begun."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]]
        self._calls = queue.SimpleQueue()
        self._started = 0
        self._waiting = 0

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put((future, function, arguments))
        self._waiting += 1
        if self._waiting > self._started and self._started < self._count:
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name} {self._started}", daemon=True).start()
        try:
            return await future
        finally:
            self._waiting -= 1

    def _work(self) -> None:
        while True:
            future, function, arguments = self._calls.get()
            if future.cancelled():
                continue
            try:
                result, error = function(*arguments), None
            except BaseException as raised:
                result, error = None, raised
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed
                pass
            del future, function, arguments, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)

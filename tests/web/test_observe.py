from __future__ import annotations

from typing import Any

from proxy.web.observe import Observer, Outcome, Silent, Tee


class Diary:
    """Writes down each call."""

    def __init__(self, name: str, pages: list[tuple[Any, ...]]) -> None:
        self._name = name
        self._pages = pages

    def finished(self, outcome: Outcome) -> None:
        self._pages.append((self._name, "finished", outcome))

    def retried(self, replica: int, reason: str) -> None:
        self._pages.append((self._name, "retried", replica, reason))

    def client_left(self, phase: str) -> None:
        self._pages.append((self._name, "left", phase))

    def waiting(self, count: int) -> None:
        self._pages.append((self._name, "waiting", count))


def test_silence_is_an_observer() -> None:
    silent: Observer = Silent()
    silent.retried(0, "reset")
    silent.client_left("body")
    silent.waiting(1)


def test_a_tee_tells_both_in_their_order() -> None:
    pages: list[tuple[Any, ...]] = []
    tee: Observer = Tee(Diary("a", pages), Diary("b", pages))
    over: Any = object()
    tee.finished(over)
    tee.retried(3, "reset")
    tee.client_left("asked")
    tee.waiting(2)
    said = [("finished", over), ("retried", 3, "reset"), ("left", "asked"), ("waiting", 2)]
    assert pages == [(name, *words) for words in said for name in "ab"]

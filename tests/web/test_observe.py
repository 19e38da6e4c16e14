from __future__ import annotations

from proxy.web.observe import Observer, Silent


def test_silence_is_an_observer() -> None:
    silent: Observer = Silent()
    silent.retried(0, "reset")
    silent.client_left("body")
    silent.waiting(1)

from __future__ import annotations

import io

from rich.console import Console

from trainer_client.status_table import print_status


def shown(body: dict[str, object]) -> str:
    out = io.StringIO()
    print_status(body, Console(file=out, width=160, color_system=None))
    return out.getvalue()


def test_replicas_and_adapters() -> None:
    text = shown(
        {
            "paused": True,
            "replicas": [
                {
                    "index": 3,
                    "url": "http://r3",
                    "state": "ready",
                    "in_flight": 12,
                    "adapters": ["a", {"name": "b"}],
                    "last_error": "timed out",
                }
            ],
            "adapters": [
                {"name": "[red]odd[/red]", "state": "committed", "digest": "sha256:" + "f" * 64, "path": "/r/a"}
            ],
        }
    )
    for word in ("fleet (paused)", "http://r3", "ready", "12", "a, b", "timed out", "[red]odd[/red]", "/r/a"):
        assert word in text
    assert "sha256:" + "f" * 12 in text and "f" * 13 not in text


def test_an_empty_fleet() -> None:
    assert "fleet" in shown({}) and "paused" not in shown({"paused": False})

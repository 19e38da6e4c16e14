"""`load_inplace: true` sticks to a name: the adapter is read from disk again on every request (vLLM #33791). Whatever
the client sends, replicas never see it, nor any field that lorafleet does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import quick, rig, weights_of  # noqa: F401


@pytest.mark.parametrize("value", [True, 1, "true", False, None, [True]])
async def test_never_passed_on(value: Any, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        seen: list[dict[str, Any]] = []
        for replica in it.replicas:
            inner = replica.http.app

            async def app(scope: Any, receive: Any, send: Any, inner: Any = inner) -> None:
                async def listening() -> Any:
                    message = await receive()
                    if scope["path"] == "/v1/load_lora_adapter" and message["type"] == "http.request":
                        seen.append(json.loads(message["body"]))
                    return message

                await inner(scope, listening, send)

            replica.http.app = app
        path = it.library.path(1)
        answer = await it.load("a", path, load_inplace=value, is_3d_lora_weight=True, extra={"x": 1})
        assert answer.ok
        it.names["a"] = weights_of(path)
        reads = [replica.replica.slots.reads for replica in it.replicas]
        await it.check()
        assert seen == [{"lora_name": "a", "lora_path": str(path)}] * 2
        assert [replica.replica.slots.reads for replica in it.replicas] == reads

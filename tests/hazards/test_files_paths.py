"""Where an adapter may lie: an absolute path, below a root when one is given, links resolved. Anything else is 400
before any replica is asked: vLLM would take a relative path for its own, or a name for one on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import Rig, quick, rig  # noqa: F401


async def refused(it: Rig, name: Any, path: Any) -> None:
    before = [dict(replica.calls) for replica in it.replicas]
    answer = await it.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    assert answer.status == 400, (name, path, answer.text)
    error = answer.json()["error"]
    assert error["code"] == 400
    assert error["param"] in ("lora_name", "lora_path", None)
    for replica, calls in zip(it.replicas, before, strict=True):
        assert replica.calls["load"] == calls.get("load", 0)


async def test_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    outside = tmp_path / "root-but-not-it"
    async with rig(1, tmp_path, options={"adapter_root": [str(root)]}) as it:
        it.library.write(outside, 1)
        it.library.write(root / "good", 2)
        (root / "escape").symlink_to(outside)
        (root / "up").symlink_to("..")
        (root / "loop").symlink_to("loop")
        (tmp_path / "into").symlink_to(root)
        odd: list[Any] = [
            str(outside),
            str(root),
            f"{root}/",
            f"{root}/..",
            f"{root}/../root-but-not-it",
            f"{root}/good/../../root-but-not-it",
            str(root / "escape"),
            str(root / "up" / "root-but-not-it"),
            "/",
            "//",
            "/etc/passwd",
            "/proc/self/cwd",
            "good",
            "./good",
            "../root/good",
            "organisation/adapter",
            "s3://bucket/adapter",
            f"file://{root}/good",
            f" {root}/good",
            f"{root}/go\0od",
            "~/good",
            "",
            "x" * 5000,
            "/" + "x" * 5000,
            None,
            7,
            ["/a"],
            {"a": "b"},
            True,
        ]
        for path in odd:
            await refused(it, "a", path)
        await it.must_load("a", root / "good")
        await it.must_load("b", tmp_path / "into" / "good")
        await it.check()


async def test_without_a_root(tmp_path: Path) -> None:
    async with rig(1, tmp_path) as it:
        for path in ("good", "./good", "organisation/adapter", "~/good", "", None, 7, f"file://{tmp_path}"):
            await refused(it, "a", path)


async def test_names(tmp_path: Path) -> None:
    async with rig(1, tmp_path) as it:
        path = str(it.library.path(1))
        odd: list[Any] = [
            "",
            " ",
            "a b",
            "a\n",
            "a\r\nx: y",
            "ä",
            "a@b",
            "a?b",
            "a" * 129,
            "base",
            None,
            7,
            ["a"],
            {"a": 1},
            "a\0",
            "\ud800",
        ]
        for name in odd:
            await refused(it, name, path)
        for name in ("a", "A.b_c:d/e-9", "x" * 128):
            assert (await it.load(name, path)).ok
            assert (await it.complete(name)).ok
            assert (await it.unload(name)).ok


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b"\xff", b'"x"', b"[" * 5000, b'{"lora_name": "a"}', b"{}"]
)
async def test_bodies(body: bytes, tmp_path: Path) -> None:
    async with rig(1, tmp_path) as it:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            answer = await it.ask("POST", path, body)
            assert answer.status in (400, 404), (path, answer.text)
        await it.check()


async def test_unknown_names_to_unload(tmp_path: Path) -> None:
    """A name that cannot be one is not remembered in the views, however long."""
    async with rig(1, tmp_path) as it:
        for name in ("nobody", "x" * 500_000, "a\nb", "base"):
            answer = await it.unload(name)
            assert answer.status in (400, 404)
            assert len(answer.body) < 2000
        assert len((await it.ask("GET", "/fleet")).body) < 100_000
        await it.check()


async def test_a_base_models_name_while_nobody_is_known_yet(tmp_path: Path) -> None:
    """The proxy does not know yet what the base model is called: it must not bind that name later on."""
    import asyncio

    from proxy.simulator import SimFleet
    from tests.faults.rig import CANARY

    async with SimFleet(1, api_key=CANARY) as sims:
        sims.replicas[0].refuse()
        async with rig(1, tmp_path, sims=sims, wait=False) as it:
            change = asyncio.create_task(it.load("base", it.library.path(1)))
            await asyncio.sleep(0.2)
            await sims.start(0)
            answer = await change
            assert answer.status in (400, 503), answer.text
            await it.check()

"""The fault matrix: every call, with every fault, on the first, the middle, the last and all of 1, 2, 3 and 8 replicas.

Cells share proxies and replicas, one after the other, so each also starts from whatever the one before it left. After
each, with the fault gone, all invariants hold; a change happened on all replicas or on none, and its status said which.
`LORAFLEET_LONG=1` runs all cells, each with a fault that comes once and with one that lasts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator import BASE, expected_tokens
from tests.faults import cells as matrix
from tests.faults.asgi import Answer
from tests.faults.cells import ACTIONS, ELSEWHERE, FAULTS, SIZES, Cell, cells, heal, heal_later, strike
from tests.faults.rig import Rig, assert_weights, quick, rig, weights_of  # noqa: F401

LANES = {1: 2, 2: 3, 3: 4, 8: 4}
"""Proxies side by side for each size: a cell mostly waits."""


@pytest.mark.parametrize("action", ACTIONS)
async def test_matrix(action: str, tmp_path: Path) -> None:
    todo = {size: [cell for cell in cells(action) if cell.size == size] for size in SIZES}
    lanes = [lane(size, todo[size], tmp_path) for size in SIZES for _ in range(LANES[size])]
    failures = [failure for failed in await asyncio.gather(*lanes) for failure in failed]
    assert not failures, f"{len(failures)} cells failed:\n" + "\n".join(failures)


async def lane(size: int, todo: list[Cell], root: Path) -> list[str]:
    """Take cells of one size until there are none; what failed."""
    failed = []
    while todo:
        async with rig(size, root, control={"admin_timeout_secs": 20.0}) as it:
            await it.must_load("a", it.library.path(1))
            await it.must_load("b", it.library.path(2))
            while todo:
                cell = todo.pop()
                try:
                    await run(it, cell)
                except Exception as error:
                    failed.append(f"{cell}: {type(error).__name__}: {error}")
                    break  # a fresh fleet for the next one
    return failed


async def run(it: Rig, cell: Cell) -> None:
    await CONTROL[cell.action](it, cell) if cell.action in CONTROL else await generate(it, cell)
    await it.check()
    if it.paused:
        await it.settle()
        assert (await it.resume()).ok
        it.paused = False
    if "x" in it.names:
        await it.must_unload("x")
        await it.settle()


# -- control calls -----------------------------------------------------------------------------------------------------


async def under_fault(it: Rig, cell: Cell, change: Coroutine[Any, Any, Answer]) -> Answer:
    """The change, with the fault struck; what must go on meanwhile goes on. The fault is over when it has answered."""
    plane = it.parts.plane
    # Long where the call will succeed, however busy the machine; short where it can only fail.
    hopeless = cell.lasting or cell.fault == "hang"
    usual = plane.settings
    plane.settings = replace(
        usual,
        load_deadline_secs=1.2 if hopeless else 40,
        admin_timeout_secs=0.6 if cell.fault == "hang" else usual.admin_timeout_secs,
    )
    strike(cell, it.replicas)
    bystanders = asyncio.gather(healthy(it, cell), bystander(it, cell))
    try:
        return await change
    finally:
        plane.settings = usual
        await heal(cell, it.replicas)
        await bystanders


async def healthy(it: Rig, cell: Cell) -> None:
    answer = await it.ask("GET", "/health")
    assert answer.status in (200, 503)
    assert answer.json()["total"] == cell.size


async def bystander(it: Rig, cell: Cell) -> None:
    """A completion under a name that the change is not about."""
    if not it.paused and cell.action != "pause":
        answer = await it.complete("a", it.new_prompt())
        if answer.ok:
            assert answer.json()["model"] == "a"
        else:  # both tries met a replica that went away
            assert cell.fault in ("refused", "restart") and answer.status in (502, 503, None), answer.text


def refused(it: Rig, cell: Cell, answer: Answer) -> None:
    """An error that says what happened: its own status as code, replicas by index."""
    assert answer.whole and answer.status is not None and answer.status >= 400, answer
    error = answer.json()["error"]
    assert error["code"] == answer.status
    assert answer.status != 404, "TRL takes a 404 for a server without runtime loading"
    listed = [said["replica"] for said in error.get("replicas", [])]
    assert listed == sorted(set(listed)) and all(0 <= index < cell.size for index in listed)


async def load(it: Rig, cell: Cell) -> None:
    path = it.library.path(10 + len(it.parts.fleet.desired.used) % 3)
    answer = await under_fault(it, cell, it.load("x", path))
    if answer.ok:
        it.names["x"] = weights_of(path)
    else:
        refused(it, cell, answer)
        assert (await it.complete("x")).status == 404
    if cell.fault == "slow" or (cell.fault == "not visible yet" and not cell.lasting):
        assert answer.ok, answer.text


async def unload(it: Rig, cell: Cell) -> None:
    await it.must_load("x", it.library.path(10 + len(it.parts.fleet.desired.used) % 3))
    answer = await under_fault(it, cell, it.unload("x"))
    if answer.ok:
        del it.names["x"]
        assert (await it.complete("x")).status == 404
    else:
        refused(it, cell, answer)


async def pause(it: Rig, cell: Cell) -> None:
    answer = await under_fault(it, cell, it.pause())
    it.paused = answer.ok
    if not answer.ok:
        refused(it, cell, answer)


async def resume(it: Rig, cell: Cell) -> None:
    assert (await it.pause()).ok
    it.paused = True
    answer = await under_fault(it, cell, it.resume())
    it.paused = not answer.ok
    if not answer.ok:
        refused(it, cell, answer)


async def reset(it: Rig, cell: Cell) -> None:
    before = [(replica.replica.boots, replica.replica.engine.counters.resets) for replica in it.replicas]
    answer = await under_fault(it, cell, it.ask("POST", "/reset_prefix_cache"))
    if not answer.ok:
        refused(it, cell, answer)
    elif answer.json()["success"]:
        await it.settle()
        for replica, (boots, resets) in zip(it.replicas, before, strict=True):
            assert replica.replica.boots > boots or replica.replica.engine.counters.resets > resets


async def health(it: Rig, cell: Cell) -> None:
    """Health checks go wrong while a version is published."""
    strike(cell, it.replicas)
    met = [it.replicas[index].calls["health"] for index in cell.hit]
    await it.until(
        lambda: any(
            it.replicas[index].calls["health"] > seen or not it.replicas[index].up
            for index, seen in zip(cell.hit, met, strict=True)
        ),
        "asked for its health",
    )
    path = it.library.path(10 + len(it.parts.fleet.desired.used) % 3)
    answer, *_ = await asyncio.gather(it.load("x", path), healthy(it, cell), heal_later(cell, it.replicas, 0.4))
    if answer.ok:
        it.names["x"] = weights_of(path)
    else:
        refused(it, cell, answer)


CONTROL: dict[str, Callable[[Rig, Cell], Coroutine[Any, Any, None]]] = {
    "load": load,
    "unload": unload,
    "pause": pause,
    "resume": resume,
    "reset": reset,
    "health": health,
}


# -- completions -------------------------------------------------------------------------------------------------------


async def generate(it: Rig, cell: Cell) -> None:
    """A few completions under every name, enough that each replica gets some."""
    strike(cell, it.replicas)
    stop = asyncio.Event()
    names = [*it.names, "base"]
    jobs = [one(it, cell, name, stop) for name in names for _ in range(max(2, cell.size))]
    work = asyncio.gather(*jobs)
    await asyncio.sleep(0.3)
    if cell.fault == "hang":
        stop.set()
    if cell.fault == "refused":
        await heal(cell, it.replicas)
    await work
    await heal(cell, it.replicas)


async def one(it: Rig, cell: Cell, name: str, stop: asyncio.Event) -> None:
    prompt = it.new_prompt()
    stream = cell.action == "stream"
    answer = await it.complete(name, prompt, stream=stream, leave=stop)
    if answer.ok:
        if cell.fault == "garbage" and b"this is no answer" in answer.body:
            return
        if stream:
            assert_stream(it, answer, name, prompt)
        else:
            assert_weights(answer, name, {**it.names, "base": BASE}[name], prompt)
        return
    assert not answer.whole or answer.status in (500, 502, 503) or answer.status is None, answer
    if cell.fault in ELSEWHERE and cell.some_are_well:
        raise AssertionError(f"{name}: {answer.status} {answer.text} although another replica was well")
    if cell.fault == "refused" and cell.lasting:
        raise AssertionError(f"{name}: {answer.status} {answer.text} although the replicas came back in time")


def assert_stream(it: Rig, answer: Answer, name: str, prompt: list[int]) -> None:
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]", answer.text
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert tokens == expected_tokens({**it.names, "base": BASE}[name], prompt, 8), f"{name}: wrong weights"
    assert {chunk["model"] for chunk in chunks} == {name}


def test_all_cells_are_there() -> None:
    """96 pairs of call and fault; the places of 1, 2, 3 and 8 replicas are 1, 2, 3 and 3, and all of them."""
    every = [
        (action, fault, size, matrix.where(size, place))
        for action in ACTIONS
        for fault in FAULTS
        for size in SIZES
        for place in matrix.PLACES
    ]
    assert len(every) == 1536
    assert len(set(every)) == 96 * (1 + 3 + 4 + 4)

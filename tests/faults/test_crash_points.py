"""The proxy dies as by kill -9 at every step of every change, and starts again on the same state directory.

Within seconds the same names mean the same weights on all replicas, the change that was cut has happened everywhere or
nowhere, and no answer is ever wrong.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from proxy.simulator import BASE, SimFleet, expected_tokens
from tests.faults.asgi import Answer
from tests.faults.process import ROOT, ProxyProcess
from tests.faults.rig import CANARY, PROMPT, Library, weights_of
from trainer_client.digest import adapter_digest

FLAGS = ("--policy", "round_robin", "--probe-secs", "0.2", "--log-level", "info")


class Died(Exception):
    """The proxy reached its failpoint already while it put right what the death before had left."""


class Story:
    """One proxy, its replicas, and what its names may mean: one thing, or two while a change was cut."""

    def __init__(self, sims: SimFleet, root: Path) -> None:
        self.sims = sims
        self.proxy = ProxyProcess(sims.urls, root / "state", *FLAGS)
        self.library = Library(root)
        self.may: dict[str, set[str | None]] = {}
        self.paused: set[bool] = {False}
        self.asleep: set[bool] = {False}
        self._seed = 0

    def fresh(self) -> Path:
        """A directory with weights that nobody has seen."""
        self._seed += 1
        return self.library.path(self._seed)

    # -- changes: each may be the last that this process does ----------------------------------------------------------

    async def load(self, name: str) -> Answer | None:
        path = self.fresh()
        self.may.setdefault(name, {None}).add(weights_of(path))
        answer = await self.proxy.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        if answer is not None:
            self.may[name] = {weights_of(path)} if answer.ok else self.may[name] - {weights_of(path)}
        return answer

    async def unload(self, name: str) -> None:
        self.may[name].add(None)
        answer = await self.proxy.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if answer is not None and answer.ok:
            self.may[name] = {None}

    async def switch(self, target: str, state: set[bool], to: bool) -> None:
        state.add(to)
        answer = await self.proxy.ask("POST", target)
        if answer is not None and answer.ok:
            state.clear()
            state.add(to)

    # -- scenes --------------------------------------------------------------------------------------------------------

    async def first_load(self) -> None:
        await self.load(f"new-{self._seed}")

    async def second_load(self) -> None:
        await self.load("x")

    async def failing_load(self) -> None:
        self.sims.replicas[2].faults.add("500", "load", times=1)
        await self.load("refused")

    async def unload_idle(self) -> None:
        name = next((name for name, may in self.may.items() if name != "x" and None not in may), None)
        if name is None:
            name = f"new-{self._seed}"
            await self.load(name)
        await self.unload(name)

    async def pause(self) -> None:
        await self.switch("/pause?mode=keep", self.paused, True)

    async def resume(self) -> None:
        await self.pause()
        await self.switch("/resume", self.paused, False)

    async def sleep(self) -> None:
        await self.switch("/sleep?level=1", self.asleep, True)

    async def reset(self) -> None:
        await self.proxy.ask("POST", "/reset_prefix_cache")

    async def restart(self) -> None:
        await self.load("x")
        await self.sims.restart(1)

    async def nothing(self) -> None:
        pass

    # -- what must be true ---------------------------------------------------------------------------------------------

    async def converged(self) -> dict[str, str]:
        """Wait until all replicas serve and hold the same; what each name means then (client name -> upstream)."""
        loop = asyncio.get_running_loop()
        until = loop.time() + 40
        while True:
            answer = await self.ask("GET", "/fleet")
            view, rows = answer.json(), answer.json()["adapters"]
            upstream = {row["name"]: row["upstream"] for row in rows}
            real = [set(replica.replica.loras) for replica in self.sims.replicas]
            settled = all(row["state"] == "committed" for row in rows)
            if view["ready"] == view["total"] and settled and all(held == set(upstream.values()) for held in real):
                return upstream
            if loop.time() > until:
                raise AssertionError(f"{view['replicas']} {rows} {real} {self.proxy.log[-2000:]}")
            await asyncio.sleep(0.02)

    async def ask(self, method: str, target: str, body: object = None) -> Answer:
        answer = await self.proxy.ask(method, target, body)
        if answer is None:
            await self.proxy.dead()  # nothing else may break a connection
            raise Died
        return answer

    async def check(self) -> None:
        """After a start: everything in one mind, and in one that it may have."""
        upstream = await self.converged()
        paused = (await self.ask("GET", "/is_paused")).json()["is_paused"]
        asleep = (await self.ask("GET", "/is_sleeping")).json()["is_sleeping"]
        assert paused in self.paused
        assert asleep in self.asleep
        for replica in self.sims.replicas:
            assert (replica.replica.engine.paused is not None) == (paused or asleep)
        if asleep:
            await self.switch("/wake_up", self.asleep, False)
        if paused:
            await self.switch("/resume", self.paused, False)
        if not self.proxy.alive:
            raise Died
        self.paused, self.asleep = {False}, {False}
        for name, may in self.may.items():
            if name not in upstream:
                assert None in may, f"{name} is lost"
                self.may[name] = {None}
                continue
            held = {replica.weights(upstream[name]) for replica in self.sims.replicas} - {None}
            assert len(held) <= 1, f"{name}: {held}"
            answers = [await self.complete(name) for _ in range(6)]
            right = [weights for weights in may if weights and all(answer == tokens(weights) for answer in answers)]
            assert len(right) == 1, f"{name} answers with other weights than it may have"
            self.may[name] = {right[0]}
        for _ in range(3):
            assert await self.complete("base") == tokens(BASE)

    async def complete(self, name: str) -> list[int]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = await self.ask("POST", "/v1/completions", body)
        assert answer.ok, (name, answer)
        return list(answer.json()["choices"][0]["token_ids"])


def tokens(weights: str) -> list[int]:
    return expected_tokens(weights, PROMPT, 8)


Scene = Callable[[Story], Awaitable[None]]

EVERY_LOAD = (
    "after-files",
    "before-reserve",
    "after-reserve",
    "before-load",
    "after-load",
    "before-load#2",
    "before-load#3",
    "after-load#2",
    "after-load#3",
    "before-commit",
    "before-bind",
    "half-a-line",
    "half-a-line#2",
    "before-sync",
    "before-sync#2",
    "after-bind",
    "after-commit",
)
SWITCH = ("before-switch", "after-switch", "before-switch#2", "after-switch#2", "after-switch#3")

CHAINS: dict[str, list[tuple[str, Scene]]] = {
    "a name's first load": [
        *((point, Story.first_load) for point in EVERY_LOAD),
        ("before-snapshot", Story.nothing),
        ("after-snapshot", Story.nothing),
    ],
    "a name's second load": [
        *((point, Story.second_load) for point in EVERY_LOAD),
        ("before-retired", Story.second_load),
        ("after-retired", Story.second_load),
        ("before-restore", Story.restart),
        ("after-restore", Story.restart),
    ],
    "loads that fail, unloads": [
        *((point, Story.failing_load) for point in ("before-take-off", "after-take-off", "before-take-off#2")),
        *((point, Story.failing_load) for point in ("after-load", "after-load#3")),
        *((point, Story.unload_idle) for point in ("before-take-off", "after-take-off", "before-take-off#2")),
        *((point, Story.unload_idle) for point in ("after-take-off#3", "before-unbind", "after-unbind")),
        *((point, Story.reset) for point in ("after-collect", "after-collect#2", "before-next_epoch")),
        ("after-next_epoch", Story.reset),
    ],
    "pauses": [
        *((point, Story.pause) for point in (*SWITCH, "before-pause", "after-pause")),
        *((point, Story.resume) for point in ("before-switch#4", "after-switch#4", "after-switch#6")),
        *((point, Story.resume) for point in ("before-resume", "after-resume")),
        *((point, Story.sleep) for point in (*SWITCH, "before-sleep", "after-sleep")),
    ],
}


async def test_crash_points(tmp_path: Path) -> None:
    """Several stories side by side, for each is mostly starting a process."""
    await asyncio.gather(*(tell(steps, tmp_path / str(number)) for number, steps in enumerate(CHAINS.values())))


async def tell(steps: list[tuple[str, Scene]], root: Path) -> None:
    """One death after the other; what each one left is put right before the next."""
    async with SimFleet(3, api_key=CANARY, require_token_everywhere=True, max_loras=40) as sims:
        story = Story(sims, root)
        try:
            await story.proxy.start()
            await story.check()
            assert (await story.load("x")) is not None
            await story.proxy.kill()
            for point, scene in steps:
                await story.proxy.start(point)
                await die(story, point, scene)
                for replica in sims.replicas:
                    replica.faults.clear()
            await story.proxy.start()
            await story.check()
            assert CANARY not in story.proxy.log
            assert "Traceback" not in story.proxy.log
        finally:
            await story.proxy.close()


async def die(story: Story, point: str, scene: Scene) -> None:
    try:
        if scene is not Story.nothing:
            await story.check()
            await scene(story)
    except Died:
        pass
    try:
        assert await story.proxy.dead() == -9
    except TimeoutError:
        raise AssertionError(f"{point} is not reached in {scene}") from None


async def test_the_first_contact(tmp_path: Path) -> None:
    """Dies while it meets replicas that nobody knows; their caches are emptied again by the next one."""
    async with SimFleet(2, api_key=CANARY) as sims:
        proxy = ProxyProcess(sims.urls, tmp_path / "state", *FLAGS)
        try:
            for point in ("before-met", "after-met", "before-met", "before-snapshot"):
                await proxy.start(point)
                assert await proxy.dead() == -9
            await proxy.start()
            async with asyncio.timeout(40):
                while (await proxy.view())["ready"] < 2:
                    await asyncio.sleep(0.02)
        finally:
            await proxy.close()


MEMBERSHIP = {
    "join": ("POST", "/fleet/replicas"),
    "drain": ("POST", "/fleet/replicas/1/drain"),
    "undrain": ("POST", "/fleet/replicas/1/undrain"),
    "leave": ("DELETE", "/fleet/replicas/0"),
}


async def test_who_belongs_to_the_fleet(tmp_path: Path) -> None:
    """Dies before a word of the operator is written, or after: then it was never said, or it holds."""
    async with SimFleet(3, api_key=CANARY) as sims:
        proxy = ProxyProcess(sims.urls[:2], tmp_path / "state", *FLAGS)
        body: dict[str, object] = {"url": sims.urls[2]}
        wanted = {0: "ready", 1: "ready"}
        after = {"join": {2: "ready"}, "drain": {1: "draining"}, "undrain": {1: "ready"}, "leave": {0: None}}
        try:
            for edit, (method, target) in MEMBERSHIP.items():
                for point in ("before", "after") if edit == "join" else ("after",):
                    await proxy.start(f"{point}-{edit}")
                    await serving(proxy, wanted)
                    assert await proxy.ask(method, target, body if edit == "join" else None) is None
                    assert await proxy.dead() == -9
                    if point == "after":
                        wanted = {i: state for i, state in {**wanted, **after[edit]}.items() if state is not None}
            await proxy.start()
            await serving(proxy, wanted)
            assert wanted == {1: "ready", 2: "ready"}
        finally:
            await proxy.close()


async def serving(proxy: ProxyProcess, wanted: Mapping[int, str]) -> None:
    async with asyncio.timeout(40):
        while {row["index"]: row["state"] for row in (await proxy.view())["replicas"]} != wanted:
            await asyncio.sleep(0.02)


def test_no_step_is_left_out() -> None:
    """Every place in the control plane that a test can die at is died at above."""
    sources = "".join(path.read_text() for path in (ROOT / "proxy" / "control").glob("*.py"))
    literal = set(re.findall(r'reach\("([^"]+)"\)', sources))
    edits = set(re.findall(r'case "(\w+)":', (ROOT / "proxy" / "control" / "edits.py").read_text())) - {"snapshot"}
    every = literal | {f"{when}-{edit}" for when in ("before", "after") for edit in edits}
    used = {point.partition("#")[0] for chain in CHAINS.values() for point, _ in chain}
    used |= {"before-met", "after-met"}  # test_the_first_contact
    used |= {f"{when}-{edit}" for when in ("before", "after") for edit in MEMBERSHIP}  # before: one stands for all
    assert every == used, every ^ used


async def test_killed_at_any_moment_under_load(tmp_path: Path) -> None:
    """Publishes and completions go on; the proxy is killed at random moments. Clients see broken connections at most,
    and every answer is that of the weights whose digest it names."""
    chance = random.Random(11)
    async with SimFleet(2, api_key=CANARY, max_loras=12) as sims:
        story = Story(sims, tmp_path)
        proxy = story.proxy
        by_digest: dict[str, str] = {}
        answered, wrong, kills, stop = 0, [], 0, False
        published: list[str] = []

        async def publish() -> None:
            number = 0
            while not stop:
                await asyncio.sleep(0.05)
                number += 1
                path = story.fresh()
                by_digest[adapter_digest(path)] = weights_of(path)
                name = "live" if number % 2 else f"v-{number}"
                body = {"lora_name": name, "lora_path": str(path)}
                answer = await proxy.ask("POST", "/v1/load_lora_adapter", body)
                if answer is not None and answer.ok and name not in published:
                    published.append(name)
                while len(published) > 5:
                    await proxy.ask("POST", "/v1/unload_lora_adapter", {"lora_name": published.pop(1)})

        async def rollout(worker: int) -> None:
            nonlocal answered
            mine = random.Random(worker)
            while not stop:
                name = mine.choice(published) if published else "base"
                prompt = PROMPT if mine.random() < 0.5 else [mine.randrange(3, 9000) for _ in range(40)]
                body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
                answer = await proxy.ask("POST", "/v1/completions", body)
                if answer is None or not answer.ok:
                    assert answer is None or answer.status in (404, 502, 503), answer
                    await asyncio.sleep(0.02)
                    continue
                weights = by_digest[answer.headers["x-lorafleet-digest"]] if name != "base" else BASE
                if answer.json()["choices"][0]["token_ids"] != expected_tokens(weights, prompt, 8):
                    wrong.append(name)
                answered += 1

        try:
            await proxy.start()
            work = [asyncio.create_task(publish()), *(asyncio.create_task(rollout(n)) for n in range(6))]
            for _ in range(6):
                before = answered
                async with asyncio.timeout(40):
                    while answered < before + 20:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(chance.random() * 0.6)
                await proxy.kill()
                kills += 1
                await proxy.start()
            stop = True
            await asyncio.gather(*work)
            assert not wrong
            assert kills == 6
            await story.converged()
            assert CANARY not in proxy.log
            assert "Traceback" not in proxy.log
        finally:
            stop = True
            await proxy.close()

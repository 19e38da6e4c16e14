"""A whole proxy (`proxy.web.app.App`) over simulated replicas in one event loop, and the invariants asked of it.

The invariants are checked from outside, by requests and by what the replicas really hold:

- I1 completions under each name are exactly those of the committed weights, on every replica;
- I2 /v1/models and every ready replica agree;
- I3 nothing is in flight anywhere;
- I4 the pause state is the same everywhere;
- I5 no answer shows the token or a replica's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.config import Options, build
from proxy.replica_state import State
from proxy.simulator import BASE, SimFleet, SimReplica, expected_tokens, read_adapter, write_adapter
from proxy.web.app import App
from tests.faults.asgi import Answer, ask
from tests.web.front import serve

CANARY = "canary-9b1f04-token"
PROMPT = [7 + 3 * i for i in range(40)]
"""Asked under every name, again and again: two and a half cached blocks that no other weights may ever use."""

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter waits inside the control plane; imported by test modules."""
    monkeypatch.setattr("proxy.control.loading.TRUTH_SECS", 0.8)
    monkeypatch.setattr("proxy.control.asking.TRUTH_SECS", 0.8)
    monkeypatch.setattr("proxy.control.asking.READY_WAIT_SECS", 2.0)
    monkeypatch.setattr("proxy.control.runner.GONE_CHECK_SECS", 0.05)


class Library:
    """Tiny adapters on disk, by seed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, seed: int, name: str | None = None, **shape: Any) -> Path:
        """The directory of the adapter with this seed, under `name` if given; written once."""
        path = self.root / (name or f"seed-{seed}")
        if not path.exists():
            self.write(path, seed, **shape)
        return path

    def write(self, path: Path, seed: int, **shape: Any) -> Path:
        return write_adapter(path, seed, **{"rank": 2, "layers": 1, "hidden": 16, "kv_width": 8, **shape})


def weights_of(path: Path) -> str:
    """The simulator's name for the weights in a directory."""
    return read_adapter(str(path)).weights


class Rig:
    """One proxy and its replicas. `names` is what the test says is committed: client name -> weights; `weights_ever`
    is for tests that publish under names of their own and judge answers later."""

    def __init__(self, sims: SimFleet | Named, app: App, library: Library) -> None:
        self.sims = sims
        self.app = app
        self.parts = app.parts
        self.library = library
        self.names: dict[str, str] = {}
        self.weights_ever: dict[str, str] = {}
        self.paused = False
        self.said: list[Answer] = []
        self._random = random.Random(5)

    @property
    def replicas(self) -> list[SimReplica]:
        return self.sims.replicas

    # -- requests ------------------------------------------------------------------------------------------------------

    async def ask(self, method: str, target: str, body: Any = None, **more: Any) -> Answer:
        """Any request; the answer is remembered for I5."""
        answer = await ask(self.app, method, target, body, **more)
        if not target.startswith("/fleet"):
            self.said.append(answer)
        return answer

    async def load(self, name: str, path: Path | str, **more: Any) -> Answer:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": False, **more}
        return await self.ask("POST", "/v1/load_lora_adapter", body)

    async def must_load(self, name: str, path: Path) -> None:
        answer = await self.load(name, path)
        assert answer.ok, answer.text
        self.names[name] = weights_of(path)

    async def unload(self, name: str) -> Answer:
        return await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def must_unload(self, name: str) -> None:
        answer = await self.unload(name)
        assert answer.ok, answer.text
        del self.names[name]

    async def pause(self, query: str = "mode=keep") -> Answer:
        return await self.ask("POST", f"/pause?{query}")

    async def resume(self) -> Answer:
        return await self.ask("POST", "/resume")

    async def complete(self, model: str, prompt: list[int] | None = None, n: int = 8, **more: Any) -> Answer:
        body = {"model": model, "prompt": prompt or PROMPT, "max_tokens": n, "temperature": 0, "return_token_ids": True}
        leave = more.pop("leave", None)
        return await self.ask("POST", "/v1/completions", {**body, **more}, leave=leave)

    async def fleet(self) -> Any:
        return (await self.ask("GET", "/fleet")).json()

    async def listed(self) -> list[str]:
        """Adapter names in /v1/models; the base model, which must come first, is left out."""
        names = [card["id"] for card in (await self.ask("GET", "/v1/models")).json()["data"]]
        assert names[0] == "base"
        return names[1:]

    def new_prompt(self, length: int = 40) -> list[int]:
        return [self._random.randrange(3, 30_000) for _ in range(length)]

    @contextlib.asynccontextmanager
    async def port(self) -> AsyncIterator[int]:
        """The proxy on a free port, behind the server that it runs under, while the block lasts."""
        server, state = await serve(self.app)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for connection in list(state.connections):
                connection.transport.abort()
            for task in state.tasks:
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)

    # -- conditions ----------------------------------------------------------------------------------------------------

    def upstream(self, name: str) -> str:
        return self.parts.fleet.desired.adapters[name].upstream

    def converged(self) -> bool:
        """Everybody serves, nothing is under way or on its way out."""
        fleet = self.parts.fleet
        members = fleet.members()
        wanted = {a.upstream for a in fleet.desired.adapters.values()}
        return (
            all(replica.state is State.READY for replica in members)
            and not self.parts.plane.busy
            and not fleet.desired.retiring
            and all(set(self.sim(replica.endpoint.base).replica.loras) == wanted for replica in members)
        )

    def sim(self, url: str) -> SimReplica:
        return next(replica for replica in self.replicas if replica.url == url)

    def at_rest(self) -> bool:
        """I3."""
        fleet, forwarder = self.parts.fleet, self.parts.forwarder
        return (
            not any(replica.leases or +replica.running for replica in fleet.replicas)
            and not fleet.running
            and not len(forwarder.gate)
            and not forwarder.errands.running
            and fleet.router.counters()["in_flight"] == 0
            and not any(it.replica.engine.running or it.replica.engine.waiting for it in self.replicas)
        )

    async def until(self, condition: Callable[[], Any], what: str, secs: float = 40) -> None:
        try:
            async with asyncio.timeout(secs):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            fleet = self.parts.fleet
            rows = [(r.index, r.state.value, r.last_error, dict(r.holds)) for r in fleet.members()]
            real = [(sorted(it.replica.loras), it.replica.engine.paused, it.up) for it in self.replicas]
            raise AssertionError(f"never {what}: {rows} {fleet.desired} busy={self.parts.plane.busy} {real}") from None

    async def settle(self) -> None:
        """Wait until the fleet is what it should be, on all replicas."""
        await self.until(self.converged, "converged")

    # -- invariants ----------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """All five invariants, once the fleet has settled."""
        await self.settle()
        await self.until(self.at_rest, "at rest")
        assert sorted(await self.listed()) == sorted(self.names)
        for replica in self.replicas:
            paths = {name: Path(ref.path) for name, ref in replica.replica.loras.items()}
            assert {self.upstream(name) for name in self.names} == set(paths)
            assert not any(ref.load_inplace for ref in replica.replica.loras.values())
            assert (replica.replica.engine.paused is not None) == self.paused
        assert (await self.ask("GET", "/is_paused")).json() == {"is_paused": self.paused}
        if not self.paused:
            await self.check_answers()
        self.check_secrets()

    async def check_answers(self) -> None:
        """I1, on every replica (the policy of the rig is round robin)."""
        count = len(self.parts.fleet.members())
        for name, weights in (*self.names.items(), ("base", BASE)):
            prompts = [PROMPT] * count + [self.new_prompt()] * count
            answers = [await self.complete(name, prompt) for prompt in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.ok, f"{name}: {answer.status} {answer.text}"
                assert_weights(answer, name, weights, prompt)
            assert len({answer.headers["x-lorafleet-replica"] for answer in answers}) == count

    def check_secrets(self) -> None:
        """I5, over everything that was answered since the last check."""
        addresses = [url.removeprefix("http://").encode() for url in self.sims.urls]
        for answer in self.said:
            shown = answer.body + json.dumps(answer.headers).encode()
            assert CANARY.encode() not in shown, shown
            assert not any(address in shown for address in addresses), shown
        self.said.clear()


class Named:
    """A fleet of simulated replicas of which the command line names a part."""

    def __init__(self, sims: SimFleet, urls: Sequence[str]) -> None:
        self.replicas = sims.replicas
        self.urls = list(urls)


def assert_weights(answer: Answer, name: str, weights: str, prompt: list[int]) -> None:
    """The answer is the one that `weights` give, and says that it is `name`'s."""
    body = answer.json()
    tokens = body["choices"][0]["token_ids"]
    assert tokens == expected_tokens(weights, prompt, len(tokens)), f"{name}: wrong weights"
    assert body["model"] == name


@contextlib.asynccontextmanager
async def rig(
    count: int,
    root: Path,
    *,
    options: Mapping[str, Any] | None = None,
    control: Mapping[str, Any] | None = None,
    wait: bool = True,
    state: Path | None = None,
    sims: SimFleet | Named | None = None,
    **replica: Any,
) -> AsyncIterator[Rig]:
    """A running proxy. `options` are flags, `control` fields of ControlSettings, the rest ReplicaOptions; `sims` keeps
    replicas that run already. Not `wait`: replicas may not be ready yet."""
    common = {"max_loras": 5, "api_key": CANARY, "require_token_everywhere": True, **replica}
    async with contextlib.AsyncExitStack() as stack:
        fleet = sims if sims is not None else await stack.enter_async_context(SimFleet(count, **common))
        flags: dict[str, Any] = {
            "port": 0,
            "token_env": "CANARY",
            "policy": "round_robin",
            "probe_secs": 0.2,
            "load_deadline_secs": 1.5,
            "wait_ready_secs": 30.0,
            "state_dir": str(state or root / f"state-{next(_numbers)}"),
        }
        settings = build(fleet.urls, Options(**{**flags, **(options or {})}), environment={"CANARY": CANARY})
        times: dict[str, Any] = {"health_timeout_secs": 1.0, "admin_timeout_secs": 0.6, **(control or {})}
        app = App(replace(settings, control=replace(settings.control, **times)))
        await app.start()
        it = Rig(fleet, app, Library(root))
        try:
            if wait:
                await it.settle()
            yield it
        finally:
            await app.stop()

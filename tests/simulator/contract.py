"""What a client of vLLM 0.27.1 may rely on, as checks that run on the simulator and on the real thing.

Each check is a coroutine over a ``Server``; it makes up its own names and prompts, and leaves the server as it found
it. Token ids stay below 300, and nothing but what vLLM itself answers is looked at. ``CHECKS`` lists them all.

A server must run with: base model ``base``, LoRA and runtime updating on, dev endpoints on, prompt token details on,
block size 16, ``max_loras`` (= ``max_cpu_loras``) and ``max_lora_rank`` as the Server says, at least 2048 tokens of
context, and decode slowly enough that 1,500 tokens take half a second or more.
"""

import asyncio
import contextlib
import json
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Server:
    """``adapters``: directories of adapters with different weights, at least max_loras + 2 of them, of rank 8 or less;
    ``high_rank``: one whose rank is above max_lora_rank; ``scratch``: a directory that the server can read."""

    base_url: str
    adapters: Sequence[Path]
    high_rank: Path
    scratch: Path
    max_loras: int
    max_lora_rank: int
    headers: dict[str, str] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        async with httpx.AsyncClient(base_url=self.base_url, headers=self.headers, timeout=120) as http:
            client = Client(http)
            try:
                yield client
            finally:
                for name in client.loaded:
                    await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                await http.post("/resume")


@dataclass(slots=True)
class Answer:
    """One greedy completion: text, ids, log-probabilities, tokens that came from the cache."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    prompt_tokens: int
    raw: dict[str, Any]


class Client:
    """httpx plus the few calls that every check makes."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.loaded: list[str] = []

    async def load(self, name: str, path: Path, **more: Any) -> httpx.Response:
        answer = await self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})
        if answer.status_code == 200 and name not in self.loaded:
            self.loaded.append(name)
        return answer

    async def unload(self, name: str) -> httpx.Response:
        if name in self.loaded:
            self.loaded.remove(name)
        return await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def complete(self, model: str, prompt: list[int], max_tokens: int = 8, **more: Any) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, **more}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        raw = answer.json()
        choice, usage = raw["choices"][0], raw["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], cached, usage["prompt_tokens"], raw)

    async def running(self) -> float:
        """Requests that the engine runs or has queued."""
        text = (await self.http.get("/metrics")).text
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))

    async def until_running(self, count: int) -> None:
        while await self.running() != count:
            await asyncio.sleep(0.02)


def fresh_name() -> str:
    return f"check-{uuid.uuid4().hex[:12]}"


def fresh_prompt(length: int) -> list[int]:
    """Ids of no other check's prompt, so that nothing of it is cached."""
    rng = random.Random(uuid.uuid4().int)
    return [rng.randrange(10, 290) for _ in range(length)]


def same(a: Answer, b: Answer) -> bool:
    return a.ids == b.ids and all(abs(x - y) < 2e-3 for x, y in zip(a.logprobs, b.logprobs, strict=True))


def is_error(answer: httpx.Response, status: int, kind: str, text: str = "") -> None:
    assert answer.status_code == status, (answer.status_code, answer.text)
    problem = answer.json()["error"]
    assert set(problem) == {"message", "type", "param", "code"}, problem
    assert (problem["type"], problem["code"]) == (kind, status), problem
    assert text in problem["message"], problem


def events(text: str) -> list[Any]:
    """The data of a stream's events; ``[DONE]`` stays a string."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


# What the server tells


async def health_and_small_answers(server: Server) -> None:
    async with server.client() as client:
        health = await client.http.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert (await client.http.get("/ping")).status_code == 200
        assert set((await client.http.get("/version")).json()) == {"version"}
        assert (await client.http.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.http.get("/get_world_size")).json() == {"world_size": 1}
        nowhere = await client.http.get("/nowhere")
        assert (nowhere.status_code, nowhere.json()) == (404, {"detail": "Not Found"})
        wrong = await client.http.post("/health")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")


async def models_base_first(server: Server) -> None:
    name = fresh_name()
    async with server.client() as client:
        await client.load(name, server.adapters[0])
        answer = (await client.http.get("/v1/models")).json()
        assert answer["object"] == "list"
        base = answer["data"][0]
        assert (base["id"], base["object"], base["owned_by"], base["parent"]) == ("base", "model", "vllm", None)
        assert base["max_model_len"] >= 2048
        card = next(card for card in answer["data"] if card["id"] == name)
        assert (card["root"], card["parent"], card["max_model_len"]) == (str(server.adapters[0]), "base", None)
        assert isinstance(card["created"], int) and card["permission"][0]["object"] == "model_permission"


async def server_info(server: Server) -> None:
    async with server.client() as client:
        config = (await client.http.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
        assert config["cache_config"]["block_size"] == BLOCK
        blocks = config["cache_config"]["num_gpu_blocks"]
        assert config["cache_config"]["kv_cache_size_tokens"] == blocks * BLOCK
        assert config["lora_config"]["max_loras"] == server.max_loras
        assert config["lora_config"]["max_lora_rank"] == server.max_lora_rank
        assert config["parallel_config"]["data_parallel_size"] == 1
        assert config["model_config"]["max_model_len"] >= 2048
        assert isinstance((await client.http.get("/server_info")).json()["vllm_config"], str)


async def metrics(server: Server) -> None:
    async with server.client() as client:
        before = await _counters(client)
        prompt = fresh_prompt(40)
        await client.complete("base", prompt, 5)
        await client.complete("base", prompt, 5)
        after = await _counters(client)
        grown = {name: after[name] - before[name] for name in before}
        assert grown == {
            "vllm:prompt_tokens_total": 80,
            "vllm:generation_tokens_total": 10,
            "vllm:prefix_cache_queries_total": 80,
            "vllm:prefix_cache_hits_total": 32,
        }
        assert "vllm:lora_requests_info{" in (await client.http.get("/metrics")).text


async def _counters(client: Client) -> dict[str, float]:
    # vLLM logs its statistics a moment after the answer.
    await asyncio.sleep(0.1)
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
    wanted = {f"vllm:{name}_total": 0.0 for name in names}
    text = (await client.http.get("/metrics")).text
    assert "vllm:kv_cache_usage_perc{" in text
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in wanted and 'model_name="base"' in line:
            wanted[name] = float(line.rsplit(" ", 1)[1])
    return wanted


# Completions


async def completion_shape(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(20)
        raw = (await client.complete("base", prompt, 3)).raw
        assert raw["id"].startswith("cmpl-") and (raw["object"], raw["model"]) == ("text_completion", "base")
        assert (raw["service_tier"], raw["kv_transfer_params"]) == (None, None)
        choice = raw["choices"][0]
        assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
        assert choice["prompt_token_ids"] == prompt and len(choice["token_ids"]) == 3
        logprobs = choice["logprobs"]
        assert [len(logprobs[key]) for key in ("text_offset", "token_logprobs", "tokens", "top_logprobs")] == [3] * 4
        assert [len(top) for top in logprobs["top_logprobs"]] == [1, 1, 1]
        assert all(value < 0 for value in logprobs["token_logprobs"])
        usage = raw["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 3, 23)
        plain = await client.http.post("/v1/completions", json={"prompt": [11, 12], "max_tokens": 1})
        choice = plain.json()["choices"][0]
        assert (choice["logprobs"], choice["token_ids"], choice["prompt_token_ids"]) == (None, None, None)


async def greedy_is_repeatable(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(50)
        first, again = await client.complete("base", prompt), await client.complete("base", prompt)
        assert same(first, again)


async def seeds_decide(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(20)
        a, b, c = [await client.complete("base", prompt, 12, temperature=1, seed=seed) for seed in (1, 1, 2)]
        assert a.ids == b.ids != c.ids


async def prompt_forms(server: Server) -> None:
    async with server.client() as client:

        async def ask(prompt: Any, **more: Any) -> dict[str, Any]:
            body = {
                "model": "base",
                "prompt": prompt,
                "max_tokens": 2,
                "temperature": 0,
                "return_token_ids": True,
                **more,
            }
            answer = await client.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        one, two = fresh_prompt(5), fresh_prompt(6)
        both = await ask([one, two])
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        assert [choice["prompt_token_ids"] for choice in both["choices"]] == [one, two]
        assert (both["usage"]["prompt_tokens"], both["usage"]["completion_tokens"]) == (11, 4)
        assert len((await ask("what is"))["choices"]) == 1
        assert len((await ask(["what is", "the sum"]))["choices"]) == 2
        several = await ask([one, two], n=2, temperature=1, seed=5)
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in several["choices"]] == [one, one, two, two]
        assert several["usage"]["prompt_tokens"] == 11 and several["usage"]["completion_tokens"] == 8


async def batches(server: Server) -> None:
    """What dividing a batch and merging its parts rests on."""
    async with server.client() as client:
        one, two = fresh_prompt(48), fresh_prompt(48)
        body = {"model": "base", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

        async def ask(prompts: list[list[int]], **more: Any) -> httpx.Response:
            answer = await client.http.post("/v1/completions", json={**body, "prompt": prompts, **more})
            assert answer.status_code == 200, answer.text
            return answer

        await client.complete("base", one)
        for prompts, cached in (([two, one], 32), ([one, fresh_prompt(48)], 0)):  # told of the last prompt only
            assert (await ask(prompts)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached

        # The seed counts from the same number for every prompt, whatever the others are.
        drawn = (await ask([one, two, one], n=2, temperature=1, seed=5, max_tokens=12)).json()["choices"]
        ids = [choice["token_ids"] for choice in drawn]
        assert ids[0:2] == ids[4:6] and ids[0] != ids[1] and ids[0:2] != ids[2:4]
        alone = (await ask([two], n=2, temperature=1, seed=5, max_tokens=12)).json()["choices"]
        assert [choice["token_ids"] for choice in alone] == ids[2:4]

        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, done = events((await ask([one, two], stream=True, stream_options=options)).text)
        assert done == "[DONE]" and last["choices"] == [] and "usage" in last
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, last]}) == 1
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
        for index in (0, 1):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own[-1]["choices"][0]["finish_reason"] == "length"
            assert own[-1]["usage"] == {"prompt_tokens": 48, "total_tokens": 51, "completion_tokens": 3}
        usage = last["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (96, 6, 102)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


BAD_BODIES: tuple[tuple[str, dict[str, Any], str, str | None], ...] = (
    ("no prompt", {"prompt": None}, "BadRequestError", "prompt"),
    ("empty text", {"prompt": ""}, "BadRequestError", "prompt"),
    ("empty list", {"prompt": []}, "BadRequestError", None),
    ("not in vocabulary", {"prompt": [5, 999_999]}, "BadRequestError", None),
    ("object", {"prompt": {"a": 1}}, "Bad Request", "body.prompt"),
    ("text tokens", {"max_tokens": "x"}, "Bad Request", "body.max_tokens"),
    ("no tokens", {"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ("too many tokens", {"max_tokens": 10_000_000}, "BadRequestError", "max_tokens"),
    ("n of a greedy one", {"n": 2, "temperature": 0}, "BadRequestError", None),
    ("more answers than allowed", {"n": 10**9}, "BadRequestError", None),
    ("cold", {"temperature": -1}, "BadRequestError", "temperature"),
    ("options of no stream", {"stream_options": {"include_usage": True}}, "BadRequestError", "stream_options"),
    ("empty salt", {"cache_salt": ""}, "BadRequestError", "cache_salt"),
    ("many logprobs", {"logprobs": 100}, "BadRequestError", "logprobs"),
    ("negative logprobs", {"logprobs": -1}, "BadRequestError", "logprobs"),
)


async def bad_bodies(server: Server) -> None:
    async with server.client() as client:
        for what, wrong, kind, param in BAD_BODIES:
            body = {"model": "base", "prompt": [5, 6], "max_tokens": 2, **wrong}
            answer = await client.http.post("/v1/completions", json=body)
            is_error(answer, 400, kind)
            assert answer.json()["error"]["param"] == param, what
        json_type = {"content-type": "application/json"}
        is_error(await client.http.post("/v1/completions", content=b'{"bad', headers=json_type), 400, "Bad Request")
        answer = await client.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        is_error(answer, 400, "Bad Request", "Only 'application/json' is allowed")


async def unknown_model(server: Server) -> None:
    async with server.client() as client:
        name = fresh_name()
        answer = await client.http.post("/v1/completions", json={"model": name, "prompt": [5, 6]})
        is_error(answer, 404, "NotFoundError", f"The model `{name}` does not exist.")
        assert answer.json()["error"]["param"] == "model"


async def stream_shape(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(40)
        body = {
            "model": "base",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        answer = await client.http.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, done = events(answer.text)
        assert done == "[DONE]"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
        assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
        assert all(chunk["choices"][0]["prompt_token_ids"] is None for chunk in chunks[1:])
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert ids == (await client.complete("base", prompt, 4)).ids
        assert all("usage" not in chunk for chunk in chunks)
        answer = await client.http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
        *_, last, done = events(answer.text)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def other_apis(server: Server) -> None:
    async with server.client() as client:
        hello = [{"role": "user", "content": "hi"}]
        common = {"model": "base", "temperature": 0}
        chat = await client.http.post("/v1/chat/completions", json={**common, "messages": hello, "max_tokens": 3})
        assert chat.json()["object"] == "chat.completion"
        assert chat.json()["choices"][0]["message"]["role"] == "assistant"
        assert chat.json()["usage"]["completion_tokens"] == 3
        streamed = await client.http.post(
            "/v1/chat/completions", json={**common, "messages": hello, "max_tokens": 3, "stream": True}
        )
        first, *_, done = events(streamed.text)
        assert first["object"] == "chat.completion.chunk" and done == "[DONE]"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        nobody = await client.http.post("/v1/chat/completions", json={**common, "messages": []})
        is_error(nobody, 400, "BadRequestError")
        anthropic = await client.http.post("/v1/messages", json={**common, "messages": hello, "max_tokens": 3})
        assert (anthropic.json()["type"], anthropic.json()["stop_reason"]) == ("message", "max_tokens")
        answer = await client.http.post("/v1/responses", json={**common, "input": "hi", "max_output_tokens": 3})
        assert (answer.json()["object"], answer.json()["status"]) == ("response", "incomplete")
        generate = {"model": "base", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "temperature": 0}}
        raw = (await client.http.post("/inference/v1/generate", json=generate)).json()
        assert len(raw["choices"][0]["token_ids"]) == 3 and raw["usage"]["prompt_tokens"] == 3


async def tokenize_and_back(server: Server) -> None:
    async with server.client() as client:
        ids = (await client.http.post("/tokenize", json={"model": "base", "prompt": "what is"})).json()
        assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] >= 2048
        text = await client.http.post("/detokenize", json={"model": "base", "tokens": ids["tokens"]})
        assert text.json() == {"prompt": "what is"}


# Adapters


async def load_and_unload(server: Server) -> None:
    name, prompt = fresh_name(), fresh_prompt(30)
    async with server.client() as client:
        base = await client.complete("base", prompt)
        loaded = await client.load(name, server.adapters[0])
        assert (loaded.status_code, loaded.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        is_error(await client.load(name, server.adapters[0]), 400, "InvalidUserInput", "has already been loaded")
        answer = await client.complete(name, prompt)
        assert answer.raw["model"] == name and not same(answer, base)
        gone = await client.unload(name)
        assert (gone.status_code, gone.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
        is_error(await client.unload(name), 404, "NotFoundError", "cannot be found")
        is_error(
            await client.http.post("/v1/completions", json={"model": name, "prompt": prompt}), 404, "NotFoundError"
        )


async def loads_that_fail(server: Server) -> None:
    async with server.client() as client:
        name = fresh_name()
        missing = server.scratch / f"{name}-missing"
        is_error(await client.load(name, missing), 404, "NotFoundError", "No adapter found for")
        broken = server.scratch / f"{name}-broken"
        shutil.copytree(server.adapters[0], broken)
        tensors = broken / "adapter_model.safetensors"
        whole = tensors.read_bytes()
        tensors.write_bytes(whole[: len(whole) // 2])
        failed = "Error while deserializing header: incomplete metadata, file not fully covered"
        is_error(await client.load(name, broken), 500, "InternalServerError", failed)
        tensors.unlink()
        is_error(await client.load(name, broken), 500, "InternalServerError", "doesn't contain tensors")
        (broken / "adapter_config.json").write_text('{"r": 8')
        is_error(await client.load(name, broken), 500, "InternalServerError", "Expecting")
        too_high = "is greater than max_lora_rank"
        is_error(await client.load(name, server.high_rank), 500, "InternalServerError", too_high)
        is_error(await client.load("", server.adapters[0]), 400, "InvalidUserInput", "must be provided")
        answer = await client.http.post("/v1/load_lora_adapter", json={"lora_path": "/x"})
        is_error(answer, 400, "Bad Request")
        assert all(card["id"] != name for card in (await client.http.get("/v1/models")).json()["data"])


async def more_adapters_than_slots(server: Server) -> None:
    """Slots are evicted in silence; every listed name still answers with its own weights."""
    async with server.client() as client:
        prompt = fresh_prompt(30)
        count = server.max_loras + 2
        names = [fresh_name() for _ in range(count)]
        answers = []
        for name, path in zip(names, server.adapters, strict=False):
            assert (await client.load(name, path)).status_code == 200
            answers.append(await client.complete(name, prompt))
        listed = {card["id"] for card in (await client.http.get("/v1/models")).json()["data"]}
        assert listed >= set(names)
        for name, answer in zip(names, answers, strict=True):
            assert same(await client.complete(name, prompt), answer)
        assert not any(same(a, b) for i, a in enumerate(answers) for b in answers[:i])


# Prefix cache


async def repeated_prompt_is_cached(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(100)
        assert [(await client.complete("base", prompt)).cached for _ in range(2)] == [0, 96]
        whole = fresh_prompt(64)
        # The last token is always computed anew, hence the whole last block.
        assert [(await client.complete("base", whole)).cached for _ in range(2)] == [0, 48]
        assert (await client.complete("base", prompt[:40] + fresh_prompt(60))).cached == 32


async def generated_tokens_are_cached(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(32)
        answer = await client.complete("base", prompt, 33)
        # 32 + 33 tokens, of which the last was never fed back.
        follow_up = prompt + answer.ids + fresh_prompt(3)
        assert (await client.complete("base", follow_up)).cached == 64


async def names_and_salts_part_the_cache(server: Server) -> None:
    name = fresh_name()
    async with server.client() as client:
        await client.load(name, server.adapters[0])
        prompt = fresh_prompt(100)
        assert (await client.complete("base", prompt)).cached == 0
        assert (await client.complete(name, prompt)).cached == 0
        assert (await client.complete(name, prompt)).cached == 96
        assert (await client.complete("base", prompt, cache_salt="s")).cached == 0
        assert (await client.complete("base", prompt, cache_salt="s")).cached == 96
        assert (await client.complete("base", prompt, cache_salt="t")).cached == 0


async def a_name_used_again_is_stale(server: Server) -> None:
    """The fault that lorafleet exists to hide: other weights under an old name answer from the old weights' cache."""
    name, other = fresh_name(), fresh_name()
    async with server.client() as client:
        prompt = fresh_prompt(500)
        await client.load(name, server.adapters[0])
        await client.complete(name, prompt)
        await client.unload(name)
        await client.load(name, server.adapters[1])
        await client.load(other, server.adapters[1])
        stale, right = await client.complete(name, prompt), await client.complete(other, prompt)
        assert (stale.cached, right.cached) == (496, 0)
        assert not same(stale, right)
        assert (await client.http.post("/reset_prefix_cache")).json() == {"success": True}
        cured = await client.complete(name, prompt)
        assert cured.cached == 0 and same(cured, right)


@contextlib.asynccontextmanager
async def a_long_completion(client: Client, tokens: int = 1500) -> AsyncIterator["asyncio.Task[Answer]"]:
    """One that is certainly running inside the context; cancelled at its end when it still does."""
    prompt = fresh_prompt(100)
    task = asyncio.create_task(client.complete("base", prompt, tokens))
    try:
        await client.until_running(1)
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.http.post("/resume")
        await client.until_running(0)


async def reset_while_running(server: Server) -> None:
    async with server.client() as client, a_long_completion(client, 700) as running:
        prompt = fresh_prompt(100)
        await client.complete("base", prompt)
        answer = await client.http.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"success": False})
        assert (await client.complete("base", prompt)).cached == 96
        answer = await client.http.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        assert answer.json() == {"success": True}
        assert (await client.complete("base", prompt)).cached == 0
        assert len((await running).ids) == 700


# Pause


async def pause_empties_the_cache(server: Server) -> None:
    async with server.client() as client:
        prompt = fresh_prompt(300)
        await client.complete("base", prompt)
        assert (await client.complete("base", prompt)).cached == 288
        for params, left in (({"mode": "keep", "clear_cache": "false"}, 288), ({"mode": "keep"}, 0)):
            paused = await client.http.post("/pause", params=params)
            assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
            assert (await client.http.get("/is_paused")).json() == {"is_paused": True}
            assert (await client.http.post("/resume")).json() == {"status": "resumed"}
            assert (await client.http.get("/is_paused")).json() == {"is_paused": False}
            assert (await client.complete("base", prompt)).cached == left


async def pause_keep_freezes_and_queues(server: Server) -> None:
    name = fresh_name()
    async with server.client() as client, a_long_completion(client) as running:
        await client.http.post("/pause", params={"mode": "keep"})
        late = asyncio.create_task(client.complete("base", fresh_prompt(20)))
        await asyncio.sleep(0.3)
        assert not running.done() and not late.done()
        # A frozen engine reports nothing new: the late one is not among these.
        assert await client.running() == 1
        assert (await client.load(name, server.adapters[0])).status_code == 200
        await client.http.post("/resume")
        assert len((await late).ids) == 8
        assert len((await running).ids) == 1500


async def pause_abort_ends_what_runs(server: Server) -> None:
    async with server.client() as client, a_long_completion(client) as running:
        assert (await client.http.post("/pause", params={"mode": "abort"})).json() == {"status": "paused"}
        answer = await running
        assert answer.raw["choices"][0]["finish_reason"] == "abort" and len(answer.ids) < 1500


async def bad_pauses(server: Server) -> None:
    async with server.client() as client:
        is_error(await client.http.post("/pause", params={"mode": "bogus"}), 400, "Bad Request")
        is_error(await client.http.post("/pause", params={"mode": "keep", "clear_cache": "maybe"}), 400, "Bad Request")
        assert (await client.http.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.http.post("/resume")).json() == {"status": "resumed"}


async def abort_requests(server: Server) -> None:
    async with server.client() as client:
        assert (await client.http.post("/abort_requests", json={})).json() == {"status": "aborted", "aborted": 0}
        is_error(await client.http.post("/abort_requests"), 400, "Bad Request")
        async with a_long_completion(client) as running:
            await client.http.post("/abort_requests", json={})
            assert (await running).raw["choices"][0]["finish_reason"] == "abort"


# Clients that leave


async def a_client_that_leaves_aborts(server: Server) -> None:
    async with server.client() as client:
        async with a_long_completion(client):
            pass
        body = {"model": "base", "prompt": fresh_prompt(50), "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with client.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line:
                    break
        await asyncio.wait_for(client.until_running(0), 5)


CHECKS: tuple[Callable[[Server], Awaitable[None]], ...] = (
    health_and_small_answers,
    models_base_first,
    server_info,
    metrics,
    completion_shape,
    greedy_is_repeatable,
    seeds_decide,
    prompt_forms,
    batches,
    bad_bodies,
    unknown_model,
    stream_shape,
    other_apis,
    tokenize_and_back,
    load_and_unload,
    loads_that_fail,
    more_adapters_than_slots,
    repeated_prompt_is_cached,
    generated_tokens_are_cached,
    names_and_salts_part_the_cache,
    a_name_used_again_is_stale,
    reset_while_running,
    pause_empties_the_cache,
    pause_keep_freezes_and_queues,
    pause_abort_ends_what_runs,
    bad_pauses,
    abort_requests,
    a_client_that_leaves_aborts,
)

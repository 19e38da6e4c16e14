"""The choices of one HTTP request, in the engine: submit all, wait or follow, abort what is left."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from proxy.simulator.engine import EngineDead
from proxy.simulator.http import Request, error
from proxy.simulator.replica import ENGINE_DEAD, Replica
from proxy.simulator.sampling import Sampling
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef
from proxy.simulator.tokenizer import decode
from proxy.simulator.weights import output_state


def new_id() -> str:
    """16 hex digits, as vLLM's random ids."""
    return uuid.uuid4().hex[:16]


def request_id(request: Request, body: dict[str, Any]) -> str:
    """X-Request-Id, else ``request_id`` of the body, else a random one."""
    return request.headers.get("x-request-id") or str(body.get("request_id") or new_id())


def _natural_end(prompt: list[int], seed: int, natural: int, max_tokens: int | None) -> int:
    """After how many tokens the model would end by itself; endless unless asked for."""
    if natural:
        return natural // 2 + 1 + int.from_bytes(output_state("end", prompt, seed)[:4], "little") % natural
    return 64 if max_tokens is None else 1 << 62


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens start..end-1 of choice ``index``; ``finish_reason`` with the last."""

    index: int
    sequence: Sequence
    start: int
    end: int
    finish_reason: str | None

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens(self.start, self.end)

    @property
    def text(self) -> str:
        return decode(self.tokens)


class Generation:
    """All choices of all prompts, prompt by prompt; an async context whose end aborts what still runs."""

    def __init__(
        self,
        replica: Replica,
        lora: LoraRef | None,
        sampling: Sampling,
        prompts: list[list[int]],
        limits: list[int],
        name: str,
    ) -> None:
        """``limits``: tokens that each prompt may generate; ``name``: the request's external id.

        Raises HttpError 500 when the engine is dead.
        """
        self.replica = replica
        self.sampling = sampling
        self.prompts = prompts
        self.live = replica.live
        if self.live.death:
            raise error(500, ENGINE_DEAD, "InternalServerError")
        self.sequences: list[Sequence] = []
        self._requests: list[EngineRequest] = []
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            for choice in range(sampling.n):
                seed = sampling.choice_seed(choice)
                end = _natural_end(prompt, seed, replica.options.natural_tokens, sampling.max_tokens)
                request = EngineRequest(
                    id=f"{name}-{index}" + (f"_{choice}" if sampling.n > 1 else ""),
                    prompt=prompt,
                    max_tokens=min(limit, end),
                    lora=lora,
                    cache_salt=sampling.cache_salt,
                    seed=seed,
                    watch=sampling.stream,
                    end_reason="stop" if end <= limit else "length",
                )
                self._requests.append(request)

    async def __aenter__(self) -> "Generation":
        try:
            self.sequences = [self.live.submit(request) for request in self._requests]
        except EngineDead:
            raise error(500, ENGINE_DEAD, "InternalServerError") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sequence in self.sequences:
            self.live.leave(sequence)

    async def during(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """``chunks``, with the choices in the engine from the first to the last of them."""
        async with self, aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def finish(self) -> None:
        """Wait for all; HttpError 500 when the engine dies."""
        try:
            for sequence in self.sequences:
                while sequence.finish_reason is None:
                    await self.live.progress(sequence)
        except EngineDead:
            raise error(500, ENGINE_DEAD, "InternalServerError") from None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Token by token, as they come; EngineDead when they stop coming."""
        if len(self.sequences) == 1:
            async for delta in self._follow(0):
                yield delta
            return
        queue: asyncio.Queue[Delta | EngineDead | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for delta in self._follow(index):
                    queue.put_nowait(delta)
                queue.put_nowait(None)
            except EngineDead as death:
                queue.put_nowait(death)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self.sequences))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, EngineDead):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, index: int) -> AsyncGenerator[Delta, None]:
        sequence = self.sequences[index]
        sent = 0
        while True:
            await self.live.progress(sequence)
            end, reason = sequence.produced, sequence.finish_reason
            for position in range(sent, end):
                last = position + 1 == end
                yield Delta(index, sequence, position, position + 1, reason if last else None)
            if reason is not None:
                if sent == end:
                    yield Delta(index, sequence, end, end, reason)
                return
            sent = end

    # Usage

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.produced for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Of the last prompt, as vLLM reports it."""
        return self.sequences[-1].cached_tokens or 0

    @property
    def created_tokens(self) -> int:
        """Prompt tokens newly written to the prefix cache."""
        size = self.replica.options.block_size
        return max(0, len(self.prompts[-1]) // size * size - self.cached_tokens)

    def usage(self, created: bool = False, sparse: bool = False, cached: int | None = None) -> dict[str, Any]:
        """``created``: the chat APIs fill created_cache_tokens; ``sparse``: streams leave nulls out."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        if not self.replica.options.prompt_tokens_details:
            return usage if sparse else {**usage, "prompt_tokens_details": None}
        details: dict[str, Any] = {"cached_tokens": self.cached_tokens if cached is None else cached}
        if created:
            details["created_cache_tokens"] = self.created_tokens
        if not sparse:
            details.setdefault("created_cache_tokens", None)
            details["multimodal_tokens"] = None
        return {**usage, "prompt_tokens_details": details}

"""vLLM's admin calls over the transport, and what its answers mean. Observed on 0.27.1; see docs/vllm.md.

Nothing here raises for what a replica does: a broken connection is an Answer too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from proxy.control.answers import Answer, Observed, Outcome
from proxy.control.facts import Facts
from proxy.errors import Phase, UpstreamError
from proxy.upstream.discreet import MAX_SAID, discreet
from proxy.upstream.transport import Endpoint, Transport

JSON_HEADERS = ((b"content-type", b"application/json"), (b"accept", b"application/json"))

INCOMPLETE_SIGNS = (
    "deserializing header",
    "incompletemetadata",
    "metadataincomplete",
    "invalidheader",
    "headertoo",
    "not fully covered",
    "expecting value",
    "unterminated string",
    "jsondecodeerror",
    "no such file",
    "unexpected end",
    "doesn't contain tensors",
)
"""Signs, in a 500 on a load, of files that are still being copied: worth another try until the deadline."""

MAX_ANSWER = 32 << 20
"""Bytes of an admin answer that are read at most; a replica that sends more is not a vLLM server."""


class VllmCalls:
    """`proxy.control.answers.ReplicaCalls` over HTTP."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def load(self, endpoint: Endpoint, upstream: str, path: str, timeout_secs: float) -> Answer:
        """Offer weights under a name. `load_inplace` is never sent: it sticks to the name (vLLM #33791)."""
        body = msgspec.json.encode({"lora_name": upstream, "lora_path": path})
        answer = await self.post(endpoint, "/v1/load_lora_adapter", timeout_secs, body)
        if answer.outcome is not Outcome.REFUSED:
            return answer
        said = answer.message.lower()
        if answer.status == 404:
            if "no adapter found" in said:
                return _as(answer, Outcome.NOT_VISIBLE)
            hint = "; is VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 set there?"
            return Answer(Outcome.REFUSED, 404, answer.message + hint)
        if answer.status == 400 and "already been loaded" in said:
            return _as(answer, Outcome.EXISTS)
        if answer.status == 500 and any(sign in said for sign in INCOMPLETE_SIGNS):
            return _as(answer, Outcome.NOT_VISIBLE)
        return answer

    async def unload(self, endpoint: Endpoint, upstream: str, timeout_secs: float) -> Answer:
        body = msgspec.json.encode({"lora_name": upstream})
        answer = await self.post(endpoint, "/v1/unload_lora_adapter", timeout_secs, body)
        if answer.status == 404 and "cannot be found" in answer.message:
            return _as(answer, Outcome.UNKNOWN_NAME)
        return answer

    async def post(self, endpoint: Endpoint, target: str, timeout_secs: float | None, body: bytes = b"") -> Answer:
        """One control call. A 200 that vLLM did not write (a page of something in between) says nothing about what
        happened: NO_ANSWER."""
        answer = await self._call(endpoint, "POST", target, timeout_secs, body)
        if answer.ok and not _of_vllm(answer.body):
            return Answer(Outcome.NO_ANSWER, answer.status, "the answer is not one of vLLM's")
        return answer

    async def health(self, endpoint: Endpoint, timeout_secs: float) -> Answer:
        return await self.get(endpoint, "/health", timeout_secs)

    async def observe(self, endpoint: Endpoint, timeout_secs: float, *, sleep: bool = False) -> Observed | Answer:
        """What the replica lists and whether it is paused; the Answer that stopped the look otherwise.

        `sleep` also asks /is_sleeping.
        """
        models, paused, asleep = await asyncio.gather(
            self._call(endpoint, "GET", "/v1/models", timeout_secs),
            self._call(endpoint, "GET", "/is_paused", timeout_secs),
            self._call(endpoint, "GET", "/is_sleeping", timeout_secs) if sleep else _nothing(),
        )
        if not models.ok:
            return models
        for flag in (paused, asleep):
            if flag is not None and flag.outcome in (Outcome.UNREACHABLE, Outcome.NO_ANSWER):
                return flag
        cards = _cards(models.body)
        if cards is None:
            return Answer(Outcome.REFUSED, models.status, "/v1/models did not answer with a model list")
        base = [card for card in cards if card.parent is None]
        return Observed(
            adapters={card.id: card.root for card in cards if card.parent is not None},
            base_models=tuple(card.id for card in base),
            base_root=base[0].root if base else None,
            max_model_len=base[0].max_model_len if base else None,
            paused=_flag(paused, "is_paused"),
            asleep=_flag(asleep, "is_sleeping") if asleep is not None else None,
        )

    async def facts(self, endpoint: Endpoint, observed: Observed, timeout_secs: float) -> Facts:
        """What /server_info and /version say; a replica that says nothing leaves None in the fields."""
        info, version = await asyncio.gather(
            self._call(endpoint, "GET", "/server_info?config_format=json", timeout_secs),
            self._call(endpoint, "GET", "/version", timeout_secs),
        )
        config = _tree(info.body).get("vllm_config") if info.ok else None
        config = config if isinstance(config, dict) else {}
        cache, lora = _branch(config, "cache_config"), _branch(config, "lora_config")
        block_size, blocks = _int(cache.get("block_size")), _int(cache.get("num_gpu_blocks"))
        capacity = _int(cache.get("kv_cache_size_tokens"))
        if capacity is None and block_size is not None and blocks is not None:
            capacity = block_size * blocks
        said_version = _tree(version.body).get("version") if version.ok else None
        dtype = _branch(config, "model_config").get("dtype")
        return Facts(
            base_models=observed.base_models,
            base_root=observed.base_root,
            max_model_len=observed.max_model_len,
            version=said_version if isinstance(said_version, str) else None,
            block_size=block_size,
            kv_capacity_tokens=capacity,
            max_loras=_int(lora.get("max_loras")),
            max_lora_rank=_int(lora.get("max_lora_rank")),
            data_parallel_size=_int(_branch(config, "parallel_config").get("data_parallel_size")),
            dtype=dtype if isinstance(dtype, str) else None,
        )

    async def get(self, endpoint: Endpoint, target: str, timeout_secs: float) -> Answer:
        return await self._call(endpoint, "GET", target, timeout_secs)

    async def server_info(self, endpoint: Endpoint, query: str, timeout_secs: float) -> Answer:
        target = f"/server_info?{query}" if query else "/server_info"
        return await self._call(endpoint, "GET", target, timeout_secs)

    async def metrics(self, endpoint: Endpoint, timeout_secs: float) -> Answer:
        return await self._call(endpoint, "GET", "/metrics", timeout_secs)

    async def probe(self, endpoint: Endpoint, model: str, timeout_secs: float) -> tuple[float, ...] | Answer:
        """Log-probabilities of a short greedy completion under `model`: a fingerprint of the weights that answer."""
        body = msgspec.json.encode(
            {"model": model, "prompt": [5, 3, 8, 13, 21, 34, 55, 89], "max_tokens": 4, "temperature": 0, "logprobs": 0}
        )
        answer = await self.post(endpoint, "/v1/completions", timeout_secs, body)
        if not answer.ok:
            return answer
        try:
            choice = _tree(answer.body)["choices"][0]
            return tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
        except (KeyError, IndexError, TypeError, ValueError):
            return Answer(Outcome.REFUSED, answer.status, "the probe's answer holds no log-probabilities")

    async def _call(
        self, endpoint: Endpoint, method: str, target: str, timeout_secs: float | None, body: bytes = b""
    ) -> Answer:
        headers = JSON_HEADERS if body else JSON_HEADERS[1:]
        try:
            response = await self._transport.request(
                endpoint,
                method,
                target,
                headers=headers,
                body=body,
                timeout_secs=timeout_secs,
                fresh=method == "POST",
            )
            try:
                pieces, size = [], 0
                async with asyncio.timeout(timeout_secs):
                    async for piece in response.chunks():
                        pieces.append(piece)
                        size += len(piece)
                        if size > MAX_ANSWER:
                            return Answer(Outcome.REFUSED, response.status, "the answer is too large to be vLLM's")
            finally:
                response.abort()
        except UpstreamError as error:
            outcome = Outcome.UNREACHABLE if error.phase is Phase.NOT_SENT else Outcome.NO_ANSWER
            return Answer(outcome, None, error.message)
        except TimeoutError:
            return Answer(Outcome.NO_ANSWER, None, f"no whole answer within {timeout_secs} s")
        raw = b"".join(pieces)
        if 200 <= response.status < 300:
            return Answer(Outcome.OK, response.status, "", raw)
        return Answer(Outcome.REFUSED, response.status, discreet(_words(raw), endpoint), raw)


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def _cards(raw: bytes) -> list[_Card] | None:
    try:
        return msgspec.json.decode(raw, type=_Cards).data
    except (msgspec.DecodeError, RecursionError):
        return None


async def _nothing() -> None:
    return None


def _of_vllm(raw: bytes) -> bool:
    """Whether vLLM answers a control call like this: with nothing, JSON, or a sentence about an adapter."""
    if not raw or raw.startswith(b"Success: LoRA adapter"):
        return True
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _as(answer: Answer, outcome: Outcome) -> Answer:
    return Answer(outcome, answer.status, answer.message, answer.body)


def _tree(raw: bytes) -> dict[str, Any]:
    try:
        tree = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _branch(tree: dict[str, Any], name: str) -> dict[str, Any]:
    branch = tree.get(name)
    return branch if isinstance(branch, dict) else {}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(answer: Answer | None, name: str) -> bool | None:
    if answer is None or not answer.ok:
        return None
    value = _tree(answer.body).get(name)
    return value if isinstance(value, bool) else None


def _words(raw: bytes) -> str:
    """The sentence in an error body, whichever of vLLM's shapes it has."""
    tree = _tree(raw)
    error = tree.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    for said in (error, tree.get("detail"), tree.get("message")):
        if isinstance(said, str) and said:
            return said
    return raw[: 8 * MAX_SAID].decode("utf-8", "replace") or "no reason given"

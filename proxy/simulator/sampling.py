"""From a request body to engine requests: the checks that vLLM makes, in its order and words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.simulator.http import bad_request, error, invalid, typed
from proxy.simulator.options import ReplicaOptions
from proxy.simulator.replica import Replica
from proxy.simulator.slots import LoraRef
from proxy.simulator.tokenizer import encode

MAX_PROMPTS = 1024
MAX_N = 16384
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of a body that matter to the simulator; ``logprobs`` is how many alternatives, None for none."""

    max_tokens: int | None
    n: int
    seed: int | None
    greedy: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    as_token_ids: bool
    cache_salt: str | None
    min_tokens: int = 0

    def choice_seed(self, index: int) -> int:
        """Seed of choice ``index``: as vLLM counts up from the request's; 0 where none or greedy."""
        return 0 if self.greedy else (self.seed or 0) + index


def read_sampling(
    body: dict[str, Any], options: ReplicaOptions, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """Raises HttpError 400 for what vLLM refuses; ``max_tokens`` and ``logprobs`` are named differently by each API."""
    stream = bool(typed(body, "stream", bool, False))
    stream_options = typed(body, "stream_options", dict) or {}
    if stream_options and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if logprobs is not None and logprobs < 0:
        raise bad_request("`logprobs` must be a positive value.", "logprobs", logprobs)
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    n = typed(body, "n", int, 1)
    seed = typed(body, "seed", int)
    if seed is not None and not -_INT64 <= seed < _INT64:
        bound = "greater than or equal to" if seed < 0 else "less than or equal to"
        raise invalid([f"Input should be {bound} a 64 bit integer"], "body.seed")
    temperature = typed(body, "temperature", float, 1.0)
    top_p = typed(body, "top_p", float, 1.0)
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > MAX_N:
        raise bad_request(
            f"n must be at most {MAX_N}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment"
            " variable."
        )
    if temperature < 0:
        raise bad_request(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if not 0 < top_p <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if temperature < 1e-5 and n > 1:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
    if logprobs is not None and logprobs > options.max_logprobs:
        raise bad_request(
            f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {options.max_logprobs}",
            "logprobs",
            logprobs,
        )
    include_usage = bool(stream_options.get("include_usage"))
    return Sampling(
        max_tokens=max_tokens,
        n=n,
        seed=seed,
        greedy=temperature < 1e-5,
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(stream_options.get("continuous_usage_stats")),
        return_token_ids=bool(typed(body, "return_token_ids", bool, False)),
        as_token_ids=bool(typed(body, "return_tokens_as_token_ids", bool, False)),
        cache_salt=salt,
    )


def find_model(replica: Replica, model: Any) -> LoraRef | None:
    """The adapter of that name, None for the base model; HttpError 404 when it is neither.

    An adapter that took the base model's name is found first, as vLLM does.
    """
    if model is not None and not isinstance(model, str):
        raise invalid(
            [
                {
                    "type": "string_type",
                    "loc": ("body", "model"),
                    "msg": "Input should be a valid string",
                    "input": model,
                }
            ],
            "body.model",
        )
    if model in replica.loras:
        return replica.loras[model]
    if not model or model == replica.options.model_name:
        return None
    raise error(404, f"The model `{model}` does not exist.", "NotFoundError", "model")


def read_prompts(body: dict[str, Any]) -> list[str] | list[list[int]]:
    """The prompts of a completion body: text ones as text, token ones as ids (checked for sign, not vocabulary)."""
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if not prompt:
            return []
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise bad_request(
                f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MAX_PROMPTS}. To increase this"
                " limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
                "prompt",
            )
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and _is_ids(item) for item in prompt):
            return prompt
    kinds = ("list[constrained-int]", "list[list[constrained-int]]", "str", "list[str]")
    raise invalid([_prompt_error(kind, prompt) for kind in kinds], "body.prompt")


def _is_ids(items: Sequence[Any]) -> bool:
    # One pass at C speed for the usual case, since prompts reach 200,000 tokens.
    return set(map(type, items)) <= {int} and (not items or min(items) >= 0)


def _prompt_error(kind: str, value: Any) -> dict[str, Any]:
    what = "string" if kind == "str" else "list"
    text = f"Input should be a valid {what}"
    return {"type": f"{what}_type", "loc": ("body", "prompt", kind), "msg": text, "input": value}


def token_ids(prompt: str | list[int]) -> list[int]:
    return encode(prompt) if isinstance(prompt, str) else prompt


def check_prompt(prompt: list[int], max_tokens: int | None, options: ReplicaOptions, name: str = "max_tokens") -> int:
    """Length and vocabulary of one prompt; how many tokens may be generated."""
    context = options.context
    if max_tokens is not None and max_tokens > context:
        raise bad_request(
            f"{name}={max_tokens} cannot be greater than max_model_len=max_total_tokens={context}."
            " Please request fewer output tokens.",
            name,
            max_tokens,
        )
    if not prompt:
        raise bad_request("The decoder prompt cannot be empty")
    if len(prompt) + (max_tokens or 1) > context:
        total = len(prompt) + (max_tokens or 0)
        raise bad_request(
            f"This model's maximum context length is {context} tokens. However, you requested {max_tokens or 0} output"
            f" tokens and your prompt contains {len(prompt)} input tokens, for a total of {total} tokens. Please reduce"
            " the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            len(prompt),
        )
    if (largest := max(prompt)) >= options.vocab_size:
        raise bad_request(f"Token id {largest} is out of vocabulary")
    return max_tokens if max_tokens is not None else context - len(prompt)

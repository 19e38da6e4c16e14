"""What one simulated replica is like: the flags of ``vllm serve`` that matter here, and the speeds of its hardware."""

from dataclasses import dataclass
from math import inf

from proxy.simulator.engine import EngineConfig
from proxy.simulator.weights import BASE


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Defaults answer at once (infinite speed) and hold 65,536 tokens of KV.

    Speeds are tokens per second; see ``engine`` for what they do to a step. ``api_key`` guards what vLLM's --api-key
    guards (/v1, /v2, /inference, /cohere); with ``require_token_everywhere`` every path but /_sim needs it, as behind
    an authenticating gateway. ``dev_mode`` and ``runtime_lora`` stand for VLLM_SERVER_DEV_MODE and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING.
    """

    model_name: str = "base"
    model_root: str = "simulated/base"
    base_weights: str = BASE
    version: str = "0.27.1"
    api_key: str | None = None
    require_token_everywhere: bool = False
    dev_mode: bool = True
    runtime_lora: bool = True
    prompt_tokens_details: bool = True
    max_model_len: int = 32768
    vocab_size: int = 151936
    dtype: str = "torch.bfloat16"
    data_parallel_size: int = 1
    block_size: int = 16
    capacity_blocks: int = 4096
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    prefill_tps: float = inf
    decode_tps: float = inf
    decode_slowdown: float = 0.0
    speed: float = 1.0
    enable_lora: bool = True
    max_loras: int = 8
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    load_secs: float = 0.0
    """How long reading an adapter takes."""
    keep_alive_secs: float = 5.0
    """Idle connections are closed after this, as uvicorn does."""
    max_logprobs: int = 20
    natural_tokens: int = 0
    """A completion ends by itself (finish_reason ``stop``) after half to one and a half of this, by prompt and seed;
    0: only at max_tokens. Requests without max_tokens get 64 then."""

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            block_size=self.block_size,
            capacity_blocks=self.capacity_blocks,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            prefill_tps=self.prefill_tps,
            decode_tps=self.decode_tps,
            decode_slowdown=self.decode_slowdown,
            speed=self.speed,
            max_loras=self.max_loras,
            base_weights=self.base_weights,
        )

    @property
    def context(self) -> int:
        """Longest prompt plus output: max_model_len, or what fits the KV pool when that is less."""
        return min(self.max_model_len, self.capacity_blocks * self.block_size)

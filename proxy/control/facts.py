"""What a replica is, in its own words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica said of itself in /server_info, /version and /v1/models; None where it would not say.

    Token counts are per replica. `base_models` are the served names of the base model, the first one canonical.
    """

    base_models: tuple[str, ...]
    base_root: str | None
    max_model_len: int | None
    version: str | None = None
    block_size: int | None = None
    kv_capacity_tokens: int | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    data_parallel_size: int | None = None
    dtype: str | None = None

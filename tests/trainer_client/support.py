"""Small adapters for the tests, made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainer_client.safetensors_file import TensorBytes, encode

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "base_model_name_or_path": "tiny",
}


def a_name(module: str, half: str) -> str:
    return f"base_model.model.model.layers.0.self_attn.{module}.lora_{half}.weight"


def tensors(seed: int = 0, rank: int = 4, modules: tuple[str, ...] = ("q_proj", "v_proj")) -> dict[str, Any]:
    """float32 arrays: lora_A is (rank, 8), lora_B is (6, rank)."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for module in modules:
        found[a_name(module, "A")] = rng.standard_normal((rank, 8)).astype("f4")
        found[a_name(module, "B")] = rng.standard_normal((6, rank)).astype("f4")
    return found


def write_tensors(path: Path, values: dict[str, Any]) -> None:
    kinds = {"f4": "F32", "f2": "F16", "f8": "F64", "i8": "I64"}
    packed = {k: TensorBytes(kinds[v.dtype.str[1:]], v.shape, v.tobytes()) for k, v in values.items()}
    path.write_bytes(b"".join(bytes(piece) for piece in encode(packed)))


def write_adapter(directory: Path, seed: int = 0, values: dict[str, Any] | None = None, **config: Any) -> Path:
    """An adapter as PEFT would write it; `config` entries replace those of CONFIG."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    write_tensors(directory / "adapter_model.safetensors", tensors(seed) if values is None else values)
    return directory


def visible(root: Path) -> list[str]:
    """Names in the root that a replica could take for an adapter."""
    return sorted(p.name for p in root.iterdir() if not p.name.startswith("."))


def temporaries(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name.endswith(".tmp"))

"""Adapter directories: writing tiny valid PEFT ones, and reading any with the checks and messages of vLLM.

The reading side follows ``vllm/lora/worker_manager.py``, ``peft_helper.py`` and ``lora_model.py`` of 0.27.1: which
faults are "not found" (404) and which are "broken" (500), and in whose words. Needs neither numpy nor safetensors: the
format is eight bytes of length, a JSON header, then the tensors' bytes.
"""

import hashlib
import json
import os
import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.simulator.weights import BASE

_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
_MAX_HEADER = 100_000_000


class AdapterNotFound(Exception):
    """No adapter files at the path: vLLM answers 404."""


class AdapterBroken(Exception):
    """The files are there and cannot be used: vLLM answers 500 with this text."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What one read of a directory gave: ``weights`` names its bytes (BASE when every B is zero)."""

    weights: str
    rank: int


def read_adapter(path: str, max_rank: int = 1 << 30) -> Adapter:
    """Load the adapter in directory ``path`` as vLLM's worker does.

    Raises AdapterNotFound when adapter_config.json is missing, AdapterBroken for everything else that is wrong.
    """
    try:
        raw_config = Path(path, "adapter_config.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterNotFound(path) from error
    except OSError as error:
        raise AdapterBroken(str(error)) from error
    rank = _check_config(raw_config, max_rank)
    try:
        raw_tensors = Path(path, "adapter_model.safetensors").read_bytes()
    except FileNotFoundError as error:
        raise AdapterBroken(f"{path} doesn't contain tensors") from error
    tensors, data = parse_safetensors(raw_tensors)
    _check_modules(path, tensors)
    return Adapter(BASE if _all_b_zero(tensors, data) else weights_digest(raw_config, raw_tensors), rank)


def weights_digest(raw_config: bytes, raw_tensors: bytes) -> str:
    """Name of an adapter's weights: 32 hex digits over both files."""
    return hashlib.sha256(raw_config + b"\0" + raw_tensors).hexdigest()[:32]


def _check_config(raw: bytes, max_rank: int) -> int:
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise AdapterBroken(str(error)) from error
    missing = {key for key in ("r", "lora_alpha", "target_modules") if key not in config}
    if missing:
        raise AdapterBroken(f"Missing required configuration fields: {missing}")
    rank = config["r"]
    if not isinstance(rank, int) or rank <= 0:
        raise AdapterBroken(f"LoRA rank `r` must be a positive integer, got {rank}.")
    complaints = []
    if config.get("modules_to_save"):
        complaints.append("vLLM only supports modules_to_save being None.")
    if config.get("use_dora"):
        complaints.append("vLLM does not yet support DoRA.")
    if rank > max_rank:
        complaints.append(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        complaints.append("Adapter bias is not supported.")
    if complaints:
        raise AdapterBroken(" ".join(complaints))
    return rank


def parse_safetensors(raw: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header entries by tensor name, and the data they point into; AdapterBroken with the library's own words."""
    prefix = "Error while deserializing header: "
    if len(raw) < 8:
        raise AdapterBroken(prefix + "header too small")
    (length,) = struct.unpack_from("<Q", raw)
    if length > _MAX_HEADER:
        raise AdapterBroken(prefix + "header too large")
    if length > len(raw) - 8:
        raise AdapterBroken(prefix + "invalid header length")
    try:
        header = json.loads(raw[8 : 8 + length])
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise AdapterBroken(f"{prefix}invalid JSON in header: {error}") from error
    data = memoryview(raw)[8 + length :]
    if end != len(data):
        raise AdapterBroken(prefix + "incomplete metadata, file not fully covered")
    return tensors, data


def _check_modules(path: str, tensors: Iterable[str]) -> None:
    unexpected = []
    for key in tensors:
        parts = key.split(".")
        if len(parts) < 3 or parts[-1] != "weight" or parts[-2] not in ("lora_A", "lora_B"):
            raise AdapterBroken(f"{key} is unsupported LoRA weight")
        if parts[-3] not in _MODULES:
            unexpected.append(".".join(parts[2:-2]))
    if unexpected:
        raise AdapterBroken(
            f"While loading {path}, expected target modules in {set(_MODULES)} but received {unexpected}."
            " Please verify that the loaded LoRA module is correct"
        )


def _all_b_zero(tensors: dict[str, Any], data: memoryview) -> bool:
    spans = [entry["data_offsets"] for key, entry in tensors.items() if ".lora_B." in key]
    return bool(spans) and all(not data[start:end].tobytes().strip(b"\0") for start, end in spans)


def _floats(rng: random.Random, count: int) -> bytes:
    """``count`` little-endian F32 of magnitude 1/32 to 1/16 and random sign: masks over random bits, no loop."""
    size = 4 * count
    keep = int.from_bytes(b"\xff\xff\x7f\x80" * count, "little")
    exponent = int.from_bytes(b"\0\0\0\x3d" * count, "little")
    return (int.from_bytes(rng.randbytes(size), "little") & keep | exponent).to_bytes(size, "little")


def write_adapter(
    path: str | os.PathLike[str],
    seed: int,
    rank: int = 8,
    modules: Iterable[str] = ("q_proj", "v_proj"),
    *,
    layers: int = 4,
    hidden: int = 128,
    kv_width: int = 64,
    mlp_width: int = 256,
    zero_b: bool = False,
) -> Path:
    """Write a PEFT LoRA directory whose weights depend on ``seed`` alone, and return its path.

    The default shapes fit the tiny Qwen2 that the tests against a real vLLM use. ``path`` is created; files that are
    there are replaced by rename, as a careful trainer would.
    """
    widths = {"k_proj": kv_width, "v_proj": kv_width, "gate_proj": mlp_width, "up_proj": mlp_width}
    rng = random.Random(seed)
    modules = tuple(modules)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for layer in range(layers):
        for module in modules:
            block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            fan_in = mlp_width if module == "down_proj" else hidden
            for half, shape in (("lora_A", [rank, fan_in]), ("lora_B", [widths.get(module, hidden), rank])):
                count = shape[0] * shape[1]
                raw = bytes(4 * count) if zero_b and half == "lora_B" else _floats(rng, count)
                key = f"base_model.model.model.layers.{layer}.{block}.{module}.{half}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "model",
        "r": rank,
        "lora_alpha": 8 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": sorted(modules),
    }
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    _replace(root / "adapter_model.safetensors", struct.pack("<Q", len(head)) + head + bytes(data))
    _replace(root / "adapter_config.json", json.dumps(config, indent=2).encode())
    return root


def _replace(path: Path, raw: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)

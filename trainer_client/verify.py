"""Is this directory an adapter that vLLM will serve as PEFT trained it? Needs neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainer_client.digest import CONFIG_FILE, WEIGHT_FILES, weight_file
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.finite import FLOATS, first_not_finite, is_zero
from trainer_client.lora_config import LoraFacts, check_config, read_config
from trainer_client.safetensors_file import DTYPE_BYTES, TensorInfo, read_header

__all__ = ["AdapterFacts", "check_config", "verify_adapter"]

_PREFIX = "base_model.model."
_PIECE = 4 << 20  # a multiple of every item size
_WHY_UNKNOWN = (
    ("modules_to_save", "a fully trained module, which vLLM would ignore"),
    ("lora_magnitude_vector", "a DoRA magnitude, which vLLM does not serve"),
    ("lora_embedding_", "an embedding adapter, which vLLM does not serve as PEFT trains it"),
    (".bias", "a bias, which vLLM does not serve in an adapter"),
    ("base_layer", "a base model weight, which vLLM would ignore"),
    ("embed_tokens", "an embedding, which vLLM would ignore"),
    ("lm_head", "the output head, which vLLM would ignore"),
)


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an adapter is. `rank` is the largest of its modules, `tensors` a count, `bytes` the size of its weights.

    `all_b_zero` is true for an adapter that was never trained: it answers as the base model does.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str
    tensors: int
    bytes: int
    all_b_zero: bool
    base_model: str | None


def verify_adapter(directory: str | os.PathLike[str], *, max_rank: int | None = None) -> AdapterFacts:
    """Check configuration, pairs, shapes and every number of the adapter in `directory`.

    `max_rank` is the servers' --max-lora-rank, when known. Raises IncompleteAdapter when files are missing or shorter
    than they say (worth another try), AdapterError naming the key when it can never be served.
    """
    where = Path(directory)
    config = read_config(where)
    name = weight_file(where)
    if name != WEIGHT_FILES[0]:
        raise AdapterError(name, f"is a pickle and cannot be checked; save it as {WEIGHT_FILES[0]}")
    try:
        tensors = read_header(where / name)
    except FileNotFoundError:
        raise IncompleteAdapter(name, f"not in {where}") from None
    rank = _check_pairs(config, tensors)
    if max_rank is not None and rank > max_rank:
        key = "r" if config.rank == rank else "rank_pattern"
        raise AdapterError(key, f"is {rank}, but the servers' --max-lora-rank is {max_rank}")
    return AdapterFacts(
        rank=rank,
        alpha=config.alpha,
        target_modules=config.target_modules,
        tensors=len(tensors),
        bytes=sum(t.end - t.start for t in tensors),
        all_b_zero=_check_numbers(where / name, tensors),
        base_model=config.base_model,
    )


def _check_pairs(config: LoraFacts, tensors: Iterable[TensorInfo]) -> int:
    """Every lora_A has its lora_B, in shapes that agree with the configured rank. Returns the largest rank."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        module, half = _split(tensor.name)
        if tensor.dtype not in FLOATS:
            raise AdapterError(tensor.name, f"is of dtype {tensor.dtype}, not a float")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise AdapterError(
                tensor.name,
                f"has shape {list(tensor.shape)}: a sharded weight that was not gathered before it was saved?",
            )
        pairs.setdefault(module, {})[half] = tensor
    if not pairs:
        raise AdapterError(WEIGHT_FILES[0], "holds no LoRA tensors")
    return max(_check_pair(config, module, pair) for module, pair in pairs.items())


def _split(name: str) -> tuple[str, str]:
    """Module and half ("A" or "B") of a tensor's name, by the two forms that vLLM knows."""
    for half in ("A", "B"):
        end = f".lora_{half}.weight"
        if name.endswith(end) and len(name) > len(end):
            module = name.removesuffix(end)
            for word in ("embed_tokens", "lm_head"):
                if word in module.split("."):
                    raise AdapterError(name, f"adapts {word}, which vLLM does not serve as PEFT trains it")
            return module, half
    why = next((why for part, why in _WHY_UNKNOWN if part in name), "not of the form <module>.lora_A.weight")
    raise AdapterError(name, f"is {why}")


def _check_pair(config: LoraFacts, module: str, pair: dict[str, TensorInfo]) -> int:
    for half, other in (("A", "B"), ("B", "A")):
        if half not in pair:
            raise AdapterError(f"{module}.lora_{half}.weight", f"is missing beside its lora_{other}")
    plain = module.removeprefix(_PREFIX)
    rank = config.rank_of(plain)
    for half, axis in (("A", 0), ("B", 1)):
        tensor = pair[half]
        if tensor.shape[axis] != rank:
            raise AdapterError(
                tensor.name, f"has shape {list(tensor.shape)}, but {CONFIG_FILE} gives it rank {rank} (axis {axis})"
            )
    if not config.targets(plain):
        raise AdapterError("target_modules", f"does not cover {plain}, which has tensors")
    config.check_scaling(plain)
    return rank


def _check_numbers(path: Path, tensors: Iterable[TensorInfo]) -> bool:
    """Refuse anything not finite. Returns whether every lora_B is zero throughout."""
    all_b_zero = True
    with open(path, "rb", buffering=0) as handle:
        for tensor in tensors:
            is_b = tensor.name.endswith(".lora_B.weight")
            for offset, piece in _pieces(handle, tensor):
                bad = first_not_finite(tensor.dtype, piece)
                if bad is not None:
                    raise AdapterError(tensor.name, f"is not finite (item {offset + bad} in row-major order)")
                if is_b and all_b_zero:
                    all_b_zero = is_zero(tensor.dtype, piece)
    return all_b_zero


def _pieces(handle: BinaryIO, tensor: TensorInfo) -> Iterable[tuple[int, bytes]]:
    handle.seek(tensor.start)
    left, size = tensor.end - tensor.start, DTYPE_BYTES[tensor.dtype]
    done = 0
    while left:
        piece = _read_exactly(handle, min(left, _PIECE))
        if not piece:
            raise IncompleteAdapter(tensor.name, "its file became shorter while it was read")
        yield done // size, piece
        done += len(piece)
        left -= len(piece)


def _read_exactly(handle: BinaryIO, count: int) -> bytes:
    """`count` bytes, or nothing at the end of the file: raw reads may return fewer than asked."""
    parts: list[bytes] = []
    while count:
        part = handle.read(count)
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)

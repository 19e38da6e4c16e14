"""The three things a trainer can hand in (a PEFT model, tensors, a directory), each written as vLLM reads it.

torch and peft are touched only through the objects that the caller hands in.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trainer_client import disk, failpoint
from trainer_client.digest import CONFIG_FILE, WEIGHT_FILES
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.safetensors_file import TensorBytes, encode

_WRAPPERS = ("_orig_mod", "module")  # torch.compile; DDP and DeepSpeed
# Parts of a parameter's name that only say how its module was wrapped, wherever in the model that was.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_WITH_ADAPTER = re.compile(r"^(?P<head>.+\.lora_(?:A|B))\.(?P<adapter>[^.]+)\.(?P<tail>weight|bias)$")


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """An adapter in memory: tensors (torch or numpy) by their PEFT names, and its configuration."""

    tensors: Mapping[str, Any]
    config: Mapping[str, Any]


def take(source: Any, config: Any = None, adapter_name: str | None = None) -> Weights | Path:
    """Find out what `source` is. `config` (a dict or a PEFT LoraConfig) is required with tensors, refused otherwise.

    Raises TypeError for anything else, AdapterError when it cannot be read as one adapter.
    """
    if isinstance(source, str | os.PathLike):
        if config is not None:
            raise TypeError("a directory has its own adapter_config.json; leave config out")
        return _adapter_directory(Path(source), adapter_name)
    if isinstance(source, Weights):
        return source
    if isinstance(source, Mapping):
        if config is None:
            raise TypeError("tensors alone are no adapter: pass config, a dict or a LoraConfig")
        return Weights(_plain_names(source, adapter_name), _config_dict(config))
    if config is not None:
        raise TypeError("a PEFT model has its own configuration; leave config out")
    return gather(source, adapter_name)


def gather(model: Any, adapter_name: str | None = None) -> Weights:
    """The active adapter of a PEFT model, on the CPU. Under sharding (DTensor) every rank must call this.

    DDP and torch.compile wrappers are looked through. Under DeepSpeed ZeRO-3 gather the parameters around the call.
    """
    model = _unwrap(model)
    from peft import get_peft_model_state_dict

    name = adapter_name or _active(model)
    if name not in model.peft_config:
        raise AdapterError(name, f"is not an adapter of this model, which has {sorted(model.peft_config)}")
    config = dict(_config_dict(model.peft_config[name]))
    if not config.get("base_model_name_or_path"):
        base = getattr(getattr(model, "base_model", None), "model", None)
        config["base_model_name_or_path"] = getattr(base, "name_or_path", None) or None
    # "auto" would ask the Hub whether the vocabulary grew; embeddings cannot ride in a vLLM adapter anyway.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return Weights({_plain(key): _local(value) for key, value in tensors.items()}, config)


def write(source: Weights | Path, target: str) -> None:
    """Write configuration and tensors into the empty directory `target`, flushed. Raises OSError as the disk says."""
    if isinstance(source, Path):
        disk.copy_file(str(source / CONFIG_FILE), os.path.join(target, CONFIG_FILE))
        failpoint.reach("config")
        disk.copy_file(str(source / WEIGHT_FILES[0]), os.path.join(target, WEIGHT_FILES[0]))
    else:
        text = json.dumps(_jsonable(source.config), indent=2, sort_keys=True) + "\n"
        data = {name: tensor_bytes(name, tensor) for name, tensor in source.tensors.items()}
        disk.write_file(os.path.join(target, CONFIG_FILE), [text.encode()])
        failpoint.reach("config")
        disk.write_file(os.path.join(target, WEIGHT_FILES[0]), encode(data))
    failpoint.reach("weights")


def tensor_bytes(name: str, tensor: Any) -> TensorBytes:
    """The bytes of a torch tensor or a numpy array, row-major and little-endian, without a copy where possible."""
    dtype = getattr(tensor, "dtype", None)
    kind = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if hasattr(tensor, "detach"):
        tensor = _local(tensor)
        size = tensor.numel() * tensor.element_size()
        address = tensor.data_ptr()
        data = memoryview((ctypes.c_char * size).from_address(address)).cast("B") if size else memoryview(b"")
        return TensorBytes(_dtype(name, kind), tuple(tensor.shape), data, owner=tensor)
    if hasattr(tensor, "__array_interface__"):
        return TensorBytes(_dtype(name, kind), tuple(tensor.shape), _array_bytes(tensor))
    raise AdapterError(name, f"is a {type(tensor).__name__}, neither a torch tensor nor a numpy array")


def _array_bytes(array: Any) -> bytes:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    data: bytes = array.tobytes()  # row-major whatever the array's own layout
    return data


def _dtype(name: str, kind: str) -> str:
    if kind not in _DTYPES:
        raise AdapterError(name, f"dtype {kind} cannot be stored in an adapter")
    return _DTYPES[kind]


def _local(tensor: Any) -> Any:
    """Whole, on the CPU, contiguous, without a graph. Assembling a sharded tensor needs all ranks."""
    if not hasattr(tensor, "detach"):
        return tensor
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous()


def _unwrap(model: Any) -> Any:
    """The PEFT model inside. A compiled module lends its inner attributes, so only its own children are believed."""
    while True:
        children = getattr(model, "_modules", None) or {}
        inner = next((children[w] for w in _WRAPPERS if children.get(w) is not None), None)
        if inner is None and not hasattr(model, "peft_config"):
            inner = getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    if not hasattr(model, "peft_config"):
        raise TypeError(f"{type(model).__name__} is neither a PEFT model, nor a dict of tensors, nor a directory")
    return model


def _plain(name: str) -> str:
    """A tensor's name without what wrappers put into it."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPED)


def _active(model: Any) -> str:
    active = getattr(model, "active_adapters", None)
    names = list(active() if callable(active) else active or [])
    if len(names) != 1:
        raise AdapterError("active_adapters", f"are {names}; a version holds one, so pass adapter_name")
    return str(names[0])


def _plain_names(tensors: Mapping[str, Any], adapter_name: str | None) -> dict[str, Any]:
    """`...lora_A.default.weight`, as a model's own state dict has it, becomes `...lora_A.weight`.

    Such a dict also holds the base model's weights: they are left out, what else was trained is not.
    """
    matches = {name: _WITH_ADAPTER.match(name) for name in tensors}
    adapters = sorted({m["adapter"] for m in matches.values() if m})
    if not adapters:
        return {_plain(name): tensor for name, tensor in tensors.items()}
    if adapter_name is None and len(adapters) > 1:
        raise AdapterError("state dict", f"holds the adapters {adapters}; pass adapter_name")
    wanted = adapter_name or adapters[0]
    found: dict[str, Any] = {}
    for name, match in matches.items():
        if match is None:
            if "lora_" in name or "modules_to_save" in name:
                found[name] = tensors[name]
        elif match["adapter"] == wanted:
            found[_plain(f"{match['head']}.{match['tail']}")] = tensors[name]
    return found


def _config_dict(config: Any) -> dict[str, Any]:
    body = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    body.setdefault("peft_type", "LORA")
    body["inference_mode"] = True
    return body


def _jsonable(value: Any, key: str = CONFIG_FILE) -> Any:
    """Sets as sorted lists (so that equal configurations have equal bytes), enumerations as their values."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v, str(k)) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_jsonable(v, key) for v in value)
    if isinstance(value, list | tuple):
        return [_jsonable(v, key) for v in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise AdapterError(key, f"holds a {type(value).__name__}, which JSON cannot")


def _adapter_directory(path: Path, adapter_name: str | None) -> Path:
    """The directory itself, or the one below it that PEFT made for an adapter that is not called "default"."""
    if not path.is_dir():
        raise AdapterError(str(path), "is not a directory")
    if adapter_name is None and (path / CONFIG_FILE).is_file():
        where = path
    else:
        below = sorted(p.parent for p in path.glob(f"{adapter_name or '*'}/{CONFIG_FILE}"))
        if adapter_name is not None and not below and (path / CONFIG_FILE).is_file():
            below = [path]
        if len(below) != 1:
            found = [p.name for p in below]
            raise IncompleteAdapter(CONFIG_FILE, f"not in {path}" + (f"; below it are {found}" if found else ""))
        where = below[0]
    if not (where / WEIGHT_FILES[0]).is_file():
        pickled = [w for w in WEIGHT_FILES[1:] if (where / w).is_file()]
        if pickled:
            raise AdapterError(pickled[0], f"is a pickle and cannot be checked; save it as {WEIGHT_FILES[0]}")
        raise IncompleteAdapter(WEIGHT_FILES[0], f"not in {where}")
    return where

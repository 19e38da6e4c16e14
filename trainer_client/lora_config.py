"""What of a PEFT LoRA configuration vLLM serves, and what it would silently leave out.

vLLM 0.27.1 reads `r`, `lora_alpha`, `target_modules`, `bias`, `modules_to_save`, `use_rslora` and `use_dora` from
adapter_config.json and nothing else (vllm/lora/peft_helper.py). Whatever else changes the forward pass is therefore
refused here with its key: an adapter that loads and answers wrongly is worse than one that does not load.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_client.digest import CONFIG_FILE
from trainer_client.errors import AdapterError, IncompleteAdapter

# Keys that must be absent, null, false or empty, and why.
_REFUSED = {
    "use_dora": "vLLM does not serve DoRA; the magnitude vectors would be dropped",
    "modules_to_save": "fully trained modules have no place in a LoRA adapter; vLLM would serve the base model's",
    "trainable_token_indices": "trained embeddings have no place in a LoRA adapter; vLLM would serve the base model's",
    "target_parameters": "parameter LoRA on fused experts needs a server-side declaration that is not sent",
    "layer_replication": "vLLM does not replicate layers",
    "lora_bias": "vLLM does not serve a bias on lora_B",
    "use_qalora": "vLLM does not pool inputs as QALoRA does",
    "alora_invocation_tokens": "vLLM would apply the adapter to every token, not from the invocation on",
    "use_bdlora": "vLLM does not serve block-diagonal LoRA from this configuration",
    "arrow_config": "vLLM does not route between experts as Arrow does",
    "kasa_config": "vLLM does not serve KaSA's singular values",
    "monteclora_config": "vLLM does not sample weights as MonteCLoRA does",
}
# These initialisations change the base model's own weights, and the replicas serve the unchanged ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_UNSERVED_TARGETS = ("lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class LoraFacts:
    """The parts of adapter_config.json that decide what is served."""

    rank: int
    alpha: float
    rslora: bool
    target_modules: tuple[str, ...] | str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model: str | None

    def rank_of(self, module: str) -> int:
        """Rank of the module by its name, as PEFT picks it: the first pattern that matches the name's end."""
        return int(self.rank_pattern.get(_pattern_for(self.rank_pattern, module), self.rank))

    def check_scaling(self, module: str) -> None:
        """Raises AdapterError when PEFT scales this module otherwise than vLLM, which knows one factor for all."""
        alpha = float(self.alpha_pattern.get(_pattern_for(self.alpha_pattern, module), self.alpha))
        mine, all_ = _scaling(alpha, self.rank_of(module), self.rslora), _scaling(self.alpha, self.rank, self.rslora)
        if not math.isclose(mine, all_, rel_tol=1e-6):
            key = "alpha_pattern" if self.alpha_pattern else "rank_pattern"
            raise AdapterError(key, f"scales {module} by {mine:g}, but vLLM scales every module by {all_:g}")

    def targets(self, module: str) -> bool:
        """Whether target_modules covers the module. A pattern is not compared: file and model names may differ."""
        if isinstance(self.target_modules, str):
            return True
        return any(module == target or module.endswith(f".{target}") for target in self.target_modules)


def _pattern_for(patterns: Mapping[str, Any], module: str) -> str:
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), module)


def _scaling(alpha: float, rank: int, rslora: bool) -> float:
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def read_config(directory: Path) -> LoraFacts:
    """Raises IncompleteAdapter when the file is missing or cut short, AdapterError naming the key otherwise."""
    try:
        text = (directory / CONFIG_FILE).read_bytes()
    except FileNotFoundError:
        raise IncompleteAdapter(CONFIG_FILE, f"not in {directory}") from None
    try:
        body = json.loads(text)
    except ValueError:
        if not text.rstrip(b"\0 \n").endswith(b"}"):
            raise IncompleteAdapter(CONFIG_FILE, "ends before its JSON does") from None
        raise AdapterError(CONFIG_FILE, "is not JSON") from None
    if not isinstance(body, dict):
        raise AdapterError(CONFIG_FILE, "is not a JSON object")
    return check_config(body)


def check_config(body: Mapping[str, Any]) -> LoraFacts:
    """Refuse what vLLM cannot serve; see the table above. Raises AdapterError naming the key."""
    if str(body.get("peft_type")).upper() != "LORA":
        raise AdapterError("peft_type", f"is {body.get('peft_type')!r}; only LORA is served")
    for key, reason in _REFUSED.items():
        if body.get(key):
            raise AdapterError(key, f"is {_short(body[key])}: {reason}")
    if body.get("bias", "none") != "none":
        raise AdapterError("bias", f"is {body['bias']!r}: vLLM does not serve trained biases; train with bias='none'")
    start = body.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            "init_lora_weights",
            f"is {start!r}, which changes the base model's weights: serve that base and set this to true, or convert",
        )
    rank = _natural(body, "r")
    alpha = body.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError("lora_alpha", f"is {alpha!r}, not a number")
    base = body.get("base_model_name_or_path")
    return LoraFacts(
        rank=rank,
        alpha=float(alpha),
        rslora=bool(body.get("use_rslora")),
        target_modules=_targets(body.get("target_modules")),
        rank_pattern=_pattern_map(body, "rank_pattern"),
        alpha_pattern=_pattern_map(body, "alpha_pattern"),
        base_model=str(base) if base else None,
    )


def _natural(body: Mapping[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(key, f"is {value!r}, not a positive whole number")
    return value


def _targets(value: Any) -> tuple[str, ...] | str:
    if not value:
        raise AdapterError("target_modules", "is empty: no module would be adapted")
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
        raise AdapterError("target_modules", f"is {_short(value)}, neither a pattern nor a list of names")
    for name in names:
        if any(word in name for word in _UNSERVED_TARGETS):
            raise AdapterError("target_modules", f"names {name!r}: vLLM does not serve LoRA there as PEFT trains it")
    return value if isinstance(value, str) else tuple(sorted(value))


def _pattern_map(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(key, f"is {_short(value)}, not an object")
    for pattern, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            raise AdapterError(key, f"gives {pattern!r} the value {number!r}")
        if key == "rank_pattern" and not isinstance(number, int):
            raise AdapterError(key, f"gives {pattern!r} the rank {number!r}")
        try:
            re.compile(pattern)
        except re.error:
            raise AdapterError(key, f"{pattern!r} is not a pattern") from None
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

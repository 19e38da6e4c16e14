"""What the fleet's JSON says, read leniently: from lorafleet's own views or from a single vLLM server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_client.errors import ReplicaAnswer

_MAX_TEXT = 600  # characters of an answer that is no error object


@dataclass(frozen=True, slots=True)
class Limits:
    """Slots and rank that every replica offers; None where the server does not say."""

    max_loras: int | None
    max_lora_rank: int | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer: its message, what each replica said, and whether it was in the fleet's own error shape."""

    message: str
    replicas: tuple[ReplicaAnswer, ...]
    shaped: bool


def adapter_names(status: Mapping[str, Any]) -> frozenset[str]:
    """Every adapter name in GET /fleet: those of the desired state, and those any replica holds beside them."""
    names = set(_names(status.get("adapters")))
    for replica in _items(status.get("replicas")):
        names.update(_names(replica.get("adapters")))
        names.update(_names(replica.get("others")))
    return frozenset(names)


def model_names(models: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Adapter names in the data of GET /v1/models: the entries that have a parent (a base model has none)."""
    return frozenset(str(m["id"]) for m in models if m.get("parent") and "id" in m)


def limits(server_info: Mapping[str, Any]) -> Limits:
    """LoRA limits from GET /server_info?config_format=json."""
    lora = (server_info.get("vllm_config") or {}).get("lora_config") or {}
    return Limits(_number(lora.get("max_loras")), _number(lora.get("max_lora_rank")))


def refusal(status: int, text: str) -> Refusal:
    """The error shape `{"error": {"message", "type", "param", "code", "replicas"?}}`, or the text as it is."""
    try:
        body: Any = json.loads(text)
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return Refusal(one_line(str(error["message"])), _answers(error.get("replicas")), True)
    if isinstance(body, dict) and body.get("message"):
        return Refusal(one_line(str(body["message"])), (), True)
    return Refusal(one_line(text)[:_MAX_TEXT] or f"answered with status {status} and no text", (), False)


def one_line(text: str) -> str:
    """The text without line breaks or runs of blanks."""
    return " ".join(text.split())


def _answers(value: Any) -> tuple[ReplicaAnswer, ...]:
    found = []
    for place, item in enumerate(_items(value)):
        index = _number(item.get("index", item.get("replica")))
        text = item.get("message") or item.get("error") or item.get("detail") or ""
        found.append(
            ReplicaAnswer(
                place if index is None else index, _number(item.get("status")), one_line(str(text))[:_MAX_TEXT]
            )
        )
    return tuple(found)


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _names(value: Any) -> Iterable[str]:
    """Names in a list of names, a list of objects with a name, or an object keyed by name."""
    if isinstance(value, dict):
        return [str(key) for key in value]
    found = []
    for item in value if isinstance(value, list) else ():
        name = item.get("name") if isinstance(item, dict) else item
        if isinstance(name, str):
            found.append(name)
    return found


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

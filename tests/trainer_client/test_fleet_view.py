from __future__ import annotations

import json
from typing import Any

import pytest

from trainer_client.errors import ReplicaAnswer
from trainer_client.fleet_view import Limits, Refusal, adapter_names, limits, model_names, refusal


@pytest.mark.parametrize(
    ("status", "names"),
    [
        ({}, set()),
        ({"adapters": None, "replicas": "odd"}, set()),
        ({"adapters": [{"name": "a"}, {"nothing": 1}, 3]}, {"a"}),
        ({"adapters": ["a"], "replicas": [{"adapters": ["b"], "others": ["c"]}]}, {"a", "b", "c"}),
        ({"adapters": {"a": {}}, "replicas": [{"adapters": [{"name": "b"}]}]}, {"a", "b"}),
    ],
)
def test_every_name_that_anybody_knows(status: dict[str, Any], names: set[str]) -> None:
    assert adapter_names(status) == names


def test_base_models_are_no_adapters() -> None:
    assert model_names([{"id": "base", "parent": None}, {"id": "a", "parent": "base"}, {"parent": "x"}]) == {"a"}


def test_limits() -> None:
    assert limits({"vllm_config": {"lora_config": {"max_loras": 4, "max_lora_rank": 8}}}) == Limits(4, 8)
    assert limits({"vllm_config": {"lora_config": None}}) == limits({}) == Limits(None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            json.dumps(
                {"error": {"message": "no\nway", "replicas": [{"replica": 1, "status": 400, "message": "rank  16"}]}}
            ),
            Refusal("no way", (ReplicaAnswer(1, 400, "rank 16"),), True),
        ),
        (
            json.dumps({"error": {"message": "no", "replicas": [{"message": "x"}, {"index": 5, "error": "y"}]}}),
            Refusal("no", (ReplicaAnswer(0, None, "x"), ReplicaAnswer(5, None, "y")), True),
        ),
        (json.dumps({"object": "error", "message": "old shape"}), Refusal("old shape", (), True)),
        ("<html>\n bad gateway", Refusal("<html> bad gateway", (), False)),
        ("", Refusal("answered with status 502 and no text", (), False)),
        ("[1]", Refusal("[1]", (), False)),
    ],
)
def test_refusals(text: str, expected: Refusal) -> None:
    assert refusal(502, text) == expected

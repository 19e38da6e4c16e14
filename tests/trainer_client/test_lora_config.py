from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_client.support import CONFIG
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.lora_config import LoraFacts, check_config, read_config


def test_what_is_read() -> None:
    assert check_config(CONFIG) == LoraFacts(
        rank=4,
        alpha=8.0,
        rslora=False,
        target_modules=("q_proj", "v_proj"),
        rank_pattern={},
        alpha_pattern={},
        base_model="tiny",
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1, 2]),
        ("trainable_token_indices", {"embed_tokens": [1]}),
        ("target_parameters", ["experts.down_proj"]),
        ("layer_replication", [[0, 4]]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("alora_invocation_tokens", [5]),
        ("use_bdlora", {"x": 1}),
        ("arrow_config", {"top_k": 1}),
        ("kasa_config", {"beta": 1}),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "LoftQ"),
        ("r", 0),
        ("r", True),
        ("r", "8"),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("target_modules", []),
        ("target_modules", None),
        ("target_modules", [1]),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", "model.embed_tokens"),
        ("rank_pattern", [4]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 2.5}),
        ("alpha_pattern", {"(": 2}),
    ],
)
def test_what_vllm_would_get_wrong_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(AdapterError) as raised:
        check_config(CONFIG | {key: value})
    assert raised.value.key == key


@pytest.mark.parametrize(
    "more",
    [
        {"init_lora_weights": True},
        {"init_lora_weights": "gaussian"},
        {"target_modules": "all-linear"},
        {"modules_to_save": [], "use_dora": False, "rank_pattern": {}, "bias": "none"},
        {"lora_dropout": 0.1, "fan_in_fan_out": True, "task_type": "CAUSAL_LM", "something_new": {"a": 1}},
    ],
)
def test_what_does_not_change_what_is_served_is_not_refused(more: dict[str, Any]) -> None:
    check_config(CONFIG | more)


def test_patterns_match_the_end_of_a_name() -> None:
    facts = check_config(CONFIG | {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "v_.*": 8}})
    assert [facts.rank_of(m) for m in ("model.layers.1.self_attn.q_proj", "a.q_proj", "a.v_proj", "v_proj")] == [
        2,
        4,
        8,
        8,
    ]


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, None),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 16}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}}, None),
        ({"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"q_proj": 4}, "use_rslora": True}, None),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}, "use_rslora": True}, "alpha_pattern"),
    ],
)
def test_vllm_scales_every_module_alike(more: dict[str, Any], refused: str | None) -> None:
    facts = check_config(CONFIG | more)
    facts.check_scaling("a.v_proj")
    if refused is None:
        facts.check_scaling("a.q_proj")
    else:
        with pytest.raises(AdapterError, match="vLLM scales every module") as raised:
            facts.check_scaling("a.q_proj")
        assert raised.value.key == refused


def test_targets() -> None:
    facts = check_config(CONFIG)
    assert facts.targets("model.q_proj") and facts.targets("q_proj")
    assert not facts.targets("model.xq_proj") and not facts.targets("model.k_proj")
    assert check_config(CONFIG | {"target_modules": ".*_proj"}).targets("anything")


def test_the_file_missing_cut_short_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    with pytest.raises(IncompleteAdapter):
        read_config(tmp_path)
    text = json.dumps(CONFIG)
    for cut in (0, 1, 20, len(text) - 1):
        path.write_text(text[:cut])
        with pytest.raises(IncompleteAdapter):
            read_config(tmp_path)
    for broken in ("{not json}", "[]\n", '"{}"'):
        path.write_text(broken)
        with pytest.raises(AdapterError):
            read_config(tmp_path)
    path.write_text(text)
    assert read_config(tmp_path) == check_config(CONFIG)

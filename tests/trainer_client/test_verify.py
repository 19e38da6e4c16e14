from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer_client.support import a_name, tensors, write_adapter
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.verify import AdapterFacts, verify_adapter

A, B = a_name("q_proj", "A"), a_name("q_proj", "B")


def test_facts(tmp_path: Path) -> None:
    assert verify_adapter(write_adapter(tmp_path / "a")) == AdapterFacts(
        rank=4,
        alpha=8.0,
        target_modules=("q_proj", "v_proj"),
        tensors=4,
        bytes=2 * 4 * (4 * 8 + 6 * 4),
        all_b_zero=False,
        base_model="tiny",
    )


def changed(**replace: Any) -> dict[str, Any]:
    """The usual tensors with some replaced (A, B: those of q_proj), None: left out."""
    values = tensors()
    for name, value in replace.items():
        full = {"A": A, "B": B}.get(name, name)
        values.pop(full, None)
        if value is not None:
            values[full] = value
    return values


def spoiled(bad: float) -> Any:
    value = tensors()[B]
    value[3, 2] = bad
    return value


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({}, "adapter_model.safetensors", "no LoRA tensors"),
        (changed(B=None), B, "missing beside its lora_A"),
        (changed(A=None), A, "missing beside its lora_B"),
        (changed(A=np.zeros((8, 8), "f4")), A, "rank 4"),
        (changed(B=np.zeros((6, 5), "f4")), B, "rank 4"),
        (changed(A=np.zeros((0,), "f4")), A, "sharded"),
        (changed(A=np.zeros((4, 0), "f4")), A, "sharded"),
        (changed(A=np.zeros((4, 8), "i8")), A, "I64"),
        (changed(B=spoiled(np.nan)), B, r"not finite \(item 14 "),
        (changed(B=spoiled(np.inf)), B, "not finite"),
        (changed(**{"base_model.model.q_proj.lora_magnitude_vector": np.ones(6, "f4")}), None, "DoRA"),
        (changed(**{"base_model.model.q_proj.lora_B.bias": np.ones(6, "f4")}), None, "a bias"),
        (changed(**{"base_model.model.modules_to_save.head.weight": np.ones(6, "f4")}), None, "fully trained"),
        (changed(**{"base_model.model.embed_tokens.lora_embedding_A": np.ones(6, "f4")}), None, "embedding"),
        (changed(**{"base_model.model.embed_tokens.weight": np.ones(6, "f4")}), None, "embedding"),
        (changed(**{"base_model.model.lm_head.lora_A.weight": np.ones((4, 8), "f4")}), None, "lm_head"),
        (changed(**{"base_model.model.q_proj.base_layer.weight": np.ones(6, "f4")}), None, "base model weight"),
        (changed(**{"base_model.model.q_proj.lora_A.default.weight": np.ones(6, "f4")}), None, "not of the form"),
        (tensors(modules=("q_proj", "k_proj")), "target_modules", "k_proj"),
    ],
)
def test_tensors_that_cannot_be_served(tmp_path: Path, values: dict[str, Any], key: str | None, reason: str) -> None:
    with pytest.raises(AdapterError, match=reason) as raised:
        verify_adapter(write_adapter(tmp_path / "a", values=values))
    assert not isinstance(raised.value, IncompleteAdapter)
    assert raised.value.key == key or (key is None and raised.value.key in values)


def test_configuration_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="use_dora"):
        verify_adapter(write_adapter(tmp_path / "a", use_dora=True))
    with pytest.raises(AdapterError, match="rank_pattern"):
        verify_adapter(write_adapter(tmp_path / "b", values=tensors(rank=2), rank_pattern={"_proj$|.*_proj": 2}))


def test_rank_against_the_servers_limit(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    assert verify_adapter(directory, max_rank=4).rank == 4
    with pytest.raises(AdapterError, match="--max-lora-rank is 2") as raised:
        verify_adapter(directory, max_rank=2)
    assert raised.value.key == "r"
    mixed = tensors(rank=4, modules=("q_proj",)) | tensors(rank=8, modules=("v_proj",))
    patterns = {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"v_proj": 16}}
    directory = write_adapter(tmp_path / "b", values=mixed, **patterns)
    assert verify_adapter(directory).rank == 8
    with pytest.raises(AdapterError) as raised:
        verify_adapter(directory, max_rank=4)
    assert raised.value.key == "rank_pattern"


def test_never_trained_is_told(tmp_path: Path) -> None:
    values = {k: np.zeros_like(v) if ".lora_B." in k else v for k, v in tensors().items()}
    assert verify_adapter(write_adapter(tmp_path / "a", values=values)).all_b_zero
    values[B][5, 3] = 1e-30
    assert not verify_adapter(write_adapter(tmp_path / "b", values=values)).all_b_zero


def test_pieces_of_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.verify._PIECE", 16)
    verify_adapter(write_adapter(tmp_path / "a"))
    with pytest.raises(AdapterError, match="item 14 "):
        verify_adapter(write_adapter(tmp_path / "b", values=changed(B=spoiled(np.nan))))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_or_truncated_is_worth_another_try(tmp_path: Path, missing: str) -> None:
    directory = write_adapter(tmp_path / "a")
    path = directory / missing
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(IncompleteAdapter):
        verify_adapter(directory)
    path.unlink()
    with pytest.raises(IncompleteAdapter):
        verify_adapter(directory)


def test_pickles_are_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        verify_adapter(directory)


def test_needs_only_the_standard_library(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    code = (
        "import sys; from trainer_client.verify import verify_adapter;"
        "from trainer_client.digest import adapter_digest; import trainer_client.manifest;"
        f"verify_adapter({str(directory)!r}); adapter_digest({str(directory)!r});"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'numpy','torch','httpx','safetensors','peft','rich'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer_client.support import CONFIG, a_name, tensors, write_adapter
from trainer_client.errors import AdapterError, IncompleteAdapter
from trainer_client.sources import Weights, take, tensor_bytes, write
from trainer_client.verify import verify_adapter


def test_tensors_need_a_configuration_and_nothing_else_takes_one(tmp_path: Path) -> None:
    taken = take(tensors(), CONFIG)
    assert take(taken) is taken
    with pytest.raises(TypeError, match="pass config"):
        take(tensors())
    with pytest.raises(TypeError, match="leave config out"):
        take(write_adapter(tmp_path / "a"), CONFIG)
    with pytest.raises(TypeError, match="leave config out"):
        take(object(), CONFIG)
    with pytest.raises(TypeError, match="int is neither"):
        take(3)


def test_written_tensors_verify(tmp_path: Path) -> None:
    values = tensors()
    write(take(values, {k: v for k, v in CONFIG.items() if k != "peft_type"}), str(tmp_path))
    assert verify_adapter(tmp_path).tensors == 4
    read = load_file(tmp_path / "adapter_model.safetensors")
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["inference_mode"] is True


class Kind(enum.Enum):
    LORA = "LORA"


class LikeLoraConfig:
    def to_dict(self) -> dict[str, Any]:
        return CONFIG | {"target_modules": {"v_proj", "q_proj"}, "peft_type": Kind.LORA, "nested": {"a": {3, 1}}}


def test_equal_configurations_have_equal_bytes(tmp_path: Path) -> None:
    write(take(tensors(), LikeLoraConfig()), str(tmp_path))
    body = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (body["target_modules"], body["peft_type"], body["nested"]) == (["q_proj", "v_proj"], "LORA", {"a": [1, 3]})
    with pytest.raises(AdapterError, match="odd"):
        write(take(tensors(), CONFIG | {"odd": object()}), str(tmp_path / "x"))


def test_layouts_of_arrays() -> None:
    plain = np.arange(6, dtype="<f4").reshape(2, 3)
    for odd in (plain.astype(">f4"), np.asfortranarray(plain), plain[::-1][::-1]):
        packed = tensor_bytes("x", odd)
        assert (packed.dtype, packed.shape, bytes(packed.data)) == ("F32", (2, 3), plain.tobytes())
    with pytest.raises(AdapterError, match="complex64"):
        tensor_bytes("x", np.zeros(2, "c8"))
    with pytest.raises(AdapterError, match="list"):
        tensor_bytes("x", [1.0])


def named(adapter: str, prefix: str = "", seed: int = 0) -> dict[str, Any]:
    return {prefix + k.replace(".weight", f".{adapter}.weight"): v for k, v in tensors(seed).items()}


def test_a_models_own_state_dict(tmp_path: Path) -> None:
    own = named("default", "module._orig_mod.") | {
        "module.base_model.model.q_proj.base_layer.weight": np.zeros(3, "f4")
    }
    taken = take(own, CONFIG)
    assert isinstance(taken, Weights)
    assert sorted(taken.tensors) == sorted(tensors())


def test_several_adapters_need_a_choice() -> None:
    both = named("one", seed=1) | named("two", seed=2)
    with pytest.raises(AdapterError, match=r"\['one', 'two'\]"):
        take(both, CONFIG)
    taken = take(both, CONFIG, adapter_name="two")
    assert isinstance(taken, Weights)
    np.testing.assert_array_equal(taken.tensors[a_name("q_proj", "A")], tensors(2)[a_name("q_proj", "A")])


def test_what_else_was_trained_is_kept_to_be_refused() -> None:
    extra = {"base_model.model.head.modules_to_save.default.weight": np.zeros(3, "f4")}
    taken = take(named("default") | extra, CONFIG)
    assert isinstance(taken, Weights)
    assert set(extra) < set(taken.tensors)


def test_a_directory_is_copied_not_linked(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a")
    (source / "optimizer.pt").write_bytes(b"large")
    (tmp_path / "t").mkdir()
    write(take(source), str(tmp_path / "t"))
    copied = {p.name: p.stat().st_ino for p in (tmp_path / "t").iterdir()}
    assert sorted(copied) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not set(copied.values()) & {p.stat().st_ino for p in source.iterdir()}


def test_peft_nests_adapters_that_are_not_called_default(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "a" / "policy")
    assert take(str(tmp_path / "a")) == one
    write_adapter(tmp_path / "a" / "other")
    with pytest.raises(IncompleteAdapter, match=r"\['other', 'policy'\]"):
        take(tmp_path / "a")
    assert take(tmp_path / "a", adapter_name="policy") == one
    assert take(one, adapter_name="policy") == one


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="not a directory"):
        take(tmp_path / "nothing")
    source = write_adapter(tmp_path / "a")
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        take(source)
    (source / "adapter_model.bin").unlink()
    with pytest.raises(IncompleteAdapter):
        take(source)

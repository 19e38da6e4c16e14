import json
import math
import struct
from pathlib import Path

import pytest
from safetensors import safe_open

from proxy.simulator.adapters import AdapterBroken, AdapterNotFound, read_adapter, write_adapter
from proxy.simulator.weights import BASE


def test_what_is_written_is_a_peft_adapter(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 1, rank=4, modules=("q_proj", "down_proj"), layers=2)
    with safe_open(path / "adapter_model.safetensors", framework="np") as file:
        shapes = {key: tuple(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
        values = [float(v) for key in shapes for v in file.get_tensor(key).ravel()]
    assert len(shapes) == 8
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, 128)
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == (4, 256)
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] == (128, 4)
    assert all(1 / 32 <= abs(value) < 1 / 16 for value in values)
    assert 0.4 < sum(value > 0 for value in values) / len(values) < 0.6
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 4, ["down_proj", "q_proj"])


def test_weights_follow_the_bytes(tmp_path: Path) -> None:
    one, again, two = (write_adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert read_adapter(str(one)) == read_adapter(str(again)) != read_adapter(str(two))
    config = one / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 64', '"lora_alpha": 32'))
    assert read_adapter(str(one)).weights != read_adapter(str(again)).weights


def test_all_zero_b_is_the_base_model(tmp_path: Path) -> None:
    assert read_adapter(str(write_adapter(tmp_path / "a", 1, zero_b=True))).weights == BASE


def test_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in ("nowhere", "empty", "file"):
        with pytest.raises(AdapterNotFound):
            read_adapter(str(tmp_path / path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 32}, "LoRA rank 32 is greater than max_lora_rank 16."),
        ({"r": 0}, "must be a positive integer"),
        ({"use_dora": True}, "vLLM does not yet support DoRA."),
        ({"modules_to_save": ["lm_head"]}, "vLLM only supports modules_to_save being None."),
        ({"bias": "all"}, "Adapter bias is not supported."),
        ({"lora_alpha": None}, "Missing required configuration fields: {'lora_alpha'}"),
    ],
)
def test_broken_configs(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_adapter(tmp_path / "a", 1) / "adapter_config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if change.get(key, 1) is not None}))
    with pytest.raises(AdapterBroken, match=message.replace("{", r"\{").replace(".", r"\.")):
        read_adapter(str(path.parent), max_rank=16)


@pytest.mark.parametrize("size", [0, 5, 20, 1000, -4])
def test_half_written_tensors_fail_in_the_librarys_words(tmp_path: Path, size: int) -> None:
    path = write_adapter(tmp_path / "a", 1) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(AdapterBroken) as ours:
        read_adapter(str(path.parent))
    with pytest.raises(Exception) as theirs:
        safe_open(path, framework="np")
    assert str(ours.value) == str(theirs.value)


def test_other_broken_tensors(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 1) / "adapter_model.safetensors"
    for raw, message in (
        (struct.pack("<Q", 10**12) + b"{}", "header too large"),
        (struct.pack("<Q", 5) + b"{abcd", "invalid JSON in header"),
        (path.read_bytes() + b"xx", "incomplete metadata, file not fully covered"),
        (_file("base_model.model.x.q_proj.magnitude"), "unsupported LoRA weight"),
        (_file("base_model.model.x.router.lora_A.weight"), "expected target modules"),
    ):
        path.write_bytes(raw)
        with pytest.raises(AdapterBroken, match=message):
            read_adapter(str(path.parent))
    path.unlink()
    with pytest.raises(AdapterBroken, match="doesn't contain tensors"):
        read_adapter(str(path.parent))


def _file(key: str) -> bytes:
    head = json.dumps({key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(head)) + head + struct.pack("<f", math.pi)

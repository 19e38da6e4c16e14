"""The publisher against real torch, PEFT, transformers and TRL. For an environment that has them:

    PYTHONPATH=<checkout> python -m tests.trainer_client.real_peft [CHECK ...]

Each `check_*` function takes an empty directory and raises AssertionError. Needs no network and no GPU; everything is
made of a random Qwen2 of a few thousand weights. With a fleet's address in LORAFLEET_URL, `check_model` publishes to it
too (it must serve any base model; nothing is generated).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer_client import AdapterPublisher
from trainer_client.digest import adapter_digest
from trainer_client.errors import AdapterError
from trainer_client.verify import verify_adapter

TOKENS = torch.arange(12).reshape(1, 12)


def base(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def lora(seed: int = 1, **more: Any) -> LoraConfig:
    torch.manual_seed(seed)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    return LoraConfig(**(settings | more))


def peft_model(adapter_name: str = "default", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return get_peft_model(base().to(dtype), lora(**more), adapter_name, autocast_adapter_dtype=False).eval()


def same_tensors(path: str | Path, expected: dict[str, torch.Tensor]) -> None:
    read = load_file(Path(path) / "adapter_model.safetensors")
    assert sorted(read) == sorted(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor.detach().cpu()), name


def same_answers(model: Any, path: str | Path) -> None:
    again = PeftModel.from_pretrained(base().to(model.dtype), str(path), autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
        with model.disable_adapter():
            assert not torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def check_model(directory: Path) -> None:
    """What is published is what save_pretrained writes, and PEFT answers from it as from the model."""
    model = peft_model()
    done = AdapterPublisher(directory / "root", url=os.environ.get("LORAFLEET_URL")).publish(model)
    model.save_pretrained(directory / "saved")
    same_tensors(done.path, load_file(directory / "saved" / "adapter_model.safetensors"))
    same_answers(model, done.path)
    assert (done.rank, done.all_b_zero) == (8, False)


def check_dtypes(directory: Path) -> None:
    publisher = AdapterPublisher(directory, keep=9)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = peft_model(dtype=dtype)
        done = publisher.publish(model)
        same_tensors(done.path, get_peft_model_state_dict(model, save_embedding_layers=False))
        same_answers(model, done.path)


def check_equal_models_have_equal_digests(directory: Path) -> None:
    publisher = AdapterPublisher(directory)
    assert publisher.publish(peft_model()).digest == publisher.publish(peft_model()).digest
    assert publisher.publish(peft_model(seed=5)).digest != publisher.publish(peft_model()).digest


def check_untrained(directory: Path) -> None:
    assert AdapterPublisher(directory).publish(peft_model(init_lora_weights=True)).all_b_zero


def check_wrappers(directory: Path) -> None:
    """DDP (real, one process), torch.compile, and both."""
    model = peft_model()
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    publisher = AdapterPublisher(directory / "root", keep=9)
    store = torch.distributed.FileStore(str(directory / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for source in (wrapped, torch.compile(model), torch.compile(wrapped)):
            same_tensors(publisher.publish(source).path, expected)
    finally:
        torch.distributed.destroy_process_group()


def check_sharded(directory: Path) -> None:
    """Parameters that are DTensors (FSDP2) are assembled; here on a mesh of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = peft_model()
    expected = {k: v.clone() for k, v in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    store = torch.distributed.FileStore(str(directory / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert any(hasattr(p, "full_tensor") for p in model.parameters())
        same_tensors(AdapterPublisher(directory / "root").publish(model).path, expected)
    finally:
        torch.distributed.destroy_process_group()


def check_state_dicts(directory: Path) -> None:
    """PEFT's own state dict, and the model's with every base weight in it."""
    model = peft_model()
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    publisher = AdapterPublisher(directory)
    config = model.peft_config["default"]
    for tensors in (expected, model.state_dict(), {f"module.{k}": v for k, v in model.state_dict().items()}):
        done = publisher.publish(tensors, config)
        same_tensors(done.path, expected)
        same_answers(model, done.path)


def check_layouts(directory: Path) -> None:
    """Transposed views and slices of larger storages."""
    expected = get_peft_model_state_dict(peft_model(), save_embedding_layers=False)
    odd = {k: v.t().contiguous().t() for k, v in expected.items()}
    odd = {k: torch.cat([v, v])[len(v) :] if i % 2 else v for i, (k, v) in enumerate(odd.items())}
    done = AdapterPublisher(directory).publish(odd, lora())
    same_tensors(done.path, expected)


def check_named_adapters(directory: Path) -> None:
    model = peft_model("policy")
    model.add_adapter("reference", lora(seed=9))
    done = AdapterPublisher(directory / "root").publish(model)  # the active one
    same_answers(model, done.path)
    other = AdapterPublisher(directory / "root", adapter_name="reference").publish(model)
    assert other.digest != done.digest
    model.save_pretrained(directory / "saved", selected_adapters=["policy"])
    nested = AdapterPublisher(directory / "root").publish(directory / "saved")
    same_answers(model, nested.path)


def check_directories(directory: Path) -> None:
    """As PEFT saves, and as TRL's adapter sync does."""
    from accelerate import Accelerator
    from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

    model = peft_model()
    model.save_pretrained(directory / "saved")
    save_lora_adapter(model, Accelerator(cpu=True), "default", str(directory / "trl" / "trl-policy-v1"))
    publisher = AdapterPublisher(directory / "root")
    for source in (directory / "saved", directory / "trl" / "trl-policy-v1"):
        verify_adapter(source)
        done = publisher.publish(source)
        assert done.digest == adapter_digest(source)
        same_answers(model, done.path)


def check_patterns(directory: Path) -> None:
    """Ranks that differ by module are served if they are scaled alike, which is all that vLLM can do."""
    publisher = AdapterPublisher(directory)
    model = peft_model(rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 8})
    same_answers(model, publisher.publish(model).path)
    model = peft_model(use_rslora=True)
    same_answers(model, publisher.publish(model).path)
    refused(publisher, peft_model(rank_pattern={"q_proj": 4}), "rank_pattern")
    refused(publisher, peft_model(alpha_pattern={"q_proj": 4}), "alpha_pattern")


def check_what_vllm_cannot_serve(directory: Path) -> None:
    publisher = AdapterPublisher(directory)
    refused(publisher, peft_model(use_dora=True), "use_dora")
    refused(publisher, peft_model(modules_to_save=["embed_tokens"]), "modules_to_save")
    refused(publisher, peft_model(bias="lora_only"), "bias")
    refused(publisher, peft_model(lora_bias=True), "lora_bias")
    refused(publisher, peft_model(trainable_token_indices=[1, 2]), "trainable_token_indices")
    refused(publisher, peft_model(target_modules=["q_proj", "embed_tokens"]), "target_modules")
    refused(publisher, peft_model(init_lora_weights="pissa"), "init_lora_weights")
    model = peft_model()
    next(p for n, p in model.named_parameters() if "lora_B" in n).data[1, 1] = float("nan")
    refused(publisher, model, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    assert publisher.versions() == ()


def refused(publisher: AdapterPublisher, model: Any, key: str) -> None:
    try:
        publisher.publish(model)
    except AdapterError as error:
        assert error.key == key, (error.key, key)
    else:
        raise AssertionError(f"{key} was published")


def check_callback(directory: Path) -> None:
    """A transformers Trainer publishes before the first step and after each; the weights are those of the moment."""
    from transformers import Trainer, TrainingArguments

    from trainer_client import PublishCallback

    model = peft_model(init_lora_weights=True)
    rows = [{"input_ids": TOKENS[0], "labels": TOKENS[0]} for _ in range(6)]
    with AdapterPublisher(directory / "root", keep=9) as publisher:
        publisher.publish(peft_model())  # an earlier run's
        callback = PublishCallback(publisher, every_steps=2)
        arguments = TrainingArguments(
            output_dir=str(directory / "out"),
            max_steps=5,
            per_device_train_batch_size=1,
            learning_rate=0.1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
        assert publisher.versions() == (2, 3, 4, 5)
    assert callback.last is not None and callback.last.version == 5
    model.eval()
    same_answers(model, callback.last.path)
    assert verify_adapter(directory / "root" / "trl-policy-v2").all_b_zero


def checks() -> dict[str, Callable[[Path], None]]:
    """The checks by name, in the order of this file."""
    return {name: value for name, value in globals().items() if name.startswith("check_")}


def main(wanted: list[str]) -> int:
    failed = 0
    for name, check in checks().items():
        if wanted and name not in wanted:
            continue
        directory = Path(tempfile.mkdtemp())
        started = time.perf_counter()
        try:
            check(directory)
            print(f"ok      {name} ({time.perf_counter() - started:.2f} s)", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            if wanted:
                raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

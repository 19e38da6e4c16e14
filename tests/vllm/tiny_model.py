"""Makes a random Qwen2 with a tokenizer of its own, and LoRA adapters for it; run by the real venv's python.

    python tiny_model.py DIR [--size tiny|mid]

    DIR/model                 vocabulary about 400; 4 layers of 128 (tiny) or 8 of 512 (mid, about 25M parameters)
    DIR/adapters/v1 .. v8     rank 8, another seed each; greedy tokens differ from the base model's and each other's
    DIR/adapters/rank16       more than `--max-lora-rank 8` takes
    DIR/adapters/zero         all B are zero: a valid adapter that changes nothing
    DIR/adapters/truncated    v1 with the second half of its weights file cut off

Everything follows from fixed seeds: the same library versions make the same bytes.
"""

import argparse
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "mid": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows a few words of arithmetic, so that any text encodes and decodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (
        f"add {a} to {b} and you have {a + b} , take {a} away and {b} is left ." for a in range(50) for b in range(50)
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(size: str, vocabulary: int) -> Qwen2ForCausalLM:
    """A model whose weights are large enough that its logits differ: greedy decoding then has no near ties."""
    torch.manual_seed(20)
    config = Qwen2Config(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.06,
        **SHAPES[size],
    )
    return Qwen2ForCausalLM(config)


def save_adapter(model_dir: Path, target: Path, *, seed: int, rank: int = 8, zero: bool = False) -> None:
    """A LoRA adapter on every linear layer; `zero` keeps PEFT's own start, in which B is zero."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=8 * rank, target_modules="all-linear", init_lora_weights=zero, task_type="CAUSAL_LM"
    )
    get_peft_model(Qwen2ForCausalLM.from_pretrained(model_dir), config).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model_dir, adapters = arguments.directory / "model", arguments.directory / "adapters"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(model_dir)
    model = make_model(arguments.size, len(tokenizer))
    model.save_pretrained(model_dir)
    for version in range(1, 9):
        save_adapter(model_dir, adapters / f"v{version}", seed=version)
    save_adapter(model_dir, adapters / "rank16", seed=16, rank=16)
    save_adapter(model_dir, adapters / "zero", seed=17, zero=True)
    shutil.copytree(adapters / "v1", adapters / "truncated")
    weights = adapters / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()

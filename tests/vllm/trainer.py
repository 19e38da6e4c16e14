"""A small run of TRL's AsyncGRPOTrainer with a LoRA policy, run by the real venv's python; prints JSON lines.

Read from the environment: BASE_URL, MODEL, OUT (required), STEPS (6), STALENESS (2), LEARNING_RATE (5e-4), GROUP (4),
SEED (0), HOLD_AT and HOLD_DIR: after each number of steps in HOLD_AT ("2 5") the run goes on only once the file of that
name is in HOLD_DIR, because a test has something to do meanwhile.

The trainer class is TRL's own. What is changed around it is what a machine without a GPU needs, see `patch_for_cpu`.
"""

import json
import os
import random
import sys
import time

# The trainer's machine need not have vLLM; hiding it keeps its slow import out of the trainer and of the rollout child,
# which imports this module again.
sys.modules["vllm"] = None  # type: ignore[assignment]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Says how an assistant's turn is found again in this chat template, which TRL does not know.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*|$", "content": "text"}},
}


def reward(completions, completion_ids, **_):
    """Spread-out numbers, so that every group has an advantage to learn from."""
    pairs = zip(completions, completion_ids, strict=True)
    return [sum(map(str.isdigit, c[0]["content"])) + len(set(ids)) for c, ids in pairs]


class CpuVarlenAttention:
    """The one function of the flash-attention package that TRL's packing calls, on plain torch."""

    @staticmethod
    def flash_attn_varlen_func(
        queries, keys, values, starts_q, starts_k, _max_q, _max_k, softmax_scale=None, causal=True, window_size=(-1, -1)
    ):
        """[tokens, heads, width], sequences end to end; each sees its own keys, its last query all of them."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        assert causal and window_size == (-1, -1)
        pieces = []
        bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
        for q0, q1, k0, k1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
            query, key, value = (t.transpose(0, 1)[None] for t in (queries[q0:q1], keys[k0:k1], values[k0:k1]))
            rows, columns = q1 - q0, k1 - k0
            visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=softmax_scale, enable_gqa=True
            )
            pieces.append(out[0].transpose(0, 1))
        return torch.cat(pieces)


def patch_for_cpu() -> None:
    """Three places where TRL 1.16.0 takes a GPU, or vLLM beside the trainer, for granted."""
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda *args, **kwargs: None
    async_rollout_worker.is_vllm_available = lambda *args, **kwargs: True
    packing._flash_attn = lambda: CpuVarlenAttention


def say(kind: str, **fields) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def make_trainer():
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
    tokenizer.response_template = RESPONSE_TEMPLATE
    draw = random.Random(int(os.environ.get("SEED", "0")))
    questions = [f"add {draw.randrange(50)} to {draw.randrange(50)} " + "and you have " * 12 for _ in range(64)]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in questions])
    group = int(os.environ.get("GROUP", "4"))
    config = AsyncGRPOConfig(
        output_dir=os.environ["OUT"],
        vllm_server_base_url=os.environ["BASE_URL"],
        max_steps=int(os.environ.get("STEPS", "6")),
        max_staleness=int(os.environ.get("STALENESS", "2")),
        learning_rate=float(os.environ.get("LEARNING_RATE", "5e-4")),
        seed=int(os.environ.get("SEED", "0")),
        num_generations=group,
        per_device_train_batch_size=2 * group,
        gradient_accumulation_steps=1,
        max_completion_length=16,
        weight_sync_steps=1,
        token_budget=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")

    holds = os.environ.get("HOLD_AT", "").split()

    class Hold(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps = str(state.global_step)
            while steps in holds and not os.path.exists(os.path.join(os.environ["HOLD_DIR"], steps)):
                time.sleep(0.1)

    return AsyncGRPOTrainer(
        model=os.environ["MODEL"],
        args=config,
        reward_funcs=reward,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Hold()],
    )


def main() -> None:
    import torch

    torch.set_num_threads(1)
    import logging

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("trl").setLevel(logging.INFO)
    started = time.monotonic()
    patch_for_cpu()
    trainer = make_trainer()
    say("ready", adapter_sync=trainer._lora_sync, seconds=round(time.monotonic() - started, 2))
    started = time.monotonic()
    trainer.train()
    for entry in trainer.state.log_history:
        say("log", **entry)
    say("done", version=trainer.model_version, seconds=round(time.monotonic() - started, 2))


if __name__ == "__main__":
    main()

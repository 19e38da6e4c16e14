from proxy.simulator.prefix_cache import Block, chain_hashes, chain_seed
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef
from proxy.simulator.weights import expected_logprobs, expected_tokens, mixed_weights

PROMPT = list(range(20, 70))


def sequence(weights: str = "w", **more: object) -> Sequence:
    made = Sequence(EngineRequest("r", PROMPT, 100, **more), 0.0, weights)  # type: ignore[arg-type]
    made.settle()
    return made


def test_output_is_what_the_weights_give() -> None:
    made = sequence(seed=3)
    made.produced = 20
    assert made.output == expected_tokens("w", PROMPT, 20, seed=3)
    assert made.tokens(15, 18) == made.output[15:18]
    assert made.logprobs(15, 18) == expected_logprobs("w", PROMPT, 20, seed=3)[15:18]
    assert (made.length, made.remaining) == (70, 80)


def test_new_weights_in_the_middle_keep_what_was_given() -> None:
    made = sequence()
    made.produced = 20
    before = made.output
    made.weights = "other"
    made.settle()
    made.produced = 40
    assert made.output == before + expected_tokens("other", PROMPT, 40)[20:]
    assert made.logprobs(0, 40) == expected_logprobs("w", PROMPT, 20) + expected_logprobs("other", PROMPT, 40)[20:]


def test_stale_blocks_show() -> None:
    made = sequence()
    made.blocks = [Block(b"", "old", "old")]
    made.settle()
    made.produced = 8
    assert made.output == expected_tokens(mixed_weights("w", "old"), PROMPT, 8)


def test_hashes_cover_prompt_and_output() -> None:
    made = sequence(lora=LoraRef("v1", 1, "/p"), cache_salt="s")
    made.hash_blocks(16, 50)
    assert len(made.hashes) == 3
    made.produced = 20
    made.hash_blocks(16, 70)
    everything = PROMPT + made.output
    assert made.hashes == chain_hashes(chain_seed("v1", "s"), everything, 16)

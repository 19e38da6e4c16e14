from proxy.simulator.weights import BASE, CHUNK, expected_logprobs, expected_tokens, mixed_weights

PROMPT = list(range(10, 50))


def test_vectors_do_not_move() -> None:
    assert expected_tokens(BASE, [5, 6, 7, 8] * 10, 8) == [36, 59, 74, 121, 99, 88, 125, 117]
    assert expected_logprobs(BASE, [5, 6, 7, 8] * 10, 3) == [-1.171875, -2.453125, -2.875]


def test_depends_on_weights_prompt_and_seed_alone() -> None:
    outputs = [
        expected_tokens("a", PROMPT, 20),
        expected_tokens("b", PROMPT, 20),
        expected_tokens("a", [*PROMPT[:-1], 9], 20),
        expected_tokens("a", PROMPT, 20, seed=1),
        expected_tokens(mixed_weights("a", "b"), PROMPT, 20),
        expected_tokens(mixed_weights("b", "a"), PROMPT, 20),
    ]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert expected_tokens("a", tuple(PROMPT), 20) == outputs[0]


def test_longer_outputs_begin_with_shorter_ones() -> None:
    long = expected_tokens("a", PROMPT, 3 * CHUNK + 1)
    assert len(long) == 3 * CHUNK + 1
    assert expected_tokens("a", PROMPT, 5) == long[:5]
    assert expected_tokens("a", PROMPT, 0) == []


def test_tokens_are_printable_and_logprobs_negative() -> None:
    assert all(35 <= token <= 129 for token in expected_tokens("a", PROMPT, 500))
    assert all(-4 <= logprob < 0 for logprob in expected_logprobs("a", PROMPT, 500))

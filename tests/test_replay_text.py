"""Made-up prompts: equal where the real ones were."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.receipt_line import Lines, OutputLine, PromptLine, Receipt, blocks, decode
from proxy.replay_text import Made, Texts
from proxy.routing.blocks import STRIDES
from proxy.simulator.weights import BASE, expected_tokens
from tests.receipt_samples import DataPath

BYTES = STRIDES[0][0]


class Recording:
    """Prompts of five-digit and six-byte tokens, written down and made up again."""

    def __init__(self) -> None:
        self._path = DataPath()
        self._lines = Lines()
        self._texts = Texts()

    def receipt(self, prompt: Sequence[int], **more: object) -> Receipt:
        got = decode(self._lines.line(0.0, self._path.outcome(list(prompt), **more)))  # type: ignore[arg-type]
        for line in got.prompts:
            self._texts.spelled(line)
        return got

    def made(self, receipt: Receipt) -> Made:
        return self._texts.prompt(receipt.seed or "", receipt.strides, receipt.prompts[0], receipt.prompts[0].tokens)

    def answer(self, receipt: Receipt, made: Made, count: int, call: int) -> int:
        assert receipt.output is not None
        return self._texts.answer(receipt.seed or "", None, made, receipt.output, count, call)


def shared(one: Made, other: Made) -> int:
    pairs = zip(one.prompt.ids, other.prompt.ids, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.prompt), len(other.prompt)))


def five(start: int, count: int) -> list[int]:
    """Tokens that take six bytes each."""
    return list(range(10_000 + start, 10_000 + start + count))


def test_as_long_as_it_was_and_the_same_each_time() -> None:
    it = Recording()
    first, again = (it.made(it.receipt(five(0, 333))) for _ in range(2))
    assert again is first
    assert len(first.prompt) == 333 and first.continues is None
    assert min(first.prompt.ids) >= 300


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_equal_as_far_as_whole_blocks_were_equal(common: int, one: int, other: int) -> None:
    it = Recording()
    first = it.made(it.receipt(five(0, common) + five(1000, one)))
    second = it.made(it.receipt(five(0, common) + five(2000, other)))
    assert (len(first.prompt), len(second.prompt)) == (common + one, common + other)
    whole = common * 6 // BYTES * BYTES // 6
    # Where one prompt ends within the next block, the other is taken to go on from its end.
    assert whole - 1 <= shared(first, second) <= whole + 1 + BYTES // 6


def test_a_longer_prompt_goes_on_after_a_whole_shorter_one() -> None:
    it = Recording()
    short, long = it.made(it.receipt(five(0, 205))), it.made(it.receipt(five(0, 300)))
    assert shared(short, long) == 205


def test_prompts_that_differ_after_their_last_block_differ() -> None:
    it = Recording()
    one, other = (it.made(it.receipt([*five(0, 205), last])) for last in (77_777, 77_778))
    assert 190 <= shared(one, other) < 206


def test_the_next_turn_has_the_tokens_that_the_engine_will_give() -> None:
    it = Recording()
    prompt, answer = five(0, 205), five(5000, 50)
    first = it.receipt(prompt, answer=answer)
    made = it.made(first)
    seed = it.answer(first, made, 50, call=7)
    turn = it.made(it.receipt([*prompt, *answer, *five(8000, 60)]))
    given_tokens = [*made.prompt.ids, *expected_tokens(BASE, made.prompt.ids, 50, seed)]
    assert list(turn.prompt.ids[:255]) == given_tokens
    assert turn.continues == 7 and len(turn.prompt) == 315
    deeper = it.made(it.receipt([*prompt, *answer, *five(8000, 60), *five(9000, 60)]))
    assert shared(turn, deeper) == 315 and deeper.continues is None  # what it continues is that turn's answer


def test_siblings_with_answers_of_their_own_go_their_own_ways() -> None:
    it = Recording()
    prompt = five(0, 205)
    turns = []
    for call, start in enumerate((5000, 6000)):
        first = it.receipt(prompt, answer=five(start, 50))
        it.answer(first, it.made(first), 50, call)
        turns.append(it.made(it.receipt([*prompt, *five(start, 50), *five(8000, 60)])))
    assert [turn.continues for turn in turns] == [0, 1]
    assert 205 <= shared(*turns) < 230


def test_equal_answers_are_drawn_with_equal_seeds() -> None:
    it = Recording()
    seeds = []
    for call in range(2):
        first = it.receipt(five(0, 205), answer=five(5000, 50))
        seeds.append(it.answer(first, it.made(first), 50, call))
    assert seeds[0] == seeds[1]


def test_an_answer_within_a_block_changes_nothing() -> None:
    it = Recording()
    first = it.receipt(five(0, 2), answer=five(5000, 2))
    assert it.answer(first, it.made(first), 2, call=3) == 3


def test_a_prompt_that_was_never_spelled_out_is_one_of_its_own() -> None:
    texts = Texts()
    lines = [PromptLine(name, 100, 600) for name in "aab"]
    made = [texts.prompt("", STRIDES, line, 100) for line in lines]
    assert made[0] is made[1] and shared(made[0], made[2]) == 0
    texts.spelled(PromptLine("c", 100, 600, "no base64!"))
    assert len(texts.prompt("", STRIDES, PromptLine("c", 100, 600), 100).prompt) == 100
    assert texts.answer("", None, made[0], OutputLine(60, "?"), 10, 5) == 5


def test_more_blocks_than_a_prompt_can_have_are_left_out() -> None:
    texts = Texts()
    encoded = Recording().receipt(five(0, 205)).prompts[0].blocks or ""
    assert len(blocks(encoded)) > 2
    line = PromptLine("a", 100, 600, encoded)
    texts.spelled(line)
    assert len(texts.prompt("", ((96, 192),), line, 100).states) == 2

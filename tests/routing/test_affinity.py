"""What counts as a continuation, and what a new prompt is placed by."""

from proxy.routing import affinity
from proxy.routing.blocks import Chain, chain, seed
from proxy.routing.index import Index
from proxy.routing.prompt import Kind
from tests.routing.helpers import ids, prompt

BEGIN = seed("m", "", Kind.TOKENS)
EVERYBODY = 0b1111


def chained(tokens: list[int]) -> Chain:
    return chain(prompt(tokens), BEGIN, 0.25)


def index_with(*held: tuple[list[int], int]) -> Index:
    index = Index()
    for slot in range(4):
        index.set_capacity(slot, None)
    for tokens, slot in held:
        one = chained(tokens)
        index.count_prompt(
            BEGIN, index.record("m", BEGIN, one.blocks, one.tokens_per_byte, slot, index.walk(BEGIN, one.blocks))
        )
    return index


def find(index: Index, tokens: list[int], allowed: int = EVERYBODY) -> affinity.Found:
    one = chained(tokens)
    return affinity.find(index, [one], [index.walk(BEGIN, one.blocks)], allowed)


def key(index: Index, tokens: list[int]) -> int:
    one = chained(tokens)
    return affinity.placement_key(index, one, index.walk(BEGIN, one.blocks))


SHARED, FIRST, SECOND = ids(200, 0), ids(400, 1), ids(400, 2)


def test_siblings_and_further_turns_are_continuations() -> None:
    index = index_with((FIRST, 2))
    assert find(index, FIRST).holders == (2,)
    assert find(index, FIRST + ids(100, 5)).holders == (2,)
    assert abs(find(index, FIRST).tokens - 400) < 20


def test_a_shared_preamble_is_not_one() -> None:
    index = index_with((SHARED + FIRST, 2))
    assert find(index, SHARED + SECOND) == affinity.NOTHING
    index = index_with((SHARED + FIRST, 2), (SHARED + SECOND, 1))
    assert find(index, SHARED + ids(400, 3)) == affinity.NOTHING


def test_each_branch_is_found_where_it_is() -> None:
    left, right = FIRST + ids(120, 7), FIRST + ids(120, 8)
    index = index_with((FIRST, 0), (left, 0), (FIRST, 1), (right, 1))
    assert find(index, left + ids(60, 9)).holders == (0,)
    assert find(index, right + ids(60, 9)).holders == (1,)
    assert sorted(find(index, FIRST + ids(60, 9)).holders) == [0, 1]


def test_only_candidates_are_found() -> None:
    left = FIRST + ids(120, 7)
    index = index_with((FIRST, 0), (FIRST, 1), (left, 0))
    assert find(index, left, allowed=0b0010).holders == (1,)
    assert find(index, left, allowed=0b1000) == affinity.NOTHING


def test_of_a_batch_the_prompt_that_saves_most_counts() -> None:
    index = index_with((FIRST, 0), (FIRST + SECOND, 1))
    chains = [chained(FIRST), chained(FIRST + SECOND)]
    paths = [index.walk(BEGIN, one.blocks) for one in chains]
    assert affinity.find(index, chains, paths, EVERYBODY).holders == (1,)


def test_all_turns_of_a_conversation_have_one_key() -> None:
    index = index_with(*((SHARED + ids(400, 10 + number), number % 4) for number in range(8)))
    first = key(index, SHARED + FIRST)
    assert key(index, SHARED + FIRST + ids(300, 4)) == first
    index_after = index_with(
        *((SHARED + ids(400, 10 + number), number % 4) for number in range(8)), (SHARED + FIRST, 1)
    )
    assert key(index_after, SHARED + FIRST + ids(300, 4)) == first


def test_different_prompts_behind_a_preamble_have_different_keys() -> None:
    index = index_with(*((SHARED + ids(400, 10 + number), number % 4) for number in range(4)))
    keys = {key(index, SHARED + ids(400, 50 + number)) for number in range(20)}
    assert len(keys) == 20


def test_prompts_shorter_than_a_block_have_different_keys() -> None:
    index = index_with()
    assert len({key(index, ids(5, number)) for number in range(20)}) == 20


def test_branches_of_a_turn_that_was_never_seen_stay_together() -> None:
    """Another proxy had the first turn; here only two second turns of it arrive."""
    early = index_with((SHARED + FIRST + ids(150, 7), 2))
    assert find(early, SHARED + FIRST + ids(150, 8)) == affinity.NOTHING  # nothing is known of what prompts share
    others = [(SHARED + ids(400, 20 + number), number % 4) for number in range(8)]
    late = index_with(*others, (SHARED + FIRST + ids(150, 7), 2))
    assert find(late, SHARED + FIRST + ids(150, 8)).holders == (2,)
    assert find(late, SHARED + SECOND) == affinity.NOTHING

from __future__ import annotations

from typing import Any

import pytest

from proxy.lease import Usage
from proxy.routing.request import parse
from proxy.routing.router import Decision, Router
from proxy.web.batch_sums import total, whole, without_cached
from proxy.web.usage import Learned
from tests.web.batches import dumps


@pytest.mark.parametrize(
    ("usages", "together"),
    [
        ([], None),
        ([None], None),
        ([Usage(1, 2, 3), None], None),
        ([Usage(1, 2, 3, b"[1]")], Usage(1, 2, 3)),
        ([Usage(1, 2, 3), Usage(10, 20, 30)], Usage(11, 22, 33)),
        ([Usage(1, None, 3), Usage(10, 20, None)], Usage(11, None, None)),
        ([Usage(0, 0, 0), Usage(0, 0, 0)], Usage(0, 0, 0)),
    ],
)
def test_sums(usages: list[Any], together: Any) -> None:
    assert total(usages) == together


def test_cached_tokens_are_those_of_one_prompt() -> None:
    one = Learned(Usage(4, 2, 1, b"[7]"), "a")
    assert without_cached(one, 1) == one
    assert without_cached(one, 2) == Learned(Usage(4, None, 1, b"[7]"), "a")
    assert without_cached(Learned(None, "a"), 2) == Learned(None, "a")


def decided(prompts: list[list[int]], n: int = 1) -> Decision:
    request = parse("/v1/completions", dumps({"prompt": prompts, "n": n}))
    return Router("prefix").decide(request, "m", [0, 1], 0.0)


def test_decisions() -> None:
    prompts = [[number] * (number + 1) for number in range(5)]
    parts = [(at, decided([prompts[number] for number in at], 2)) for at in ([1, 4], [0], [2, 3])]
    together = whole(parts)
    assert together is not None
    assert (together.sequences, together.prompt_tokens, together.replica) == (10, 15, parts[0][1].replica)
    assert [chain.size for chain in together.chains] == [2 * len(prompt) for prompt in prompts]
    assert whole([*parts, ([5], None)]) is None
    assert whole([]) is None


def test_a_long_part_names_the_prompts_that_were_looked_up() -> None:
    one, other = decided([[number] for number in range(100, 200)]), decided([[1]])
    together = whole([(range(1, 101), one), ([0], other)])
    assert together is not None
    assert together.chains == (*other.chains, *one.chains)
    assert len(together.chains) == 65

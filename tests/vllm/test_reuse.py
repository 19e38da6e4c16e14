"""Prefix reuse as vLLM itself counts it, prefix routing beside round robin."""

from collections import Counter
from collections.abc import Callable

import pytest

from .proxy import Proxy
from .replica import Replica
from .traffic import Answer, complete, endless_cache, gather_limited, prompt, session

pytestmark = pytest.mark.real

GROUPS, SIBLINGS, LENGTH, IN_FLIGHT = 40, 8, 600, 32


async def rollouts(url: str, prompts: list[list[int]]) -> list[Answer]:
    """The siblings of a prompt right after each other, as TRL asks for them."""
    async with session() as client:
        return await gather_limited(IN_FLIGHT, [complete(client, url, "base", ids, tokens=4) for ids in prompts])


async def test_reuse_of_grouped_rollouts(
    replicas: list[Replica], serve: Callable[..., Proxy], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [ids for group in range(GROUPS) for ids in [prompt(1000 + group, LENGTH)] * SIBLINGS]
    possible = endless_cache(prompts)
    reused = {}
    for policy in ("prefix", "round_robin"):
        for replica in replicas:
            replica.reset()
        answers = await rollouts(serve("--policy", policy).url, prompts)
        reused[policy] = sum(answer.cached for answer in answers)
        share = [sum(answer.replica == index for answer in answers) / len(answers) for index in ("0", "1")]
        routes = dict(Counter(answer.route for answer in answers))
        with capsys.disabled():
            total = sum(answer.prompt_tokens for answer in answers)
            print(
                f"\n{policy}: {reused[policy] / total:.1%} of {total} prompt tokens reused, "
                f"{reused[policy] / possible:.4f} of the possible {possible / total:.1%}; "
                f"share of the replicas {share[0]:.2f} / {share[1]:.2f}, routes {routes}"
            )
    assert reused["prefix"] >= 0.99 * possible
    assert reused["round_robin"] < reused["prefix"]

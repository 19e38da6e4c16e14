from dataclasses import replace

from benchmarks.offline_workloads import Workload, grouped
from benchmarks.peers import lorafleet
from benchmarks.reuse_load import measure
from benchmarks.reuse_rows import Row, plain, published


def small(workload: Workload) -> Row:
    return Row(workload, replicas=2, concurrency=4, faster=400.0)


async def test_what_replicas_count_is_what_was_sent() -> None:
    row = small(plain(grouped(3, group=4, length=64, shared=16, turns=2)))
    outcome = await measure(row, lorafleet("prefix"))
    assert (outcome.requests, outcome.failed) == (24, 0)
    assert sum(outcome.shares) == 24 and sum(outcome.routes.values()) == 24
    assert outcome.cached + outcome.prefilled == outcome.prompt_tokens
    # All siblings but the first have 48 of 64 tokens cached; the first of the later groups the shared 16. A second turn
    # has at least what the first one's prompt filled.
    assert outcome.endless >= 2 * 16 + 9 * 48 + 12 * 64
    assert 0 < outcome.cached <= outcome.endless


async def test_prompts_as_text_fill_the_same_blocks() -> None:
    row = small(plain(grouped(2, group=4, length=64, shared=16)))
    outcome = await measure(row, replace(lorafleet("prefix"), text=True))
    assert (outcome.failed, outcome.prompt_tokens, outcome.endless) == (0, 8 * 64, 16 + 6 * 48)


async def test_adapters_are_published_while_it_runs() -> None:
    row = replace(small(published(6, every=16)), publish=True)
    outcome = await measure(row, lorafleet("round_robin"))
    assert outcome.failed == 0 and len(outcome.publishes) == 2

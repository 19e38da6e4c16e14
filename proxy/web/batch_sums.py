"""What the parts of a batch come to together, for whoever counts: metrics, receipts, routing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.lease import Usage
from proxy.web.usage import Learned

if TYPE_CHECKING:
    from proxy.routing.blocks import Chain
    from proxy.routing.router import Decision


def without_cached(learned: Learned, prompts: int) -> Learned:
    """vLLM says of one prompt only how much of it was in its cache, which is no figure for several."""
    if learned.usage is None or prompts == 1:
        return learned
    return learned._replace(usage=structs.replace(learned.usage, cached_tokens=None))


def total(usages: Sequence[Usage | None]) -> Usage | None:
    """Sums of what all parts told; None for a count that one of them did not tell."""
    told = [each for each in usages if each is not None]
    if not told or len(told) < len(usages):
        return None
    return Usage(
        prompt_tokens=_sum([each.prompt_tokens for each in told]),
        cached_tokens=_sum([each.cached_tokens for each in told]),
        output_tokens=_sum([each.output_tokens for each in told]),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def whole(parts: Sequence[tuple[Sequence[int], Decision | None]]) -> Decision | None:
    """The first part's decision, with the counts and the prompts of all, these in the order of the body.

    `parts` are the positions of each part's prompts and the decision about it.
    """
    decisions = [decision for _, decision in parts if decision is not None]
    if not decisions or len(decisions) < len(parts):
        return None
    chains: dict[int, Chain] = {}
    for positions, decision in parts:
        if decision is not None:
            chains.update(zip(positions, decision.chains, strict=False))  # of a long part, not all are looked up
    return structs.replace(
        decisions[0],
        cached_tokens=sum([each.cached_tokens for each in decisions]),
        prompt_tokens=sum([each.prompt_tokens for each in decisions]),
        sequences=sum([each.sequences for each in decisions]),
        chains=tuple([chains[position] for position in sorted(chains)]),
    )

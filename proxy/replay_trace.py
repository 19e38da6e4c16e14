"""Receipts become calls that can be sent to simulated replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from proxy.errors import ConfigError
from proxy.receipt_line import Receipt, decode
from proxy.replay_text import Made, Texts
from proxy.simulator.offline import Call

USUAL_OUTPUT: Final = 64
"""Tokens of an answer, where no receipt says how long one was."""

LARGEST: Final = 1 << 28
"""Bytes of a prompt that a proxy may have cut into blocks."""

MOST_BLOCKS: Final = 1 << 20
MOST_ANSWERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call as it was recorded, `at` seconds after the first.

    It continues the answer to call `after` of the trace and came no sooner than `pause` seconds after that was there.
    """

    call: Call
    at: float
    receipt: Receipt
    after: int | None = None
    pause: float = 0.0


@dataclass(slots=True)
class Trace:
    """What can be replayed, in the order of arrival, and how much was left out: lines that are no receipts, requests
    that got no whole answer, those whose prompt routing could not read. No receipt told how long the answers to the
    `assumed` calls were.
    """

    calls: list[Recorded] = field(default_factory=list)
    unreadable: int = 0
    unanswered: int = 0
    without_prompt: int = 0
    assumed: int = 0

    @property
    def replicas(self) -> int:
        """As many as were seen."""
        return 1 + max((recorded.receipt.replica or 0 for recorded in self.calls), default=0)

    @property
    def longest(self) -> int:
        """KV tokens that the largest sequence needs."""
        return max((recorded.call.longest for recorded in self.calls), default=0)


def read(paths: Sequence[str], limit: int | None = None) -> Trace:
    """The trace of some files, at most `limit` calls of it. Raises ConfigError when one cannot be read."""
    trace = Trace()
    receipts: list[Receipt] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                for line in file:
                    receipt = _receipt(line)
                    if receipt is not None:
                        receipts.append(receipt)
                    else:
                        trace.unreadable += 1
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; name files that --receipts wrote") from None
    _build(trace, receipts, limit)
    return trace


def _receipt(line: bytes) -> Receipt | None:
    """One line; None for what is no receipt."""
    try:
        receipt = decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    cut_well = all(0 < size <= limit <= LARGEST and limit // size <= MOST_BLOCKS for size, limit in receipt.strides)
    return receipt if cut_well and 1 <= receipt.n <= MOST_ANSWERS else None


def _build(trace: Trace, receipts: Sequence[Receipt], limit: int | None) -> None:
    texts = Texts()
    for receipt in receipts:
        for prompt in receipt.prompts:
            texts.spelled(prompt)
    answered = [r for r in receipts if r.status == 200 and not r.cut and not r.left]
    usable = sorted((r for r in answered if r.prompts), key=lambda receipt: receipt.time)
    trace.unanswered = len(receipts) - len(answered)
    trace.without_prompt = len(answered) - len(usable)
    usual = _usual_output(usable)
    for receipt in usable[:limit]:
        trace.assumed += receipt.output_tokens is None
        trace.calls.append(_recorded(receipt, trace.calls, texts, usual))


def _usual_output(receipts: Iterable[Receipt]) -> int:
    known = [r.output_tokens / _sequences(r) for r in receipts if r.output_tokens is not None]
    return max(1, round(median(known))) if known else USUAL_OUTPUT


def _sequences(receipt: Receipt) -> int:
    return len(receipt.prompts) * receipt.n


def _recorded(receipt: Receipt, before: Sequence[Recorded], texts: Texts, usual: int) -> Recorded:
    """The call that a receipt tells of; `before` are those that arrived earlier."""
    count, seed, number = _sequences(receipt), receipt.seed or "", len(before)
    outputs = _outputs(receipt, count, usual)
    estimated = sum(line.tokens for line in receipt.prompts)
    scale = receipt.prompt_tokens / estimated if receipt.prompt_tokens and estimated else 1.0
    made = [texts.prompt(seed, receipt.strides, line, max(1, round(line.tokens * scale))) for line in receipt.prompts]
    draw = number
    if count == 1 and receipt.output is not None:
        model = receipt.upstream if receipt.adapter is not None else None
        draw = texts.answer(seed, model, made[0], receipt.output, outputs[0], number)
    call = Call(
        model=receipt.upstream or "",
        adapter=receipt.adapter is not None,
        prompts=tuple(one.prompt for one in made),
        outputs=outputs,
        n=receipt.n,
        max_tokens=receipt.max_tokens,
        salt=seed,
        seed=draw,
    )
    first = before[0].receipt.time if before else receipt.time
    after, pause = _cause(receipt, made, before)
    return Recorded(call, receipt.time - first, receipt, after, pause)


def _outputs(receipt: Receipt, count: int, usual: int) -> tuple[int, ...]:
    total = receipt.output_tokens
    if total is None:
        total = count * (min(usual, receipt.max_tokens) if receipt.max_tokens else usual)
    return tuple(max(1, total // count + (at < total % count)) for at in range(count))


def _cause(receipt: Receipt, made: Sequence[Made], before: Sequence[Recorded]) -> tuple[int | None, float]:
    """The call whose answer is in the prompt, and how long after its end this one came."""
    calls = [one.continues for one in made if one.continues is not None]
    if not calls:
        return None, 0.0
    cause = max(calls)
    earlier = before[cause].receipt
    pause = receipt.time - (earlier.time + earlier.total_secs)
    return (cause, pause) if pause >= 0 else (None, 0.0)

"""One receipt a line: what a finished completion came to, and what is needed to send the like of it again.

Prompts are not written, since they may be private. In their place stands what tells equal beginnings from different
ones: for each block of a prompt (see `proxy.routing.blocks`) 32 bits of a keyed hash of the block and all before it.
The key is made anew by each process and written nowhere, so that a guess at a prompt cannot be tried on the file; for
the same reason, prompts of before and after a restart never look equal.

The blocks of a prompt stand in the line of its first request; those that follow in the same file name its `id` only.
"""

from __future__ import annotations

import os
from array import array
from binascii import a2b_base64, b2a_base64
from typing import TYPE_CHECKING, Final

import msgspec

from proxy.routing.blocks import STRIDES, Chain, canonical_ids
from proxy.routing.prompt import Kind

if TYPE_CHECKING:
    from proxy.lease import Usage
    from proxy.web.observe import Outcome

SPELLED: Final = 65536
"""Prompts that are known to be spelled out in the file already; then it is forgotten of which."""

Strides = tuple[tuple[int, int], ...]
_64: Final = 0xFFFFFFFFFFFFFFFF


class PromptLine(msgspec.Struct, omit_defaults=True):
    """A prompt without its content. `tokens` is exact for token ids of up to 8 kB, else an estimate.

    `size` is in bytes of the canonical stream that the blocks are cut from, `blocks` base64 of 4 bytes a block.
    """

    id: str
    tokens: int
    size: int
    blocks: str | None = None


class OutputLine(msgspec.Struct):
    """The answer's tokens, where it named them: `size` bytes that continue the prompt's stream, and the `blocks` of
    both together that the prompt alone does not have."""

    size: int
    blocks: str


class Receipt(msgspec.Struct):
    """`id` is the answer's, `time` when the request had been read (Unix seconds). Seconds count from then.

    `adapter` and `digest` say which weights answered (None: the base model, or not known), `upstream` under which name
    the replica was asked, `replica`, `route` and `predicted_cached_tokens` what the last attempt was. `cached_tokens`,
    `prompt_tokens` and `output_tokens` are the replica's own figures, None where it gave none. `status` is what the
    client saw (None: nothing), `cut` that it saw no proper end, `left` that it did not wait for it. `seed` is equal
    where model, cache salt and the way of writing the prompt (token ids, text, chat) are. `strides` says how prompts
    are cut: pairs of bytes a block and the byte up to which blocks are that long. `replicas` is empty unless a batch
    was divided: then it names those of the parts, `replica` and `route` are the first part's, and counts are sums.
    """

    id: str | None
    time: float
    path: str
    model: str | None
    adapter: str | None
    digest: str | None
    upstream: str | None
    replica: int | None
    route: str | None
    predicted_cached_tokens: int | None
    cached_tokens: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    n: int
    max_tokens: int | None
    stream: bool
    status: int | None
    cut: bool
    left: bool
    attempts: int
    waited_secs: float
    first_byte_secs: float | None
    total_secs: float
    seed: str | None = None
    strides: Strides = ()
    prompts: list[PromptLine] = []
    replicas: list[int] = []
    output: OutputLine | None = None


_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Receipt).decode
"""One line. Raises msgspec.MsgspecError for what is no receipt."""


class Lines:
    """Writes receipts. Remembers which prompts the file spells out: `forget` when a new file begins."""

    def __init__(self) -> None:
        self._key = os.urandom(16)
        self._spelled: dict[tuple[int, int, int, bytes], str] = {}

    def forget(self) -> None:
        self._spelled.clear()

    def line(self, time: float, outcome: Outcome) -> bytes:
        """The receipt of a request whose body had been read at `time`, with its line break."""
        served, decision = outcome.served, outcome.decision
        chains = decision.chains if decision is not None else ()
        usage = outcome.usage
        first = outcome.first_byte_secs
        receipt = Receipt(
            id=outcome.response_id,
            time=round(time, 6),
            path=outcome.path,
            model=served.name if served is not None else None,
            adapter=served.name if served is not None and served.adapter else None,
            digest=served.digest if served is not None else None,
            upstream=served.upstream if served is not None else None,
            replica=outcome.replica,
            route=decision.route if decision is not None else None,
            predicted_cached_tokens=decision.cached_tokens if decision is not None else None,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            output_tokens=usage.output_tokens if usage is not None else None,
            n=outcome.n,
            max_tokens=outcome.max_tokens,
            stream=outcome.stream,
            status=outcome.status,
            cut=outcome.cut,
            left=outcome.left,
            attempts=outcome.attempts,
            waited_secs=round(outcome.waited_secs, 6),
            first_byte_secs=round(first, 6) if first is not None else None,
            total_secs=round(outcome.total_secs, 6),
            seed=f"{self._keyed(chains[0].seed):016x}" if chains else None,
            strides=STRIDES if chains else (),
            prompts=[self._prompt(chain) for chain in chains],
            replicas=list(outcome.replicas),
            output=self._output(chains[0], usage) if len(chains) == 1 and outcome.n == 1 and usage else None,
        )
        return _encode(receipt) + b"\n"

    def _prompt(self, chain: Chain) -> PromptLine:
        last = chain.blocks[-1] if chain.blocks else 0
        name = (chain.seed, last, chain.size, chain.tail)
        known = self._spelled.get(name)
        if known is not None:
            return PromptLine(known, chain.tokens, chain.size)
        if len(self._spelled) >= SPELLED:
            self._spelled.clear()
        whole = hash(b"%b%d,%d,%d,%b" % (self._key, *name))
        known = self._spelled[name] = f"{whole & _64:016x}"
        return PromptLine(known, chain.tokens, chain.size, self._blocks(chain.blocks))

    def _output(self, chain: Chain, usage: Usage) -> OutputLine | None:
        if not usage.output_ids or chain.kind is not Kind.TOKENS:
            return None
        both = chain.continued(canonical_ids(usage.output_ids))
        return OutputLine(both.size - chain.size, self._blocks(both.blocks[len(chain.blocks) :]))

    def _keyed(self, value: int) -> int:
        """64 bits of Python's own hash of bytes, SipHash, which costs a tenth of a microsecond."""
        return hash(self._key + value.to_bytes(8, "little")) & _64

    def _blocks(self, blocks: list[int]) -> str:
        key, packed = self._key, array("Q", blocks).tobytes()
        mixed = [hash(key + packed[at : at + 8]) & 0xFFFFFFFF for at in range(0, len(packed), 8)]
        return b2a_base64(array("I", mixed).tobytes(), newline=False).decode()


def blocks(encoded: str) -> list[int]:
    """The hashes in `PromptLine.blocks` or `OutputLine.blocks`. Raises ValueError for what is none."""
    return array("I", a2b_base64(encoded)).tolist()

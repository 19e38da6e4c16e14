"""A completion's body with several prompts, taken apart into bodies that ask for some of them each.

vLLM samples every prompt of a batch with the same parameters, and the j-th of its `n` answers with the seed plus j,
whatever the other prompts are: parts give what the whole would have given. What it does not treat so stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

WHOLE: Final = ("prompt_embeds", "kv_transfer_params", "ec_transfer_params", "use_beam_search")
"""With a value in one of these a batch is not divided: embeddings are prompts as well, the transfers name what one
engine holds, and a beam search may give fewer answers than were asked for."""

MOST_ANSWERS: Final = 1 << 20
"""To one prompt; vLLM refuses far fewer."""

_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_whole = msgspec.json.Decoder(int).decode
_encode = msgspec.json.encode
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
_FALSE: Final = (b"null", b"false")


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts as they were written, the rest of the body, and how many answers each prompt gets (`n`)."""

    prompts: list[msgspec.Raw] = field(repr=False)
    n: int
    fields: dict[str, msgspec.Raw] = field(repr=False)

    def body(self, positions: Sequence[int]) -> bytes:
        """The body that asks for the prompts at `positions`, in that order. Every value keeps its bytes."""
        prompts = self.prompts
        chosen = msgspec.Raw(_encode([prompts[position] for position in positions]))
        return _encode({**self.fields, "prompt": chosen})


def read(body: bytes) -> Batch | None:
    """None for a body that has to stay whole: no list of prompts in it, or something that parts would change.

    Only the outside of `prompt` is read here: that its items are prompts, `proxy.routing.request` has seen.
    """
    try:
        fields = _decode_raws(body)
        prompts = _decode_list(fields["prompt"])
        n = _decode_whole(fields["n"]) if "n" in fields else 1
    except (*_UNREADABLE, KeyError):
        return None
    if len(prompts) < 2 or not 1 <= n <= MOST_ANSWERS:
        return None
    if "stream" in fields and bytes(fields["stream"]) not in (*_FALSE, b"true"):
        return None  # vLLM takes "yes" and 1 too
    if any(name in fields and bytes(fields[name]) not in _FALSE for name in WHOLE):
        return None
    return Batch(prompts, n, fields)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the answers of one part stand in the whole: vLLM counts prompt by prompt, `n` for each."""

    positions: Sequence[int]
    n: int

    def __len__(self) -> int:
        return len(self.positions) * self.n

    def of(self, index: int) -> int:
        """The place in the whole of the part's answer `index`. Raises IndexError if it cannot have one."""
        if index < 0:
            raise IndexError(index)
        prompt, sample = divmod(index, self.n)
        return self.positions[prompt] * self.n + sample

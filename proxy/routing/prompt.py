"""A prompt as bytes that can be hashed: how it was written, and its one canonical form."""

from enum import IntEnum
from typing import Final

import msgspec

_SPACE: Final = b" \t\r\n"
_BEGIN: Final = 64


class Kind(IntEnum):
    """How a prompt was written; prompts of different kinds are never compared."""

    TOKENS = 0
    TEXT = 1
    CHAT = 2


TOKENS: Final = Kind.TOKENS
"""To look up a member of an enumeration takes longer than to compare with it (75 ns)."""


def without_space(inner: bytes | memoryview) -> bytes:
    """The inside of a JSON list of token ids as canonical bytes.

    Nobody writes a list that begins without white space and has some later; it would not be found to be the same.
    """
    if not inner:
        return b""
    begin = bytes(inner[:_BEGIN])
    if begin.translate(None, _SPACE) != begin:
        return bytes(inner).translate(None, _SPACE) + b","
    return b"".join((inner, b","))


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt.

    `raw` is, for TOKENS, the inside of the JSON list as the client wrote it; for TEXT the UTF-8 text; for CHAT a
    rendering of messages and tools in which equal conversations are equal and a longer one extends a shorter one.
    `key` is equal for equal `raw`.
    """

    kind: Kind
    raw: bytes | memoryview
    key: int = 0

    def __repr__(self) -> str:
        return f"Prompt({self.kind.name}, {len(self.raw)} bytes)"

    def canonical(self) -> bytes:
        """The bytes to hash: token ids are written `1,2,3,` whatever white space the client used."""
        if self.kind is not TOKENS:
            return bytes(self.raw)
        return without_space(self.raw)

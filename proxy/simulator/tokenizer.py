"""A byte-level tokenizer and a ChatML template: enough for text in, text out, and shared prefixes of chats.

Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, 3 + b for the byte b; anything above decodes to U+FFFD.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from proxy.simulator.weights import FIRST_BYTE_ID

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IM_START, IM_END = 1, 2


def encode(text: str) -> list[int]:
    """One id a UTF-8 byte; special tokens in the text are not recognised, as text from users should not be."""
    return [FIRST_BYTE_ID + byte for byte in text.encode("utf-8", "surrogatepass")]


def decode(ids: Iterable[int]) -> str:
    """Inverse of ``encode``; special ids vanish, ids without a byte become U+FFFD."""
    out = bytearray()
    for token in ids:
        if token < FIRST_BYTE_ID:
            continue
        out += bytes((token - FIRST_BYTE_ID,)) if token < FIRST_BYTE_ID + 256 else b"\xef\xbf\xbd"
    return out.decode("utf-8", "replace")


def token_text(token: int) -> str:
    """Text of one id, special tokens spelled out."""
    return SPECIAL[token] if 0 <= token < len(SPECIAL) else decode((token,))


def content_text(content: Any) -> str:
    """Text of a chat message's content: a string, or a list of parts of which the text ones count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return ""


def render_chat(messages: Sequence[Any], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a chat in ChatML, ending with the assistant's opening when asked.

    Raises ValueError when a message is not an object with a role.
    """
    ids: list[int] = []
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError("each message must be an object with a role")
        text = f"{message['role']}\n{content_text(message.get('content'))}"
        ids += [IM_START, *encode(text), IM_END, *encode("\n")]
    if add_generation_prompt:
        ids += [IM_START, *encode("assistant\n")]
    return ids

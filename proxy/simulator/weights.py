"""Which tokens come out: a pure function of weights, prompt, seed and position.

A real engine proves which adapter answered only to somebody who owns the same adapter and a GPU. Here the output *is* a
fingerprint of the weights, so a test can say exactly whose weights (and whose cached KV) produced an answer.

Weights are named by a string: the digest of an adapter directory (see ``adapters.read_adapter``) or ``BASE``.
"""

from array import array
from collections.abc import Sequence

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

BASE = "base"
"""Weights of the model without an adapter (and of an adapter whose B matrices are all zero)."""

CHUNK = 16
"""Tokens that one hash yields."""

FIRST_BYTE_ID = 3
"""Ids below are special (see ``tokenizer``); id ``3 + b`` is the byte ``b``."""

# Generated tokens are printable ASCII, so that the text of a completion is readable and needs no escapes but two.
_PRINTABLE = bytes(FIRST_BYTE_ID + 32 + (byte * 95 >> 8) for byte in range(256))


def mixed_weights(now: str, then: str) -> str:
    """Name of what answers when ``now`` computes on top of KV blocks that ``then`` left in the prefix cache."""
    return xxh3_128_hexdigest(f"{now}\0{then}".encode())


def output_state(weights: str, prompt: Sequence[int], seed: int) -> bytes:
    """Everything that a completion depends on, folded to 16 bytes; token ids are below 2**32."""
    head = f"{weights}\0{seed}\0".encode()
    return xxh3_128_digest(head + array("I", prompt).tobytes())


def chunk_tokens(state: bytes, chunk: int) -> bytes:
    """The output tokens at positions 16*chunk .. 16*chunk+15, one byte each."""
    return xxh3_128_digest(state + chunk.to_bytes(4, "little")).translate(_PRINTABLE)


def chunk_logprobs(state: bytes, chunk: int) -> list[float]:
    """Log-probabilities of the same 16 positions: in (-4, 0), exact in binary."""
    return [-(byte + 1) / 64 for byte in xxh3_128_digest(state + chunk.to_bytes(4, "little") + b"p")]


def expected_tokens(weights: str, prompt: Sequence[int], n: int, seed: int = 0) -> list[int]:
    """The first ``n`` output tokens that ``weights`` give to ``prompt``.

    ``seed`` is the request's (plus the choice's index when it asks for n > 1); 0 when it has none or is greedy.
    """
    state = output_state(weights, prompt, seed)
    chunks = (chunk_tokens(state, chunk) for chunk in range(-(-n // CHUNK)))
    return [token for chunk in chunks for token in chunk][:n]


def expected_logprobs(weights: str, prompt: Sequence[int], n: int, seed: int = 0) -> list[float]:
    """Log-probabilities of ``expected_tokens``."""
    state = output_state(weights, prompt, seed)
    chunks = (chunk_logprobs(state, chunk) for chunk in range(-(-n // CHUNK)))
    return [logprob for chunk in chunks for logprob in chunk][:n]

"""Prompts made up for replay: as long as those that were sent, and equal where those were equal.

What a receipt keeps of a prompt is a hash for each block and all before it. Two prompts with the same hash there began
alike, so they get the same tokens up to there; beyond it each gets tokens of its own. The blocks of an answer are kept
too, where it named its tokens. They stand for the tokens that the simulated engine generates, so that the next turn of
a conversation continues them here as it did when it was recorded.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

from xxhash import xxh3_64_intdigest

from proxy.receipt_line import OutputLine, PromptLine, Strides, blocks
from proxy.simulator.offline import TokenIds
from proxy.simulator.slots import LoraRef, NamedWeights
from proxy.simulator.weights import BASE, expected_tokens

VOCABULARY: Final = 150_000
FIRST_ID: Final = 300
"""Below are the ids that the simulator itself generates."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A prompt that was made up. `continues` is the call whose answer it goes on from."""

    prompt: TokenIds
    size: int
    edges: array[int]
    states: list[int]
    continues: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """Tokens, and how many of them the first block, the first two blocks and so on hold. The first `own` blocks are a
    prompt's; the rest belong to the answer that `call` got."""

    ids: array[int]
    ends: array[int]
    own: int
    call: int | None = None


class Texts:
    """Owner of all that was made up. Prompts and answers must come in the order in which they were sent."""

    def __init__(self) -> None:
        self._random = Random(1)
        self._weights = NamedWeights()
        self._hashes: dict[str, list[int]] = {}
        self._made: dict[str, Made] = {}
        self._known: dict[int, _Text] = {}
        """By the state after a block: a text that begins with these blocks."""
        self._tails: dict[int, array[int]] = {}
        """By the state after its last block: what came after it in a text that ended there."""

    def spelled(self, line: PromptLine) -> None:
        """Remember the blocks of a prompt; other receipts may name only its id."""
        if line.blocks is not None and line.id not in self._hashes:
            self._hashes[line.id] = _decoded(line.blocks)

    def prompt(self, seed: str, strides: Strides, line: PromptLine, tokens: int) -> Made:
        """The prompt that a receipt names, of so many tokens if it is the first time."""
        made = self._made.get(line.id)
        if made is None:
            edges = _edges(strides)
            states = _states(xxh3_64_intdigest(seed.encode()), self._hashes.pop(line.id, [])[: len(edges) - 1])
            made = self._made[line.id] = self._make(states, edges, line.size, tokens)
        return made

    def answer(self, seed: str, model: str | None, made: Made, output: OutputLine, count: int, call: int) -> int:
        """Enter the answer of `count` tokens that `model` (an adapter's upstream name, or None) will give to a prompt.

        Returns the seed that makes an engine give it.
        """
        begin = made.states[-1] if made.states else xxh3_64_intdigest(seed.encode())
        own = len(made.states)
        states = _states(begin, _decoded(output.blocks)[: len(made.edges) - 1 - own])
        if not states:
            return call
        draw = states[-1] & 0x7FFFFFFF  # equal answers, as greedy siblings get them, are equal here too
        prompt = made.prompt.ids
        weights = BASE if model is None else self._weights.activate(LoraRef(model, 0, ""), fresh=True)
        ids = prompt + array("I", expected_tokens(weights, prompt, count, draw))
        ends = self._known[begin].ends[:own] if own else array("I")
        start, end = (made.size, len(prompt)), (made.size + output.size, len(ids))
        _spread(ends, own + len(states), made.edges, start, end)
        self._enter(states, _Text(ids, ends, own, call))
        self._tails[states[-1]] = ids[ends[-1] :]
        return draw

    def _make(self, states: list[int], edges: array[int], size: int, tokens: int) -> Made:
        depth = bisect_left(range(len(states)), True, key=lambda at: states[at] not in self._known)
        ids, ends = array("I"), array("I")
        continues: int | None = None
        if depth:
            source = self._known[states[depth - 1]]
            ends = source.ends[:depth]
            ids = source.ids[: ends[-1]]
            continues = source.call if depth > source.own else None
            if depth < len(states):
                ids += self._tails.get(states[depth - 1], array("I"))
        _spread(ends, len(states), edges, (edges[depth], ends[-1] if ends else 0), (size, tokens))
        ids = ids[:tokens]
        ids += self._new(tokens - len(ids))
        self._enter(states[depth:], _Text(ids, ends, len(states)))
        if states:
            self._tails.setdefault(states[-1], ids[ends[-1] :])
        return Made(TokenIds(ids), size, edges, states, continues)

    def _enter(self, states: Sequence[int], text: _Text) -> None:
        for state in states:
            self._known.setdefault(state, text)

    def _new(self, count: int) -> array[int]:
        span = VOCABULARY - FIRST_ID
        drawn = array("I", self._random.randbytes(4 * count))
        return array("I", [value % span + FIRST_ID for value in drawn])


def _states(begin: int, hashes: Sequence[int]) -> list[int]:
    """64 bits for each block, so that 32-bit hashes at different places never meet."""
    states = []
    for value in hashes:
        begin = xxh3_64_intdigest(value.to_bytes(4, "little"), begin)
        states.append(begin)
    return states


def _decoded(encoded: str) -> list[int]:
    try:
        return blocks(encoded)
    except ValueError:
        return []


@lru_cache
def _edges(strides: Strides) -> array[int]:
    """How many bytes the first so many blocks have, as in `proxy.routing.blocks.EDGES`."""
    edges = array("Q", [0])
    for size, limit in strides:
        edges.extend(range(edges[-1] + size, limit + 1, size))
    return edges


def _spread(ends: array[int], count: int, edges: array[int], start: tuple[int, int], end: tuple[int, int]) -> None:
    """Bring `ends` to `count` blocks, the tokens from `start` to `end` (byte, token) spread evenly over the bytes."""
    byte, token = start
    rate = max(0, end[1] - token) / max(1, end[0] - byte)
    for index in range(len(ends), count):
        ends.append(min(end[1], max(token, round(token + (edges[index + 1] - byte) * rate))))

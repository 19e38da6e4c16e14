"""Prompts to chains, with the last ones kept: the siblings of a group need no hashing, only a look."""

from collections import OrderedDict
from typing import Final

from proxy.routing import blocks
from proxy.routing.blocks import Chain
from proxy.routing.prompt import TOKENS, Kind, Prompt

KEPT: Final = 512
_SEEDS: Final = 4096
_LEARN: Final = 0.05


class Chains:
    """Hashes prompts; learns how many tokens a byte of text or chat is."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int, int], Chain] = OrderedDict()
        self._seeds: dict[tuple[str, str, Kind], int] = {}
        self._tokens_per_byte = {Kind.TOKENS: 0.2, Kind.TEXT: 0.25, Kind.CHAT: 0.25}

    def get(self, prompt: Prompt, model: str, salt: str) -> Chain:
        """The chain of a prompt under the upstream name `model`."""
        begin = self.seed(model, salt, prompt.kind)
        name = (begin, prompt.key, len(prompt.raw))
        kept = self._kept
        found = kept.get(name)
        if found is not None:
            kept.move_to_end(name)
            return found
        found = kept[name] = blocks.chain(prompt, begin, self._tokens_per_byte[prompt.kind])
        if len(kept) > KEPT:
            kept.popitem(last=False)
        return found

    def seed(self, model: str, salt: str, kind: Kind) -> int:
        name = (model, salt, kind)
        begin = self._seeds.get(name)
        if begin is None:
            if len(self._seeds) >= _SEEDS:
                self._seeds.clear()  # one salt for each user and more: cheap to compute again
            begin = self._seeds[name] = blocks.seed(model, salt, kind)
        return begin

    def learn(self, chain: Chain, prompt_tokens: int) -> None:
        """A replica counted the tokens of this prompt."""
        if chain.kind is not TOKENS and chain.size >= 64:
            known = self._tokens_per_byte[chain.kind]
            self._tokens_per_byte[chain.kind] = known + _LEARN * (prompt_tokens / chain.size - known)

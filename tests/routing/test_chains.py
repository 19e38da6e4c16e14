"""Kept chains, seeds, and the tokens of text."""

from proxy.routing.chains import KEPT, Chains
from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import parse
from tests.routing.helpers import ids, prompt


def test_a_sibling_gets_the_chain_of_its_group() -> None:
    chains = Chains()
    first = chains.get(prompt(ids(100, 1)), "m", "")
    assert chains.get(prompt(ids(100, 1)), "m", "") is first
    assert chains.get(prompt(ids(100, 1)), "other", "").blocks != first.blocks
    assert chains.get(prompt(ids(100, 1)), "m", "salt").blocks != first.blocks


def test_kept_chains_and_seeds_are_bounded() -> None:
    chains = Chains()
    for number in range(KEPT + 50):
        chains.get(prompt(ids(3, number)), f"m{number}", str(number))
    assert len(chains._kept) == KEPT
    for number in range(10_000):
        chains.seed("m", str(number), Kind.TEXT)
    assert len(chains._seeds) <= 4096


def test_tokens_of_text_are_learned_from_what_replicas_count() -> None:
    chains = Chains()
    text = Prompt(Kind.TEXT, b"x" * 1000, 1)
    for _ in range(200):
        chains.learn(chains.get(text, "m", ""), 200)
    assert abs(chains.get(Prompt(Kind.TEXT, b"y" * 1000, 2), "m", "").tokens - 200) <= 2


def test_white_space_gives_equal_chains() -> None:
    chains = Chains()
    bodies = (b'{"prompt": [%b]}' % sep.join(b"%d" % it for it in ids(300, 3)) for sep in (b",", b", ", b" ,\n"))
    found = [chains.get(parse("/v1/completions", body).prompts[0], "m", "") for body in bodies]
    assert found[0].blocks == found[1].blocks == found[2].blocks

import pytest

from proxy.simulator.tokenizer import IM_END, IM_START, content_text, decode, encode, render_chat, token_text


@pytest.mark.parametrize("text", ["", "what is", "grün ☃ 🙂", "a\0b\n"])
def test_text_survives(text: str) -> None:
    assert decode(encode(text)) == text
    assert all(3 <= token < 259 for token in encode(text))


def test_ids_without_a_byte() -> None:
    assert decode([0, 1, 2, 3 + ord("a"), 5000]) == "a\ufffd"
    assert [token_text(token) for token in (0, 2, 3 + ord("z"))] == ["<|endoftext|>", "<|im_end|>", "z"]


def test_chat_prefixes_are_shared() -> None:
    first = [{"role": "user", "content": "hi"}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    short, long = render_chat(first, add_generation_prompt=False), render_chat(second)
    assert long[: len(short)] == short
    assert (short[0], short.count(IM_END)) == (IM_START, 1)
    assert decode(long).endswith("assistant\n")


def test_contents() -> None:
    assert content_text([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]) == "ab"
    assert content_text(None) == ""
    with pytest.raises(ValueError, match="role"):
        render_chat(["hi"])

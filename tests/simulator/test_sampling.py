from typing import Any

import pytest

from proxy.simulator import ReplicaOptions
from proxy.simulator.http import HttpError
from proxy.simulator.sampling import check_prompt, read_prompts, read_sampling, token_ids

OPTIONS = ReplicaOptions(max_model_len=100, vocab_size=1000)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["hi", "ho"], ["hi", "ho"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[]], [[]]),
        ([], []),
    ],
)
def test_forms_of_prompts(prompt: Any, prompts: Any) -> None:
    assert read_prompts({"prompt": prompt}) == prompts


@pytest.mark.parametrize(
    "prompt", [None, "", {"a": 1}, 5, [1, "a"], [[1], "a"], [-1], [True], [1.5], [["a"]], ["a"] * 1025]
)
def test_no_prompts(prompt: Any) -> None:
    with pytest.raises(HttpError) as problem:
        read_prompts({"prompt": prompt})
    assert problem.value.response.status == 400


def test_seeds() -> None:
    sampling = read_sampling({"seed": 5, "n": 3}, OPTIONS, 4, None)
    assert [sampling.choice_seed(index) for index in range(3)] == [5, 6, 7]
    assert read_sampling({"seed": 5, "temperature": 0}, OPTIONS, 4, None).choice_seed(0) == 0
    assert read_sampling({}, OPTIONS, 4, None).choice_seed(2) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"n": 0}, {"top_p": 0}, {"seed": 1 << 63}, {"seed": -(1 << 63) - 1}, {"stream": "yes"}, {"cache_salt": 3}],
)
def test_bad_parameters(wrong: dict[str, Any]) -> None:
    with pytest.raises(HttpError) as problem:
        read_sampling(wrong, OPTIONS, 4, None)
    assert problem.value.response.status == 400


def test_room() -> None:
    assert check_prompt([1] * 90, 10, OPTIONS) == 10
    assert check_prompt([1] * 90, None, OPTIONS) == 10
    for prompt, limit in (([1] * 91, 10), ([1] * 100, None), ([1], 101), ([], 1), ([1000], 1)):
        with pytest.raises(HttpError):
            check_prompt(prompt, limit, OPTIONS)


def test_ids() -> None:
    assert (token_ids("a"), token_ids([7])) == ([100], [7])

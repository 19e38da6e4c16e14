from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.control.answers import Answer, Outcome
from proxy.control.desired import Adapter
from proxy.control.verify import disagreement
from proxy.upstream.transport import Endpoint

ADAPTER = Adapter("p-v1", "/nowhere", None, "p-v1@abc")
NO = Answer(Outcome.REFUSED, 500, "Internal Server Error")
Said = tuple[float, ...] | Answer

A, NEAR_A, B = (-1.0, -2.5), (-1.001, -2.5), (-1.0, -3.0)
NAN = (-1.0, float("nan"))


def judge(*said: Said, base: Said = B) -> tuple[str, list[Any]] | None:
    """What is made of the replicas' log-probabilities under the name, and of those of the base model."""

    class Calls:
        async def probe(self, endpoint: Endpoint, model: str, timeout_secs: float) -> Said:
            assert model in ("base", ADAPTER.upstream)
            return base if model == "base" else said[int(endpoint.base[-1])]

    replicas = [SimpleNamespace(index=i, endpoint=Endpoint(f"http://r{i}")) for i in range(len(said))]
    return asyncio.run(disagreement(cast(Any, Calls()), cast(Any, replicas), ADAPTER, "base", 1.0))


def test_they_agree() -> None:
    assert judge(A) is None
    assert judge(A, A, NEAR_A) is None


@pytest.mark.parametrize("odd", [B, NAN, A[:1], (*A, -1.0)], ids=["other", "nan", "shorter", "longer"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_is_odd(odd: Said, where: int) -> None:
    said = [A, A, A]
    said[where] = cast(Any, odd)
    wrong = judge(*said)
    assert wrong is not None
    assert wrong[0] == "replicas answer with different weights under the new name"
    assert [answer.replica for answer in wrong[1]] == [0, 1, 2]


@pytest.mark.parametrize("said", [(NO, A), (A, NO), ((), A), ((), ())], ids=["first", "last", "empty", "all empty"])
def test_no_proof_is_no_proof(said: tuple[Said, ...]) -> None:
    wrong = judge(*said)
    assert wrong is not None and wrong[0] == "the probe under the new name failed"
    assert [answer.at_fault for answer in wrong[1]] == [not one or isinstance(one, Answer) for one in said]


@pytest.mark.parametrize("base", [NO, ()])
def test_the_base_model_says_nothing(base: Said) -> None:
    wrong = judge(A, A, base=base)
    assert wrong is not None and wrong[0] == "the probe of the base model failed"


def test_all_nan_is_no_agreement() -> None:
    assert judge(NAN, NAN) is not None
    assert judge(NAN) is not None


def test_just_as_the_base_model() -> None:
    wrong = judge(A, A, base=A)
    assert wrong is not None and "the load had no effect" in wrong[0]
    assert judge(A, A, base=NEAR_A) is None

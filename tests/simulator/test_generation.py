import asyncio

import pytest

from proxy.simulator import ReplicaOptions
from proxy.simulator.engine import EngineDead
from proxy.simulator.generation import Generation, new_id, request_id
from proxy.simulator.http import HttpError, Request
from proxy.simulator.replica import Replica
from proxy.simulator.sampling import read_sampling

PROMPTS = [[1] * 20, [2] * 30]


def generation(replica: Replica, **body: object) -> Generation:
    sampling = read_sampling(dict(body), replica.options, 5, None)
    return Generation(replica, None, sampling, PROMPTS, [5, 5], "name")


def replica(**options: object) -> Replica:
    made = Replica(ReplicaOptions(**options))  # type: ignore[arg-type]
    made.boot()
    return made


async def test_all_choices_of_all_prompts() -> None:
    async with generation(replica(), n=2, seed=7) as made:
        await made.finish()
        assert [s.request.id for s in made.sequences] == ["name-0_0", "name-0_1", "name-1_0", "name-1_1"]
        assert [s.request.seed for s in made.sequences] == [7, 8, 7, 8]
        assert (made.prompt_tokens, made.completion_tokens, made.created_tokens) == (50, 20, 0)
        assert made.usage(created=True)["prompt_tokens_details"] == {
            "cached_tokens": 16,
            "created_cache_tokens": 0,
            "multimodal_tokens": None,
        }


async def test_streams_interleave_and_are_complete() -> None:
    async with generation(replica(decode_tps=500), stream=True) as made:
        deltas = [delta async for delta in made.deltas()]
    for index in range(2):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.start for delta in own] == [0, 1, 2, 3, 4]
        assert [delta.finish_reason for delta in own] == [None] * 4 + ["length"]


async def test_leaving_aborts() -> None:
    made_replica = replica(decode_tps=10)
    async with generation(made_replica) as made:
        await asyncio.sleep(0)
    assert [s.finish_reason for s in made.sequences] == ["abort", "abort"]
    assert not made_replica.engine.running and not made_replica.engine.waiting


async def test_an_abort_is_a_delta_without_tokens() -> None:
    made_replica = replica(decode_tps=10)
    async with generation(made_replica, stream=True) as made:
        following = made.deltas()
        await anext(following)
        made_replica.engine.abort(["name-0", "name-1"], made_replica.live.now())
        made_replica.live.poke()
        rest = [delta async for delta in following]
    assert [delta.finish_reason for delta in rest][-2:] == ["abort", "abort"]


async def test_a_dead_engine() -> None:
    made_replica = replica(decode_tps=10)
    async with generation(made_replica) as made:
        made_replica.live.die(EngineDead("gone"))
        with pytest.raises(HttpError) as problem:
            await made.finish()
    assert problem.value.response.status == 500
    with pytest.raises(HttpError):
        generation(made_replica)


async def test_natural_ends() -> None:
    made_replica = replica(natural_tokens=4)
    async with generation(made_replica) as made:
        await made.finish()
    assert {s.finish_reason for s in made.sequences} <= {"stop", "length"}
    assert all(3 <= s.produced <= 5 for s in made.sequences)


def test_ids() -> None:
    request = Request("POST", "/", b"", {"x-request-id": "mine"}, b"")
    assert (request_id(request, {}), len(new_id())) == ("mine", 16)
    request.headers.clear()
    assert request_id(request, {"request_id": "yours"}) == "yours"

"""One replica that answers by a script, and lies where the script says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from proxy.control.answers import Answer, Observed, Outcome
from proxy.control.loading import Loading, Verdict
from proxy.control.transaction import Said
from proxy.errors import Conflict
from proxy.upstream.transport import Endpoint
from tests.control.virtual_time import run

PATH = "/run/p-v1"
OK = Answer(Outcome.OK, 200, "Success")
LOST = Answer(Outcome.NO_ANSWER, None, "the connection was reset")
NOT_YET = Answer(Outcome.NOT_VISIBLE, 404, "No adapter found")
EXISTS = Answer(Outcome.EXISTS, 400, "has already been loaded")
NO = Answer(Outcome.REFUSED, 400, "rank 16 is greater than 8")
AWAY = Answer(Outcome.UNREACHABLE, None, "connection refused")


def lists(**adapters: str) -> Observed:
    return Observed(adapters=adapters, base_models=("base",), base_root=None, max_model_len=None, paused=False)


RIGHT, NOTHING, OTHER_PATH = lists(v1=PATH, old="/o"), lists(old="/o"), lists(v1="/elsewhere", old="/o")
EMPTY = lists()


class Scripted:
    """`loads` and `shows` are answers in order; the last of each is given for ever."""

    def __init__(self, loads: list[Answer], shows: list[Observed | Answer], secs: float = 0.0) -> None:
        self.loads, self.shows, self.secs = list(loads), list(shows), secs
        self.asked = 0
        self.inside = False
        self.full_from = 99
        self.abandoned_from = 99

    async def load(self, endpoint: Endpoint, upstream: str, path: str, timeout_secs: float) -> Answer:
        assert self.inside, "asked without the turn"
        self.asked += 1
        await asyncio.sleep(self.secs)
        return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]

    async def observe(self, endpoint: Endpoint, timeout_secs: float, *, sleep: bool = False) -> Observed | Answer:
        assert self.inside
        return self.shows.pop(0) if len(self.shows) > 1 else self.shows[0]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        if self.asked >= self.full_from:
            raise Conflict("every slot is taken")
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def load(script: Scripted, *, secs: float = 60.0, ours: bool = False) -> Verdict:
    async def main() -> Verdict:
        loading = Loading(
            cast(Any, script),
            3,
            Endpoint("http://r"),
            "v1",
            PATH,
            lambda: {"old"},
            script.turn,
            asyncio.get_running_loop().time() + secs,
            secs,
            lambda: script.asked >= script.abandoned_from,
            ours,
        )
        verdict = await loading.run()
        assert not loading.asking and not script.inside
        return verdict

    return run(main())


CASES: dict[str, tuple[list[Answer], list[Observed | Answer], Said, Callable[[Verdict], bool]]] = {
    "it did": ([OK], [EMPTY], Said.OK, lambda v: not v.unsure),
    "it says no": ([NO], [EMPTY], Said.REFUSED, lambda v: v.answer.status == 400 and not v.conflict),
    "it is away": ([AWAY], [EMPTY], Said.GONE, lambda v: not v.unsure),
    "not yet, then it did": ([NOT_YET, NOT_YET, OK], [EMPTY], Said.OK, lambda v: not v.unsure),
    "listed already by somebody": ([EXISTS], [RIGHT], Said.REFUSED, lambda v: v.conflict),
    "lost, and it did": ([LOST], [RIGHT], Said.OK, lambda v: True),
    "lost, did not, then it did": ([LOST, OK], [NOTHING], Said.OK, lambda v: True),
    "lost, listed from elsewhere": ([LOST, EXISTS], [OTHER_PATH], Said.REFUSED, lambda v: v.conflict and v.unsure),
    "lost, then listed by itself": ([LOST, EXISTS], [NOTHING, RIGHT], Said.OK, lambda v: True),
    "lost, then it says no": ([LOST, NO], [NOTHING], Said.REFUSED, lambda v: v.unsure and not v.conflict),
    "lost twice": ([LOST, LOST], [NOTHING], Said.DIED, lambda v: v.unsure),
    "lost, and it holds nothing any more": ([LOST], [EMPTY], Said.DIED, lambda v: v.unsure),
    "lost, and it answers no more": ([LOST], [LOST], Said.DIED, lambda v: v.unsure),
    "lost, then it is away": ([LOST, AWAY], [NOTHING], Said.GONE, lambda v: v.unsure),
    "lost, and its list is no list": ([LOST], [NO], Said.DIED, lambda v: v.unsure),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_of_its_words(case: str) -> None:
    loads, shows, said, holds = CASES[case]
    verdict = load(Scripted(loads, shows))
    assert verdict.said is said and verdict.answer.replica == 3
    assert holds(verdict)


def test_listed_already_and_ours() -> None:
    assert load(Scripted([EXISTS], [RIGHT]), ours=True).said is Said.OK


def test_the_deadline_passes_between_two_attempts() -> None:
    script = Scripted([NOT_YET], [EMPTY])
    verdict = load(script, secs=3.0)
    assert verdict.said is Said.REFUSED and not verdict.unsure
    assert "not loadable within 3 s; last word: No adapter found" in verdict.answer.message
    assert 5 <= script.asked <= 14


def test_the_deadline_passes_while_it_is_asked() -> None:
    verdict = load(Scripted([LOST], [NOTHING], secs=4.0), secs=3.0)
    assert verdict.said is Said.REFUSED and verdict.unsure


def test_asked_once_although_the_deadline_is_over() -> None:
    assert load(Scripted([OK], [EMPTY]), secs=0.0).said is Said.OK


@pytest.mark.parametrize("first", [NOT_YET, LOST])
def test_no_room_any_more(first: Answer) -> None:
    script = Scripted([first, OK], [NOTHING])
    script.full_from = 1
    verdict = load(script)
    assert (verdict.said, script.asked) == (Said.REFUSED, 1)
    assert "every slot is taken" in verdict.answer.message
    assert verdict.unsure == (first is LOST)


@pytest.mark.parametrize("first", [NOT_YET, LOST])
def test_given_up_for_another_replicas_sake(first: Answer) -> None:
    script = Scripted([first, OK], [NOTHING])
    script.abandoned_from = 1
    verdict = load(script)
    assert (verdict.said, script.asked) == (Said.REFUSED, 1)
    assert not verdict.answer.at_fault
    assert verdict.unsure == (first is LOST)


def test_cancelled_while_it_is_asked() -> None:
    async def main() -> None:
        script = Scripted([OK], [EMPTY], secs=100)
        loading = Loading(
            cast(Any, script), 0, Endpoint("http://r"), "v1", PATH, set, script.turn, 1e9, 1e9, lambda: False
        )
        task = asyncio.ensure_future(loading.run())
        await asyncio.sleep(1)
        assert loading.asking and script.inside
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not loading.asking and not script.inside

    run(main())

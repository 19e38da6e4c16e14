"""How busy a replica is and how long it takes, both learned from nothing but its answers.

The model of a replica: an answer takes

    seconds = speed * (prefill * uncached tokens computed meanwhile  +  tokens out * (step + crowd * sequences))

`prefill`, `step` and `crowd` are the same for all replicas (they are copies of each other) and come from a least
squares fit with forgetting over all answers; `speed` is each replica's own factor. The fit is over relative errors, so
that short answers count as much as long ones, and none of the three may be negative.
"""

from dataclasses import dataclass
from math import exp
from typing import Final

import msgspec

FORGET: Final = 0.98
"""Weight that each further answer leaves to all earlier ones: about the last 50 count."""
MIN_ANSWERS: Final = 4
LATELY: Final = 3.0
"""How many answers' time back the load of a replica counts for what it usually is."""
STAYS: Final = 0.6
STAYS_DEAR: Final = 0.8
"""Part of an answer's time during which what runs now still runs; the second where a batch slows its replica much: what
runs beside then takes long itself."""
CHEAP: Final = 0.1
"""A batch is slowed little if a further sequence makes it slower by less than this part."""
PREFILL: Final = 0.002
"""A prompt token takes at least this part of a lone token generated (engines: 0.003 to 0.01). Where all prompts are
alike the answers hardly tell what a prompt costs, and with a fit that says nothing copies would be free."""
_SPEED_STEP: Final = 0.1
_SINGULAR: Final = 1e-12
_EQUAL: Final = 4
"""Answers for which a replica is thought to be as fast as the others, against what its own answers say."""

Moments = tuple[float, float, float, float, float, float, float, float, float]
"""Of the fit: sums of xx, xy, xz, yy, yz, zz, x, y, z (uncached tokens, tokens out, tokens out times sequences)."""


class Trace(msgspec.Struct, gc=False):
    """What was known when a request began, kept until it ends.

    `last_use` is when (in uses of the index) the replica was last seen with what it is thought to hold, `settled` what
    was surely before all that was in flight. `load` is where the request counts.
    """

    began: float = 0.0
    crowd_before: float = 0.0
    work_before: float = 0.0
    uncached: int = 0
    sequences: int = 1
    answered: bool = False
    last_use: int = 0
    settled: int = 0
    load: "ReplicaLoad | None" = None


@dataclass(slots=True)
class ReplicaLoad:
    """What one replica has in hand. `queued` of the `uncached` prompt tokens in flight should still be computed.

    `speed` is how much longer than the others it takes, `usual` how many sequences it had lately (see `expected`).
    """

    sequences: int = 0
    requests: int = 0
    uncached: int = 0
    queued: float = 0.0
    speed: float = 1.0
    answers: int = 0
    last_turn: int = 0
    usual: float = 0.0
    _work: float = 0.0
    _crowd: float = 0.0
    _at: float = 0.0

    def pending(self, rates: "Rates", now: float) -> float:
        """Seconds of prompts to compute before a new one can begin."""
        seconds = rates.prefill * self.speed
        return max(0.0, self.queued * seconds - (now - self._at))

    def expected(self, rates: "Rates", now: float, fair: float) -> float:
        """How many sequences run on average during the next answer: those of now for a while, then as many as usual.

        Usual is no more than `fair`, the mean of all replicas: one that just had all the load is not given all again.
        """
        keep = exp((self._at - now) / (LATELY * rates.seconds))
        usual = self.usual * keep + self.sequences * (1.0 - keep)
        stays = STAYS if rates.cheap else STAYS_DEAR
        return stays * self.sequences + (1.0 - stays) * min(usual, fair)

    def begin(self, trace: Trace, rates: "Rates", now: float) -> None:
        self._tick(rates, now)
        trace.began = now
        trace.crowd_before = self._crowd
        trace.work_before = self._work - self.queued
        self._work += trace.uncached
        self.sequences += trace.sequences
        self.requests += 1
        self.uncached += trace.uncached
        self.queued += trace.uncached

    def answered(self, trace: Trace) -> None:
        """The request's prompt, and what came before it, is computed."""
        if not trace.answered:
            trace.answered = True
            self.uncached -= trace.uncached
            self.queued = min(self.queued, self.uncached)

    def finish(self, trace: Trace, rates: "Rates", now: float) -> tuple[float, float]:
        """Lower the load; (uncached tokens computed meanwhile, mean number of sequences meanwhile)."""
        self._tick(rates, now)
        self.sequences -= trace.sequences
        self.requests -= 1
        self.answered(trace)
        seconds = now - trace.began
        crowd = (self._crowd - trace.crowd_before) / seconds if seconds > 0 else float(trace.sequences)
        return self._work - trace.work_before, crowd

    def _tick(self, rates: "Rates", now: float) -> None:
        passed = now - self._at
        if passed > 0.0:
            self._crowd += self.sequences * passed
            keep = exp(-passed / (LATELY * rates.seconds))
            self.usual = self.usual * keep + self.sequences * (1.0 - keep)
            seconds = rates.prefill * self.speed
            self.queued = max(0.0, self.queued - passed / seconds) if seconds else 0.0
            self._at = now


@dataclass(slots=True)
class Rates:
    """Seconds for each uncached prompt token and for each step of the batch, and what each sequence adds to a step.

    `seconds` is how long a whole answer takes, whichever replica gives it.
    """

    prefill: float = 0.0
    step: float = 0.0
    crowd: float = 0.0
    answers: int = 0
    tokens_out: float = 64.0
    seconds: float = 0.5
    _typical: float = 1.0
    _moments: Moments = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def known(self) -> bool:
        """Enough answers were seen for the numbers to mean something."""
        return self.answers >= MIN_ANSWERS

    @property
    def cheap(self) -> bool:
        """Whether a further sequence slows a batch little, as on a GPU; False while nothing is known."""
        return self.crowd < CHEAP * self.step

    def expect(self, uncached: float, tokens_out: float, crowd: float) -> float:
        """Seconds that a replica of speed 1 takes."""
        return self.prefill * uncached + tokens_out * (self.step + self.crowd * crowd)

    def completed(self, sequences: float, tokens_out: float) -> float:
        """Sequences a second that a replica of speed 1 completes while so many run there."""
        token = self.step + self.crowd * sequences
        return sequences / (tokens_out * token) if token else 0.0

    def learn(self, load: ReplicaLoad, seconds: float, uncached: float, tokens_out: float, crowd: float) -> None:
        """One whole answer."""
        if seconds <= 0.0 or tokens_out <= 0:
            return
        self.answers += 1
        load.answers += 1
        self.seconds += (seconds - self.seconds) * max(0.05, 1.0 / self.answers)
        self.tokens_out += (tokens_out - self.tokens_out) * max(0.05, 1.0 / self.answers)
        expected = self.expect(uncached, tokens_out, crowd) if self.known else 0.0
        if expected > 0.0:
            ratio = min(max(seconds / expected, 0.05), 20.0)
            self._typical += (ratio - self._typical) * _SPEED_STEP / 2
            load.speed += (ratio / self._typical - load.speed) * max(_SPEED_STEP, 1.0 / (_EQUAL + load.answers))
        scale = load.speed / seconds
        x, y, z = uncached * scale, tokens_out * scale, tokens_out * crowd * scale
        keep = FORGET
        xx, xy, xz, yy, yz, zz, mx, my, mz = self._moments
        self._moments = m = (
            xx * keep + x * x,
            xy * keep + x * y,
            xz * keep + x * z,
            yy * keep + y * y,
            yz * keep + y * z,
            zz * keep + z * z,
            mx * keep + x,
            my * keep + y,
            mz * keep + z,
        )
        if self.answers <= 4 * MIN_ANSWERS or self.answers % 16 == 0:
            prefill, self.step, self.crowd = fit(m)
            self.prefill = max(prefill, PREFILL * (self.step + self.crowd))


def fit(moments: Moments) -> tuple[float, float, float]:
    """The three rates, none negative, that explain the answers best.

    A little is added to each diagonal. Where the answers cannot tell two rates apart, because all were alike, the one
    with the smaller addition explains nearly all: `step`, so that a batch is not thought to slow a replica until it
    was seen to.
    """
    xx, xy, xz, yy, yz, zz, x, y, z = moments
    xx, yy, zz = xx * 1.001, yy * 1.001, zz * 1.03
    # All three by Cramer's rule; the matrix is symmetric.
    a, b, c = yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - xz * yy
    size = xx * a + xy * b + xz * c
    if size > _SINGULAR * xx * yy * zz:
        d = xy * xz - xx * yz
        prefill = (a * x + b * y + c * z) / size
        step = (b * x + (xx * zz - xz * xz) * y + d * z) / size
        crowd = (c * x + d * y + (xx * yy - xy * xy) * z) / size
        if prefill >= 0.0 and step >= 0.0 and crowd >= 0.0:
            return prefill, step, crowd
    # One of them would be negative: the best that two can do, or one.
    best, best_gain = [0.0, 0.0, 0.0], 0.0
    for i, j, ii, jj, ij, left, right in (
        (0, 1, xx, yy, xy, x, y),
        (0, 2, xx, zz, xz, x, z),
        (1, 2, yy, zz, yz, y, z),
    ):
        size = ii * jj - ij * ij
        pairs = [(left / ii if ii else 0.0, 0.0), (0.0, right / jj if jj else 0.0)]
        if size > _SINGULAR * ii * jj:
            pairs.append(((jj * left - ij * right) / size, (ii * right - ij * left) / size))
        for one, other in pairs:
            gain = one * left + other * right
            if one >= 0.0 and other >= 0.0 and gain > best_gain:
                best, best_gain = [0.0, 0.0, 0.0], gain
                best[i], best[j] = one, other
    return best[0], best[1], best[2]

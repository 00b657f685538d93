# SPDX-License-Identifier: Apache-2.0
"""A preference beta for each round: constant, linear, cosine, or after the measured noise and drift.

HO-FL fixes beta for a run and names schedules as future work; these are hofl's own. Its one-step inequality
(eq. 72) conditions on the history, so a beta made of earlier rounds keeps it; Theorem C.9's constants are
for a fixed p. Pure functions: the beta of a round is the same whenever and wherever it is computed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hofl.core.directions import Family
from hofl.core.sampling import Policy, tilted
from hofl.theory.estimator_variance import relative_variance

Kind = Literal["constant", "linear", "cosine", "measured"]


@dataclass(frozen=True)
class Schedule:
    """How beta moves over a run.

    Attributes:
        kind: of the schedule.
        start: beta of the first round, and of every one if constant; the most that ``measured`` takes.
        end: beta of the last round of ``linear`` and ``cosine``; the least of ``measured``.
        smooth_step: L h of ``measured``, how much noise costs beside drift; 1 is the longest step that the
            analysis allows.
        memory: weight of the past in the running means of ``measured``, in [0, 1).
    """

    kind: Kind = "constant"
    start: float = 0.75
    end: float = 0.0
    smooth_step: float = 1.0
    memory: float = 0.9


_BLOCK = 1 << 14
"""Coordinates that are added elementwise before the exact sum: the same bits on every machine."""


@dataclass(frozen=True)
class Measured:
    """Running sums of what rounds showed, each with its weight; all in squared units of an update.

    Attributes:
        preferred, preferred_weight: variance that probing gave a preferred client's update.
        other, other_weight: the same of the other clients.
        drift, drift_weight: H_a, how far expected updates of clients lie apart.
    """

    preferred: float = 0.0
    preferred_weight: float = 0.0
    other: float = 0.0
    other_weight: float = 0.0
    drift: float = 0.0
    drift_weight: float = 0.0

    def to_values(self) -> list[float]:
        """As a checkpoint has it: six numbers."""
        return list(astuple(self))

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Measured":
        """The inverse of :meth:`to_values`."""
        return cls(*map(float, values))

    @property
    def ratio(self) -> float | None:
        """What preferring saves of noise over the drift: ``(v_other - v_preferred) / H_a``; None if unknown.

        Infinite where noise is saved and no drift is seen.
        """
        if not (self.preferred_weight and self.other_weight and self.drift_weight):
            return None
        saved = self.other / self.other_weight - self.preferred / self.preferred_weight
        drift = self.drift / self.drift_weight
        if saved <= 0:
            return 0.0
        return saved / drift if drift > 0 else math.inf


@dataclass(frozen=True)
class Participation:
    """What the server has of one client's round.

    Attributes:
        preferred: whether the client is in R.
        bottom: d_zo of its boundary; the first coordinates of the update.
        probes: q.
        steps: E.
        update: its delta, float32 [d].
        family: law of its directions.
    """

    preferred: bool
    bottom: int
    probes: int
    steps: int
    update: NDArray[np.float32]
    family: Family = "gaussian"


def probing_noise(client: Participation) -> float:
    """The part of ``||Pi delta||^2`` that is variance of its directions: ``kappa / (E + kappa)``.

    E independent estimates of one gradient, each of relative variance kappa, ``(d + 1) / q`` of Gaussian
    directions (Lemma C.5), have in the mean ``(1 + kappa / E)`` times its square. That is of SGD; where the
    optimizer scales its steps, as AdamW does, the number only says which bottoms are walked at random.

    >>> update = np.array([3.0, 4.0, 9.0], dtype=np.float32)
    >>> probing_noise(Participation(True, 2, probes=1, steps=6, update=update))
    8.333333333333334
    """
    if not client.bottom:
        return 0.0
    kappa = relative_variance(client.family, client.bottom, client.probes)
    return _square(client.update[: client.bottom]) * kappa / (client.steps + kappa)


def _square(vector: NDArray[np.floating]) -> float:
    """``||vector||^2`` in float64, a pass through memory; the order of additions is fixed."""
    sums = np.zeros(min(_BLOCK, len(vector)))
    for begin in range(0, len(vector), _BLOCK):
        part = np.square(vector[begin : begin + _BLOCK], dtype=np.float64)
        sums[: len(part)] += part
    return math.fsum(sums)


@dataclass
class Observation:
    """A round's cohort as it passes, one participation at a time: what is kept is one vector float64 [d].

    Attributes:
        noise: :func:`probing_noise` of each, by whether it is preferred.
        total: sum of the updates.
        squares: sum of their squared norms.
    """

    noise: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    total: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    squares: float = 0.0

    def add(self, client: Participation) -> None:
        """Take one in; clients come in client order."""
        self.noise[client.preferred].append(probing_noise(client))
        self.total = self.total + client.update.astype(np.float64)
        self.squares += _square(client.update)

    def after(self, before: Measured, memory: float = Schedule.memory) -> Measured:
        """The running means after the round, see :func:`observe`."""
        noise = self.noise[True] + self.noise[False]
        spread: list[float] = []
        if len(noise) > 1:
            apart = (self.squares - _square(self.total) / len(noise)) / (len(noise) - 1)
            spread = [apart - math.fsum(noise) / len(noise)]
        return Measured(
            *_blend(before.preferred, before.preferred_weight, self.noise[True], memory),
            *_blend(before.other, before.other_weight, self.noise[False], memory),
            *_blend(before.drift, before.drift_weight, spread, memory),
        )


def observe(before: Measured, cohort: Iterable[Participation], memory: float) -> Measured:
    """The running means after a round.

    Drift is the spread of the updates less the noise that probing explains; of one round it may be
    negative, and is kept so, or the mean would be too high.

    Args:
        before: after the rounds before.
        cohort: the accepted clients in client order, taken one by one; with fewer than two nothing is said
            of drift.
        memory: weight of the past.
    """
    seen = Observation()
    for client in cohort:
        seen.add(client)
    return seen.after(before, memory)


def _blend(total: float, weight: float, news: Sequence[float], memory: float) -> tuple[float, float]:
    """A running sum and its weight; a round without news leaves both."""
    if not news:
        return total, weight
    return memory * total + math.fsum(news) / len(news), memory * weight + 1.0


def _part(round_number: int, rounds: int) -> float:
    """0 in the first round, 1 in the last."""
    return min(1.0, max(0.0, (round_number - 1) / max(1, rounds - 1)))


def _by_ratio(schedule: Schedule, measured: Measured, clients: int) -> float:
    """The minimum of (14) on the line ``(1 - beta) u + beta r``: ``L h (v_other - v_R) / (4 N H_a)``.

    With c of eq. (14) less the dispersions of single clients, which one round does not show. Before both
    groups have been seen it is ``start``.
    """
    ratio = measured.ratio
    if ratio is None:
        return schedule.start
    return min(schedule.start, max(schedule.end, schedule.smooth_step * ratio / (4 * clients)))


_KINDS: Mapping[Kind, Callable[[Schedule, float, Measured, int], float]] = {
    "constant": lambda s, part, measured, clients: s.start,
    "linear": lambda s, part, measured, clients: s.start + (s.end - s.start) * part,
    "cosine": lambda s, part, measured, clients: (
        s.end + (s.start - s.end) * (1 + math.cos(math.pi * part)) / 2
    ),
    "measured": lambda s, part, measured, clients: _by_ratio(s, measured, clients),
}


def preference(
    schedule: Schedule, round_number: int, rounds: int, clients: int, measured: Measured | None = None
) -> float:
    """Beta of a round.

    Args:
        schedule: its settings.
        round_number: from 1 to ``rounds``.
        rounds: T.
        clients: N.
        measured: after the round before; only ``measured`` reads it.

    >>> down = Schedule("linear", start=0.75, end=0.25)
    >>> [preference(down, t, 5, 30) for t in (1, 2, 3, 5)]
    [0.75, 0.625, 0.5, 0.25]
    >>> round(preference(Schedule("cosine", 0.8, 0.0), 3, 5, 30), 12)
    0.4
    >>> seen = Measured(1.0, 1.0, 31.0, 1.0, 0.5, 1.0)  # noise saved 30, drift 0.5, N = 30
    >>> preference(Schedule("measured", 0.75), 9, 160, 30, seen)
    0.5
    """
    return _KINDS[schedule.kind](schedule, _part(round_number, rounds), measured or Measured(), clients)


def policy_of_round(base: Policy, beta: float) -> Policy:
    """The policy with the same cohort and preferred clients at another preference.

    Raises:
        ConfigError: beta is outside [0, 1).
    """
    return tilted(len(base.shares), base.cohort, base.preferred, beta)

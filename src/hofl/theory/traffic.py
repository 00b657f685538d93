# SPDX-License-Identifier: Apache-2.0
"""One round's bytes of any method from one set of sizes, by :mod:`hofl.theory.communication`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hofl.theory import communication as formula
from hofl.theory.communication import Traffic


@dataclass(frozen=True)
class Sizes:
    """What a round of one client is made of.

    Attributes:
        d: trainables.
        d_c: of them below the boundary.
        d_a: of an auxiliary head.
        steps: E.
        probes: q; 0 for the frozen-bottom control.
        activation: bytes of one batch's boundary activation on the wire.
        labels: bytes of its labels and lengths.
        every: k, local steps between two uploads.
        lag: rounds the client lacks where steps are shared; None for a snapshot.
        moments: vectors of optimizer state that go with a snapshot.
        models: of DeComFL, whether models are averaged in place of scalars.
    """

    d: int
    d_c: int = 0
    d_a: int = 0
    steps: int = 1
    probes: int = 0
    activation: int = 0
    labels: int = 0
    every: int = 1
    lag: int | None = 0
    moments: int = 0
    models: bool = False

    @property
    def uploads(self) -> int:
        """Uploads of activations in a round: ceil(E / k)."""
        return math.ceil(self.steps / self.every)

    def news(self, size: int, steps: int) -> dict[str, int]:
        """What brings the client in step, where ``size`` numbers are shared."""
        return formula.catch_up(size, steps, self.probes, self.lag, self.moments)


def of(name: str, sizes: Sizes) -> Traffic:
    """Bytes by category, up from and down to one client in one round, headers excluded.

    >>> of("ho_sfl", Sizes(294_912, 147_456, probes=2, activation=6_291_456, labels=64))["up"]["scalars"]
    8
    """
    return _FORMULAS[name](sizes)


def _decomfl(s: Sizes) -> Traffic:
    if s.models:
        return formula.ho_fl(s.d, s.d, s.steps, s.probes)
    return formula.decomfl(s.d, s.steps, s.probes, s.news(s.d, s.steps))


def _hosl(s: Sizes) -> Traffic:
    return formula.hosl(s.activation, s.labels, s.steps, s.probes, s.news(s.d_c, s.steps))


def _split(s: Sizes) -> Traffic:
    return formula.splitfed(s.activation, s.labels, s.steps, s.d_c)


_FORMULAS: Mapping[str, Callable[[Sizes], Traffic]] = {
    "ho_fl": lambda s: formula.ho_fl(s.d, s.d_c, s.steps, s.probes),
    "ho_sfl": lambda s: formula.ho_sfl(s.activation, s.labels, s.probes, s.news(s.d_c, 1)),
    "hosl": _hosl,
    "heron_sfl": lambda s: formula.heron_sfl(
        s.activation, s.labels, s.steps, s.probes, s.every, s.d_c, s.d_a
    ),
    "splitfed_v1": _split,
    "splitfed_v2": _split,
    "splitlora": _split,
    "zo_sfl": lambda s: formula.zo_sfl(s.activation, s.labels, s.steps, s.probes, s.d_c),
    "mu_splitfed": lambda s: formula.mu_splitfed(s.activation, s.labels, s.probes, s.d_c),
    "fedavg": lambda s: formula.fedavg(s.d),
    "fedprox": lambda s: formula.fedprox(s.d),
    "fedzo": lambda s: formula.fedzo(s.d),
    "decomfl": _decomfl,
    "hiso": lambda s: formula.decomfl(s.d, s.steps, s.probes, s.news(s.d, s.steps)),
    "mezo": lambda s: formula.mezo(s.d, s.steps, s.probes, s.moments, first=s.lag is None),
}

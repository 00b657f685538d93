# SPDX-License-Identifier: Apache-2.0
"""Rates of the other systems, up to their constants: how the bound on ``E ||grad f||^2`` shrinks.

HO-SFL's step size and radius are those of its analysis (arXiv 2603.14773); at the size of a language model
the radius is below what float32 can resolve, so they are diagnostics and no defaults.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """What a rate is made of.

    Attributes:
        rounds: T.
        d: trainables.
        d_c: of them below the boundary.
        probes: q.
        steps: E, local steps of a round.
        batch: examples of a step.
        clients: N.
        cohort: K.
        server_steps: tau of MU-SplitFed.
    """

    rounds: int
    d: int
    d_c: int = 0
    probes: int = 1
    steps: int = 1
    batch: int = 1
    clients: int = 1
    cohort: int = 1
    server_steps: int = 1


def step_size(rounds: int, d_c: int, probes: int) -> float:
    """``eta = sqrt(q / (T d_c))`` of HO-SFL's analysis.

    >>> f"{step_size(800, 147_456, 2):.3e}"
    '1.302e-04'
    """
    return math.sqrt(probes / (rounds * d_c))


def radius(rounds: int, d_c: int, probes: int) -> float:
    """``mu = (q T)^(-1/4) d_c^(-5/4)`` of HO-SFL's analysis.

    >>> f"{radius(800, 147_456, 2):.0e}"
    '5e-08'
    """
    return float((probes * rounds) ** -0.25 * d_c**-1.25)


def _first_order(s: Scale) -> float:
    return math.sqrt(1 / s.rounds)


def _bottom(s: Scale) -> float:
    return math.sqrt(max(1, s.d_c) / (s.probes * s.rounds))


def _pure(s: Scale) -> float:
    return math.sqrt((1 + s.d / s.probes) / s.rounds)


RATES: Mapping[str, tuple[str, Callable[[Scale], float]]] = {
    "ho_fl": ("sqrt((1 + d_c/q) / T)", lambda s: math.sqrt((1 + s.d_c / s.probes) / s.rounds)),
    "ho_sfl": ("sqrt(d_c / (q T))", _bottom),
    "hosl": ("sqrt(d_c / (q T))", _bottom),
    "heron_sfl": (
        "sqrt(d_c / (E N B T))",
        lambda s: math.sqrt(s.d_c / (s.steps * s.clients * s.batch * s.rounds)),
    ),
    "zo_sfl": ("sqrt(d / T)", lambda s: math.sqrt(s.d / s.rounds)),
    "mu_splitfed": ("sqrt(d / (tau T K))", lambda s: math.sqrt(s.d / (s.server_steps * s.rounds * s.cohort))),
    "decomfl": ("sqrt((1 + d/q) / T)", _pure),
    "fedzo": ("sqrt((1 + d/q) / T)", _pure),
    "mezo": ("sqrt((1 + d/q) / T)", _pure),
    "fedavg": ("sqrt(1 / T)", _first_order),
    "fedprox": ("sqrt(1 / T)", _first_order),
    "splitfed_v1": ("sqrt(1 / T)", _first_order),
    "splitfed_v2": ("sqrt(1 / T)", _first_order),
    "splitlora": ("sqrt(1 / T)", _first_order),
}
"""The rate of each system as a formula and as a function; HiSo's needs the rank of a whitened Hessian."""


def rate(name: str, scale: Scale) -> float | None:
    """The rate of a system without its constant; None where it is made of what nobody knows.

    >>> opt = Scale(rounds=800, d=294_912, d_c=147_456, probes=2)
    >>> round(rate("ho_sfl", opt), 2), round(rate("decomfl", opt), 2), round(rate("fedavg", opt), 3)
    (9.6, 13.58, 0.035)
    >>> rate("hiso", opt) is None
    True
    """
    return RATES[name][1](scale) if name in RATES else None

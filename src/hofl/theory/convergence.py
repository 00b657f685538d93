# SPDX-License-Identifier: Apache-2.0
"""HO-FL's convergence guarantee in numbers (Proposition C.8, Theorem C.9).

The constants are sufficient and far from tight: no practical run meets the horizon. What is of use is a
ratio of D between two policies, the skew chi^2, and which term of the bound is the larger one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hofl.theory.moments import sixth_moment

Shares = Sequence[float] | NDArray[np.float64]
"""p, one share a client, with a sum of 1."""


@dataclass(frozen=True)
class Assumptions:
    """What Assumptions C.1 to C.4 leave to be filled in; nobody knows these of a language model.

    Attributes:
        smoothness: L of each client's objective.
        surrogate: L_s of ``<delta, f_bottom(x; v)>`` in v.
        variance: sigma^2 of a minibatch gradient.
        affine: a_H, and
        heterogeneity: zeta^2, where ``mean ||grad f_i - grad f||^2 <= a_H ||grad f||^2 + zeta^2``.
        gap: f(w_0) - inf f.
    """

    smoothness: float = 1.0
    surrogate: float = 1.0
    variance: float = 0.0
    affine: float = 0.0
    heterogeneity: float = 0.0
    gap: float = 1.0


def dimension(shares: Shares, d_zo: Sequence[int], q: int) -> float:
    """``D = 1 + (1/q) sum_i p_i d_zo[i]``, the sampling-weighted dimension (HO-FL eq. 75).

    >>> dimension([0.25] * 4, [0, 4, 4, 8], q=2)
    3.0
    """
    return 1.0 + math.fsum(p * d for p, d in zip(shares, d_zo, strict=True)) / q


def remainder(shares: Shares, d_zo: Sequence[int]) -> float:
    """``M_p = sum_i p_i d (d+2) (d+4)``, which limits the radius (HO-FL eq. 73).

    >>> remainder([0.25] * 4, [0, 4, 4, 8])
    336.0
    """
    return math.fsum(p * sixth_moment(int(d)) for p, d in zip(shares, d_zo, strict=True))


def skew(shares: Shares) -> float:
    """``chi^2(p) = N sum_i (p_i - 1/N)^2``, the departure from uniform participation (HO-FL eq. 73).

    >>> skew([0.5, 0.5, 0.0, 0.0])
    1.0
    """
    p = np.asarray(shares, dtype=np.float64)
    return float(len(p) * np.square(p - 1 / len(p)).sum())


def first_constant(clients: int, floor: float, a: Assumptions) -> float:
    """``C_0`` of Theorem C.9 (HO-FL eq. 74).

    Args:
        clients: N.
        floor: epsilon in (0, 1], where every p_i is at least epsilon / N.
        a: the assumptions.

    >>> first_constant(4, 1.0, Assumptions())
    5677.0
    >>> first_constant(30, 0.25, Assumptions(variance=1.0))
    77293.0
    """
    n, sigma2 = clients, a.variance
    inner = (32 * n + 8 * sigma2) * a.smoothness**2 + 2 * a.surrogate**2
    return 1 + (30 + 12 / floor) * inner + (54 * n + 12 * sigma2) * a.smoothness


def horizon_constant(clients: int, floor: float, a: Assumptions) -> float:
    """``C_*`` of Theorem C.9 (HO-FL eq. 74): the horizon must be at least ``C_* D``.

    >>> horizon_constant(4, 1.0, Assumptions())
    4640879376.0
    >>> f"{horizon_constant(30, 0.25, Assumptions(variance=1.0)):.3e}"
    '8.603e+11'
    """
    reach, square = 2 * clients / floor, a.smoothness**2
    c0 = first_constant(clients, floor, a)
    return max(1.0, 8 * square * (1 + reach), (reach * a.smoothness) ** 2, 144 * (c0 * (1 + a.affine)) ** 2)


def step_size(rounds: float, steps: int, dimension: float) -> float:
    """``eta = 1 / (E sqrt(T D))`` (HO-FL eq. 76).

    >>> f"{step_size(13922638128, 2, 3.0):.5e}"
    '2.44652e-06'
    """
    return 1 / (steps * math.sqrt(rounds * dimension))


def largest_radius(rounds: float, dimension: float, remainder: float) -> float | None:
    """``mu <= M_p^(-1/2) (D/T)^(1/4)`` (HO-FL eq. 76); None where nobody probes.

    >>> f"{largest_radius(13922638128, 3.0, 336.0):.4e}", largest_radius(100, 1.0, 0.0)
    ('2.0902e-04', None)
    """
    return (dimension / rounds) ** 0.25 / math.sqrt(remainder) if remainder else None


def rate_constant(clients: int, floor: float, a: Assumptions) -> float:
    """``C_rate = 4 Delta + (8 + 6 zeta^2) C_0`` of Theorem C.9.

    >>> rate_constant(4, 1.0, Assumptions())
    45420.0
    """
    return 4 * a.gap + (8 + 6 * a.heterogeneity) * first_constant(clients, floor, a)


@dataclass(frozen=True)
class Guarantee:
    """Theorem C.9 for one policy.

    Attributes:
        dimension: D.
        remainder: M_p.
        skew: chi^2(p).
        floor: epsilon.
        c0: C_0.
        c_star: C_*.
        least_rounds: T_min, the least whole horizon of at least C_* D.
        rounds: T that the rest is for.
        step_size: eta.
        radius: the largest mu; None where nobody probes.
        progress: ``C_rate sqrt(D/T)``, what more rounds take down.
        bias: ``6 zeta^2 chi^2``, what they do not.
        horizon_holds: whether T is at least C_* D.
        skew_holds: whether ``a_H chi^2 <= 1/12``.
    """

    dimension: float
    remainder: float
    skew: float
    floor: float
    c0: float
    c_star: float
    least_rounds: int
    rounds: int
    step_size: float
    radius: float | None
    progress: float
    bias: float
    horizon_holds: bool
    skew_holds: bool

    @property
    def bound(self) -> float:
        """At most this is the mean over rounds of ``E ||grad f(w_t)||^2`` (HO-FL eq. 77)."""
        return self.progress + self.bias


def guarantee(
    shares: Shares,
    d_zo: Sequence[int],
    *,
    probes: int,
    steps: int,
    assumptions: Assumptions,
    rounds: int | None = None,
    floor: float | None = None,
) -> Guarantee:
    """Theorem C.9's numbers (HO-FL eq. 73 to 77).

    Args:
        shares: p, float [N].
        d_zo: dimension below each client's boundary.
        probes: q.
        steps: E.
        assumptions: the constants nobody can measure.
        rounds: T; None: the least that the theorem asks for.
        floor: epsilon; None: the largest that p has.

    Raises:
        ValueError: epsilon is not in (0, 1].

    >>> found = guarantee([0.25] * 4, [0, 4, 4, 8], probes=2, steps=2, assumptions=Assumptions())
    >>> found.dimension, found.c0, found.c_star, found.least_rounds
    (3.0, 5677.0, 4640879376.0, 13922638128)
    >>> f"{found.step_size:.5e} {found.radius:.4e} {found.bound:.6f}"
    '2.44652e-06 2.0902e-04 0.666725'
    """
    n = len(shares)
    if floor is None:  # rounding of a sum of shares must not lift it above 1
        floor = min(1.0, n * float(min(shares)))
    if not 0.0 < floor <= 1.0:
        raise ValueError(f"epsilon = {floor:g} must be in (0, 1]: every client needs a share above 0")
    d, m, chi2 = dimension(shares, d_zo, probes), remainder(shares, d_zo), skew(shares)
    c_star = horizon_constant(n, floor, assumptions)
    least = math.ceil(c_star * d)
    t = least if rounds is None else rounds
    return Guarantee(
        dimension=d,
        remainder=m,
        skew=chi2,
        floor=floor,
        c0=first_constant(n, floor, assumptions),
        c_star=c_star,
        least_rounds=least,
        rounds=t,
        step_size=step_size(t, steps, d),
        radius=largest_radius(t, d, m),
        progress=rate_constant(n, floor, assumptions) * math.sqrt(d / t),
        bias=6 * assumptions.heterogeneity * chi2,
        horizon_holds=t >= least,
        skew_holds=assumptions.affine * chi2 <= 1 / 12,
    )


def descent(
    gap: float, rate: float, steps: int, rounds: int, bias: float, noise: float, *, smooth: float
) -> float:
    """Proposition C.8: at most this is the mean over rounds of ``E ||grad f(w_t)||^2`` (HO-FL eq. 67).

    Args:
        gap: f(w_0) - inf f.
        rate: eta; with h = eta E at most 1/L.
        steps: E.
        rounds: T.
        bias: mean over rounds of ``||sum_i p_i a_i - grad f||^2``.
        noise: mean over rounds of what Lemma C.7 says of the cohort's variance.
        smooth: L.

    Raises:
        ValueError: the step is too long for the proposition.

    >>> descent(1.0, 0.1, 5, 100, bias=0.01, noise=0.2, smooth=1.0)
    0.15
    """
    h = rate * steps
    if h * smooth > 1:
        raise ValueError(f"eta E = {h:g} must be at most 1/L = {1 / smooth:g}")
    return round(2 * gap / (h * rounds) + bias + smooth * h * noise, 15)


def preference_cap(affine: float, clients: int, cohort: int) -> float:
    """The largest beta whose skew Theorem C.9 admits: ``a_H beta^2 (N/K - 1) <= 1/12``; at most 1.

    >>> round(preference_cap(1.0, 30, 6), 4), preference_cap(0.0, 30, 6)
    (0.1443, 1.0)
    """
    weight = affine * (clients / cohort - 1)
    return min(1.0, math.sqrt(1 / (12 * weight))) if weight > 0 else 1.0

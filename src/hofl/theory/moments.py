# SPDX-License-Identifier: Apache-2.0
"""Moments of one client's hybrid-order estimate and of its local trajectory (HO-FL Lemmas C.5 to C.7).

Pure functions of numbers; the symbols are the paper's. They are bounds under its assumptions (L-smooth
objectives, minibatch gradients without bias, a surrogate that is L_s-smooth in the bottom, Gaussian
directions, SGD), and what they say of a practical run is a diagnostic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Moments:
    """The constants of HO-FL eq. (34) for one client, and the bounds of Lemma C.5 that they give.

    Attributes:
        kappa: (d + 1) / q, the variance of q Gaussian directions in d dimensions; 0 without a bottom.
        rho2: mu^2 L_s^2 d, the square of the smoothing bias.
        omega2: (mu^2 L_s^2 / 4) d (d+2) (d+4), of the remainder of a finite difference.
        nu: the variance that no gradient accounts for.
    """

    kappa: float
    rho2: float
    omega2: float
    nu: float

    def bias(self) -> float:
        """At most this is ``||E g_hat - grad||^2`` (eq. 35)."""
        return self.rho2

    def variance(self, bottom: float) -> float:
        """At most this is ``E ||g_hat - E g_hat||^2`` for this square of the bottom's gradient (eq. 36)."""
        return 2 * self.kappa * bottom + self.nu

    def second(self, gradient: float, bottom: float) -> float:
        """At most this is ``E ||g_hat||^2``, from the squares of the gradient and its bottom (eq. 37)."""
        return 2 * gradient + self.variance(bottom)


def moments(
    d: int,
    q: int,
    radius: float,
    *,
    surrogate: float = 1.0,
    variance: float = 0.0,
    bottom_variance: float | None = None,
) -> Moments:
    """Lemma C.5's constants (HO-FL eq. 34).

    Args:
        d: d_zo of the client; 0 for one that backpropagates all.
        q: directions a step.
        radius: mu.
        surrogate: L_s, smoothness of ``<delta, f_bottom(x; v)>`` in v.
        variance: sigma^2 of a minibatch gradient.
        bottom_variance: sigma_zo^2, its part below the boundary; None: all of it.

    >>> moments(7, 4, 0.1)
    Moments(kappa=2.0, rho2=0.07, omega2=1.7325, nu=3.465)
    >>> moments(0, 2, 0.1, variance=3.0)
    Moments(kappa=0.0, rho2=0.0, omega2=0.0, nu=3.0)
    >>> moments(4, 2, 1e-3, variance=1.0, bottom_variance=0.5).variance(bottom=2.0)
    14.500096
    """
    if not d:
        return Moments(0.0, 0.0, 0.0, variance)
    kappa, scale = (d + 1) / q, (radius * surrogate) ** 2
    below = variance if bottom_variance is None else bottom_variance
    omega2 = _tidy(scale / 4 * sixth_moment(d))
    return Moments(kappa, _tidy(scale * d), omega2, _tidy(2 * variance + 2 * kappa * below + 2 * omega2))


def sixth_moment(d: int) -> int:
    """``E ||u||^6 = d (d+2) (d+4)`` of a Gaussian direction in d dimensions.

    >>> sixth_moment(7)
    693
    """
    return d * (d + 2) * (d + 4)


@dataclass(frozen=True)
class Trajectory:
    """What Lemma C.6 says of E local steps of one client.

    Attributes:
        tau: eta^2 (E-1)^2.
        energy: Q = ||g||^2 + kappa ||Pi g||^2.
        drift: D, at least ``E ||w^e - w||^2`` at every local step (eq. 49, 50).
        gap: at least ``||a - g||^2`` (eq. 51).
        variance: at least v, the variance of the normalised update (eq. 52).
        holds: whether ``4 (1 + kappa) L^2 tau <= 1/2``, without which none of this is promised.
    """

    tau: float
    energy: float
    drift: float
    gap: float
    variance: float
    holds: bool


def trajectory(
    client: Moments, gradient: float, bottom: float, *, rate: float, steps: int, smoothness: float = 1.0
) -> Trajectory:
    """Lemma C.6's bounds.

    Args:
        client: its moments.
        gradient: ``||grad f_i(w)||^2``.
        bottom: ``||Pi_i grad f_i(w)||^2``.
        rate: eta.
        steps: E.
        smoothness: L.

    >>> one = trajectory(moments(4, 2, 1e-3), 1.0, 0.5, rate=0.01, steps=1)
    >>> one.drift, one.gap, round(one.variance, 4), one.holds
    (0.0, 8e-06, 15.0003, True)
    >>> two = trajectory(moments(4, 2, 1e-3), 1.0, 0.5, rate=0.01, steps=3)
    >>> round(two.energy, 3), round(two.drift, 6), two.holds
    (2.25, 0.0072, True)
    >>> trajectory(moments(4, 2, 1e-3), 1.0, 0.5, rate=0.5, steps=3).holds
    False
    """
    kappa, square = client.kappa, smoothness**2
    tau = (rate * (steps - 1)) ** 2
    energy = gradient + kappa * bottom
    drift = 2 * tau * (4 * energy + client.nu)
    local = 4 * kappa * bottom + 4 * kappa * square * drift + client.nu
    return Trajectory(
        tau=tau,
        energy=energy,
        drift=drift,
        gap=_tidy(2 * square * drift + 2 * client.rho2),
        variance=3 * square * drift + 3 * client.rho2 + 3 / steps * local,
        holds=4 * (1 + kappa) * square * tau <= 0.5,
    )


def dispersions(updates: NDArray[np.float64]) -> NDArray[np.float64]:
    """``||a_i - a_bar||^2`` of each client, from expected updates a [clients, d] -> [clients].

    >>> dispersions(np.array([[0.0, 0.0], [2.0, 0.0]])).tolist()
    [1.0, 1.0]
    """
    squares: NDArray[np.float64] = np.square(updates - updates.mean(0)).sum(1)
    return squares


def cohort_variance(
    shares: Sequence[float], variances: Sequence[float], dispersion: Sequence[float], cohort: int
) -> float:
    """Lemma C.7: at most this is the variance of the mean of K updates (HO-FL eq. 62).

    It needs covariances of membership that are at most 0, which dependent rounding has.

    Args:
        shares: p.
        variances: v_i of each client's update.
        dispersion: of :func:`dispersions`.
        cohort: K.

    >>> cohort_variance([0.5, 0.5], [1.0, 3.0], [1.0, 1.0], cohort=1)
    4.0
    """
    parts = zip(shares, variances, dispersion, strict=True)
    return math.fsum(p * (v + 2 * spread) for p, v, spread in parts) / cohort


def _tidy(value: float) -> float:
    """Without the last bits of rounding, which say nothing and differ with the order of factors."""
    return float(f"{value:.15g}")

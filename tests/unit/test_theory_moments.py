# SPDX-License-Identifier: Apache-2.0
"""Lemmas C.5 to C.7 against the estimators, simulated trajectories and enumeration (SYSTEMS 4)."""

from collections.abc import Callable
from fractions import Fraction as F
from itertools import product

import numpy as np
import pytest
import torch
from test_estimators import FunctionSurrogate
from test_sampling import law

from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.theory.estimator_variance import relative_variance
from hofl.theory.moments import cohort_variance, dispersions, moments, sixth_moment, trajectory

KEY, D, Q = Key.of(11, "directions", 4, 2), 7, 3
RNG = np.random.default_rng(5)
ROOT = RNG.normal(size=(D, D))
HESSIAN = (ROOT + ROOT.T) / 2
SLOPE = RNG.normal(size=D)
ONE = torch.ones(1, dtype=torch.float64)


def quadratic(v: torch.Tensor) -> torch.Tensor:
    return (torch.from_numpy(SLOPE) @ v + v @ torch.from_numpy(HESSIAN) @ v / 2).reshape(1)


def cubic(v: torch.Tensor) -> torch.Tensor:
    return (v**3).sum().reshape(1) / 6


class Exact(FunctionSurrogate):
    """Its tangents are those of a gradient taken once: forward-mode AD costs a second a thousand."""

    def tangents(self, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(self, "gradient"):
            self.gradient = torch.func.jacrev(self.function)(self._at_anchor())
        return self.outputs(), directions.double() @ self.gradient.T


def estimates(
    name: str, family: str, function: Callable[[torch.Tensor], torch.Tensor], radius: float, draws: int
) -> np.ndarray:
    """Gradient estimates at 0, [draws, D], by an estimator of the library on directions of the library."""
    surrogate, found = Exact(np.zeros(D), function), []
    for i in range(draws):
        directions = Directions(KEY.fold(i), family, Q, D)
        s = ESTIMATORS[name](surrogate, directions, radius, False)[1](ONE).values
        found.append(directions.combination(s.astype(np.float32))(0, D))
    return np.array(found, dtype=np.float64)


def remainder(family: str, radius: float) -> float:
    """``E ||(radius / 2) (u' H u) u||^2`` of a quadratic, exactly."""
    trace, squares = np.trace(HESSIAN), np.square(HESSIAN).sum()
    if family == "gaussian":
        return radius**2 / 4 * (D + 4) * (trace**2 + 2 * squares)
    return radius**2 / 4 * D * (trace**2 + 2 * (squares - np.square(np.diag(HESSIAN)).sum()))


@pytest.mark.parametrize("family", ["gaussian", "rademacher"])
@pytest.mark.parametrize("name", ["forward", "central", "tangent"])
def test_moments_of_the_estimators(name: str, family: str) -> None:
    """On a quadratic every estimator is unbiased; only the forward difference has a remainder (eq. 38-41)."""
    radius, draws = 0.5, 1500
    found = estimates(name, family, quadratic, radius, draws)
    g2 = SLOPE @ SLOPE
    exact = relative_variance(family, D, Q) * g2 + (remainder(family, radius) / Q if name == "forward" else 0)
    measured = np.square(found - SLOPE).sum(1).mean()
    assert measured == pytest.approx(exact, rel=0.15)
    assert np.linalg.norm(found.mean(0) - SLOPE) < 3 * np.sqrt(exact / draws)
    curvature = float(np.abs(np.linalg.eigvalsh(HESSIAN)).max())
    bounds = moments(D, Q, radius, surrogate=curvature)
    assert measured < bounds.variance(g2)
    assert np.square(found).sum(1).mean() < bounds.second(g2, g2)


def test_the_remainder_is_seen_and_bounded() -> None:
    """Without it the forward difference would miss the 15% above; and E ||R||^2 <= omega^2."""
    curvature = float(np.abs(np.linalg.eigvalsh(HESSIAN)).max())
    g2 = relative_variance("gaussian", D, Q) * (SLOPE @ SLOPE)
    assert remainder("gaussian", 0.5) / Q > 0.3 * g2
    assert remainder("gaussian", 0.5) <= moments(D, Q, 0.5, surrogate=curvature).omega2


@pytest.mark.parametrize("family", ["gaussian", "rademacher"])
@pytest.mark.parametrize("name", ["forward", "central", "tangent"])
def test_bias_of_a_cubic(name: str, family: str) -> None:
    """At 0, where the gradient is 0: radius^2 / 6 E u^4, so 1/2 and 1/6 a coordinate; tangents have none."""
    expected = 0.0 if name == "tangent" else {"gaussian": 1 / 2, "rademacher": 1 / 6}[family]
    found = estimates(name, family, cubic, 1.0, 800).mean(0)
    assert found == pytest.approx(np.full(D, expected), abs=0.4 if family == "gaussian" else 0.08)
    assert found.mean() == pytest.approx(expected, abs=0.15 if family == "gaussian" else 0.03)


def test_constants_of_lemma_c5_by_hand() -> None:
    """d = 4, q = 2, mu = 0.1, L_s = 3: kappa 2.5, rho^2 0.36, omega^2 0.0225 x 192, nu 2 + 2.5 + 8.64."""
    found = moments(4, 2, 0.1, surrogate=3.0, variance=1.0, bottom_variance=0.5)
    assert (found.kappa, found.rho2, found.omega2, found.nu) == pytest.approx((2.5, 0.36, 4.32, 13.14))
    assert found.variance(2.0) == pytest.approx(23.14) and found.second(3.0, 2.0) == pytest.approx(29.14)
    full = moments(0, 2, 0.1, surrogate=3.0, variance=1.0)
    assert (full.kappa, full.rho2, full.omega2, full.nu) == (0, 0, 0, 1)
    assert sixth_moment(8) == 960


@pytest.mark.parametrize(("rate", "steps"), [(0.02, 1), (0.02, 4), (0.08, 3)])
def test_trajectories_stay_within_lemma_c6(rate: float, steps: int) -> None:
    """E steps of SGD on a quadratic whose lower 4 of 6 coordinates are probed, 4000 times from one start."""
    rng, runs, d_zo, q, radius = np.random.default_rng(8), 4000, 4, 2, 0.05
    hessian, start = np.diag([1.0, 0.5, 0.2, 0.8, 0.6, 0.3]), np.array([1.0, -2.0, 0.5, 1.5, -1.0, 2.0])
    gradient = hessian @ start
    w, drift = np.tile(start, (runs, 1)), 0.0
    for _ in range(steps):
        drift = max(drift, np.square(w - start).sum(1).mean())
        u, below = rng.normal(size=(runs, q, d_zo)), hessian[:d_zo, :d_zo]
        g = w @ hessian
        s = np.einsum("rqd,rd->rq", u, g[:, :d_zo]) + radius / 2 * np.einsum("rqd,de,rqe->rq", u, below, u)
        g[:, :d_zo] = np.einsum("rq,rqd->rd", s, u) / q
        w = w - rate * g
    updates = (start - w) / (rate * steps)
    client = moments(d_zo, q, radius)
    bounds = trajectory(
        client, gradient @ gradient, gradient[:d_zo] @ gradient[:d_zo], rate=rate, steps=steps, smoothness=1.0
    )
    assert bounds.holds
    assert drift <= bounds.drift
    a = updates.mean(0)
    assert np.square(a - gradient).sum() <= bounds.gap + 0.01  # 0.01: what 4000 runs leave of noise
    assert np.square(updates - a).sum(1).mean() <= bounds.variance


def test_first_step_has_no_drift_and_too_long_a_step_no_promise() -> None:
    client = moments(4, 2, 1e-3)
    assert trajectory(client, 1.0, 1.0, rate=1.0, steps=1).drift == 0
    edge = (0.5 / (4 * (1 + client.kappa))) ** 0.5 / 2
    assert trajectory(client, 1.0, 1.0, rate=edge * 0.999, steps=3).holds
    assert not trajectory(client, 1.0, 1.0, rate=edge * 1.001, steps=3).holds


CASES = [
    [F(1, 2), F(1, 2)],
    [F(1, 3), F(2, 3), F(1)],
    [F(1, 2)] * 4,
    [F(1, 4), F(3, 4), F(1, 2), F(1, 2)],
    [F(4, 5), F(4, 5), F(1, 5), F(1, 10), F(1, 10)],
    [F(9, 10), F(9, 10), F(9, 10), F(1, 10), F(1, 10), F(1, 10)],
]


def variance_of_the_mean(sets: dict[tuple[int, ...], F], a: np.ndarray, v: np.ndarray) -> float:
    """Of ``(1/K) sum over S of U_i`` with independent U of mean a and variance v, by enumeration of S."""
    size = len(next(iter(sets)))
    means = {s: a[list(s)].mean(0) for s in sets}
    centre = sum(float(w) * means[s] for s, w in sets.items())
    between = sum(float(w) * ((means[s] - centre) ** 2).sum() for s, w in sets.items())
    return float(between + sum(float(w) * v[list(s)].sum() / size**2 for s, w in sets.items()))


@pytest.mark.parametrize("x", CASES, ids=str)
def test_lemma_c7_by_enumeration(x: list[F]) -> None:
    sets, cohort, rng = law(x), int(sum(x)), np.random.default_rng(len(x))
    shares = [float(share) / cohort for share in x]
    for _ in range(200):
        a, v = rng.normal(size=(len(x), 3)) * rng.lognormal(size=(len(x), 1)), rng.exponential(size=len(x))
        bound = cohort_variance(shares, v, dispersions(a), cohort)
        assert variance_of_the_mean(sets, a, v) <= bound * (1 + 1e-12)
    signs = max(
        variance_of_the_mean(sets, np.array(s, dtype=float)[:, None], np.zeros(len(x)))
        / cohort_variance(shares, [0.0] * len(x), dispersions(np.array(s, dtype=float)[:, None]), cohort)
        for s in product([0, 1], repeat=len(x))
        if 0 < sum(s) < len(x)
    )
    assert 0.2 < signs <= 1  # no vacuous bound


def test_lemma_c7_needs_dependent_rounding() -> None:
    """One triple or the other, half of the time each: the same marginals, and the bound is broken."""
    a = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])[:, None]
    blocks = {(0, 1, 2): F(1, 2), (3, 4, 5): F(1, 2)}
    bound = cohort_variance([1 / 6] * 6, [0.0] * 6, dispersions(a), 3)
    assert variance_of_the_mean(blocks, a, np.zeros(6)) == 1 > bound == pytest.approx(2 / 3)
    assert variance_of_the_mean(law([F(1, 2)] * 6), a, np.zeros(6)) <= bound

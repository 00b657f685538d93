# SPDX-License-Identifier: Apache-2.0
"""The policies that HO-FL's stands for: the reference (13) and its scalar relaxation (14), solved (15).

They need statistics that no run observes; solved on estimates of them they show what the practical policy
(16), which needs none, gives away. Source: HO-FL section 5 and App. D.1.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.errors import ConfigError

Floats = NDArray[np.float64]

HALVINGS = 200
"""Bisections of the multiplier: more than float64 can tell apart."""


@dataclass(frozen=True)
class Statistics:
    """What one checkpoint says of each client's next participation.

    Attributes:
        products: inner products of the expected updates, ``a_i . a_j``: float64 [N, N].
        with_gradient: ``a_i . g`` with the gradient g of the objective: float64 [N].
        gradient: ``||g||^2``.
        variances: v_i: float64 [N].
        dispersions: ``||a_i - a_bar||^2``: float64 [N].
    """

    products: Floats
    with_gradient: Floats
    gradient: float
    variances: Floats
    dispersions: Floats

    def costs(self, smooth_step: float, cohort: int) -> Floats:
        """``c_i = (L h / K) (v_i + 2 ||a_i - a_bar||^2)`` (HO-FL eq. 14), with ``smooth_step`` L h."""
        costs: Floats = smooth_step / cohort * (self.variances + 2 * self.dispersions)
        return costs

    def objective(self, shares: Floats, costs: Floats) -> float:
        """``J(p) = ||sum_i p_i a_i - g||^2 + c . p`` (HO-FL eq. 13 and 88)."""
        bias = shares @ self.products @ shares - 2 * shares @ self.with_gradient + self.gradient
        return float(bias + costs @ shares)


def statistics(updates: Iterable[NDArray[Any]], gradient: NDArray[Any]) -> Statistics:
    """Estimates from R local runs of each client, without the bias that a mean of R runs has.

    A mean of R updates has variance v/R, which would count as dispersion and as bias of the cohort; it is
    subtracted, and the products are kept positive semidefinite, since (13) is convex.

    Args:
        updates: of each of R >= 2 runs, ``U_i = (w - w_i^E) / h`` of each client: [N, d]; taken one by one.
        gradient: of the objective at w: [d].

    Raises:
        ConfigError: one run tells nothing of a variance.
    """
    total, squares, runs = np.zeros((1, 1)), np.zeros(1), 0
    for run in updates:
        total = total + run.astype(np.float64)
        squares, runs = squares + np.square(run, dtype=np.float64).sum(1), runs + 1
    if runs < 2:
        raise ConfigError(f"{runs} local runs of each client: at least 2 are needed for a variance")
    mean, clients = total / runs, len(total)
    variances = np.maximum(squares - runs * np.square(mean).sum(1), 0.0) / (runs - 1)
    excess = variances / runs
    spread = np.square(mean - mean.mean(0)).sum(1)
    # E ||m_i - m_bar||^2 - ||a_i - a_bar||^2, with m_bar the mean of N independent means
    spread -= excess * (1 - 2 / clients) + excess.sum() / clients**2
    values, vectors = np.linalg.eigh(mean @ mean.T - np.diag(excess))
    products = (vectors * np.maximum(values, 0.0)) @ vectors.T
    g = gradient.astype(np.float64)
    return Statistics(products, mean @ g, float(g @ g), variances, np.maximum(spread, 0.0))


def limits(clients: int, cohort: int, floor: float) -> tuple[float, float]:
    """The box of the shares, ``epsilon / N`` and ``1 / K``.

    Raises:
        ConfigError: no p is in it.

    >>> limits(30, 6, 0.25)[1] == 1 / 6
    True
    """
    if not 1 <= cohort <= clients:
        raise ConfigError(f"cohort.size = {cohort} must be between 1 and the {clients} clients")
    if not 0.0 < floor <= 1.0:
        raise ConfigError(f"a floor of {floor:g}: must be in (0, 1], a part of a uniform client's share")
    return floor / clients, 1 / cohort


def water_filling(weight: float, costs: Floats, cohort: int, floor: float) -> Floats:
    """The solution of (14): ``p_i = clip(1/N - (c_i + lambda) / (2 A))`` with a sum of 1 (HO-FL eq. 15).

    Args:
        weight: A = 2 N H_a; 0 leaves the costs alone: the cheapest are filled first.
        costs: c, float64 [N].
        cohort: K.
        floor: epsilon.

    Returns:
        float64 [N].

    Raises:
        ConfigError: no p is feasible, or A is negative.

    >>> water_filling(0.0, np.array([3.0, 1.0, 2.0, 2.0]), 2, 0.5).tolist()
    [0.125, 0.5, 0.1875, 0.1875]
    >>> water_filling(1.0, np.array([0.5, 0.0, 0.0]), 1, 0.1).round(4).tolist()
    [0.1667, 0.4167, 0.4167]
    """
    n = len(costs)
    low, high = limits(n, cohort, floor)
    if weight < 0:
        raise ConfigError(f"A = {weight:g} must be at least 0")
    if cohort == n or floor == 1.0 or costs.min() == costs.max():
        return np.full(n, 1 / n)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        slopes = (costs - costs.min()) / (2 * weight)
    if not np.isfinite(slopes).all():  # A is 0, or nothing beside the costs
        return _greedy(costs, low, high)

    def _at(level: float) -> Floats:
        shares: Floats = np.clip(1 / n - slopes - level, low, high)
        return shares

    below, above = float(np.min(1 / n - high - slopes)), 1 / n - low
    for _ in range(HALVINGS):
        level = (below + above) / 2
        total = float(_at(level).sum())
        below, above = (level, above) if total > 1 else (below, level)
        if total == 1 or not below < (below + above) / 2 < above:
            break
    return _settled(_at((below + above) / 2), low, high)


def _settled(shares: Floats, low: float, high: float) -> Floats:
    """The same with what bisection left over of a sum of 1 given to the coordinates between the limits."""
    inside = (shares > low) & (shares < high)
    if inside.any():
        shares[inside] += (1 - shares.sum()) / inside.sum()
    return np.clip(shares, low, high)


def _greedy(costs: Floats, low: float, high: float) -> Floats:
    """The least ``c . p``: all at the floor, then the cheapest filled to the limit; equal costs share."""
    _, group, counts = np.unique(costs, return_inverse=True, return_counts=True)
    room = counts * (high - low)
    left = 1 - low * len(costs)
    given = np.clip(left - np.concatenate([[0.0], np.cumsum(room)[:-1]]), 0.0, room)
    shares: Floats = low + (given / counts)[group]
    return shares


@dataclass(frozen=True)
class Solution:
    """Shares and a proof of how good they are.

    Attributes:
        shares: p, float64 [N].
        gap: at most this is what the objective could still fall by, by duality, whatever the solver says.
    """

    shares: Floats
    gap: float


def solve(quadratic: Floats, linear: Floats, cohort: int, floor: float) -> Solution:
    """The minimum of ``p' Q p + l . p`` over shares in :func:`limits`, by SciPy's SLSQP.

    (13) is Q = a_i . a_j and l = c - 2 a_i . g; (14) is Q = A I and l = c - 2 A / N.

    Args:
        quadratic: Q, positive semidefinite, float64 [N, N].
        linear: l, float64 [N].
        cohort: K.
        floor: epsilon.

    Raises:
        ConfigError: no p is feasible, or SciPy is not installed.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError("the solver needs scipy, which is not installed: pip install 'hofl[theory]'")
    from scipy.optimize import minimize

    n = len(linear)
    low, high = limits(n, cohort, floor)
    even = np.full(n, 1 / n)
    slope = 2 * quadratic @ even + linear
    slope -= slope.mean()  # a constant moves no minimum of shares that sum to 1
    scale = max(float(np.abs(slope).max()), 2 * float(np.abs(quadratic).max()) / n) or 1.0
    q, unit = quadratic / scale, n  # in y = N (p - 1/N), all of whose numbers are around 1

    def _value(y: Floats) -> float:
        return float(y @ q @ y / unit + slope @ y / scale)

    def _slope(y: Floats) -> Floats:
        g: Floats = 2 * q @ y / unit + slope / scale
        return g

    found = minimize(
        _value,
        np.zeros(n),
        jac=_slope,
        method="SLSQP",
        bounds=[(low * n - 1, high * n - 1)] * n,
        constraints={"type": "eq", "fun": np.sum, "jac": np.ones_like},
        options={"maxiter": 100 * n, "ftol": 1e-17},
    )
    shares = _settled(np.clip(even + found.x / n, low, high), low, high)
    gradient = 2 * quadratic @ shares + linear
    return Solution(shares, float(gradient @ (shares - _greedy(gradient, low, high))))


def reference(known: Statistics, costs: Floats, cohort: int, floor: float) -> Solution:
    """The solution of (13) on estimated statistics, see :func:`solve`."""
    return solve(known.products, costs - 2 * known.with_gradient, cohort, floor)


def relaxed(known: Statistics, costs: Floats, cohort: int, floor: float) -> Floats:
    """The solution of (14) on estimated statistics, see :func:`water_filling`: A = 2 N H_a."""
    return water_filling(2 * float(known.dispersions.sum()), costs, cohort, floor)


def distance(p: Sequence[float] | Floats, other: Sequence[float] | Floats) -> float:
    """Total variation: the part of the selection that goes to other clients, from 0 to 1.

    >>> distance([0.5, 0.5], [0.25, 0.75])
    0.25
    """
    return float(np.abs(np.asarray(p) - np.asarray(other)).sum() / 2)

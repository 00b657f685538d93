# SPDX-License-Identifier: Apache-2.0
"""The policy table, round averages, the reference QP and water-filling (SYSTEMS 3.3 to 3.5, 5.4)."""

import math
import time

import numpy as np
import pytest

from hofl.core.keys import Key
from hofl.core.sampling import dimension_aware, tilted, uniform
from hofl.errors import ConfigError
from hofl.theory.optimal_sampling import (
    distance,
    limits,
    reference,
    relaxed,
    solve,
    statistics,
    water_filling,
)
from hofl.theory.sampling_policy import (
    closed_form_skew,
    coverage,
    largest_preference,
    never_seen,
    policy_row,
    round_averages,
)

TIERS = [8] * 10 + [16] * 10 + [24] * 10
QWEN_UP = {8: 3.113, 16: 1.868, 24: 0.623}
GIB = {8: 29.93, 16: 19.48, 24: 9.04}


@pytest.mark.parametrize(("beta", "cohort", "first", "uplink"), [
    (0.0, (2, 2, 2), 0.2, 11.21),
    (0.25, (3, 1.5, 1.5), 0.4, 13.07),
    (0.5, (4, 1, 1), 0.6, 14.94),
    (0.75, (5, 0.5, 0.5), 0.8, 16.81),
])  # fmt: skip
def test_rows_of_the_paper(beta: float, cohort: tuple[float, ...], first: float, uplink: float) -> None:
    """Three tiers of ten, K = 6, T = 160: expected cohorts, chances, participations, uplink in MB."""
    policy = tilted(30, 6, range(6), beta)
    row = policy_row(beta, policy, TIERS, 160, dimensions={8: 155_648, 16: 311_296, 24: 466_944},
                     profiles={"uplink": QWEN_UP})  # fmt: skip
    assert tuple(row.cohort.values()) == pytest.approx(cohort) and list(row.cohort) == [8, 16, 24]
    assert row.inclusion == pytest.approx((first, (1 - beta) / 5))
    assert row.participations == pytest.approx((160 * first, 32 * (1 - beta)))
    assert row.totals["uplink"] == pytest.approx(uplink, abs=0.006)
    assert row.skew == pytest.approx(closed_form_skew(beta, 30, 6))
    assert row.dimension == pytest.approx({0: 311_297, 0.75: 194_561}.get(beta, row.dimension))


def test_a_uniform_policy_prefers_nobody() -> None:
    row = policy_row(0.0, uniform(5, 5), [1] * 5, 10)
    assert row.inclusion == (None, 1.0) and row.never == 0 and row.dimension is None and row.totals == {}


def test_coverage() -> None:
    assert [coverage(beta, 30, 6, 160) for beta in (0, 0.25, 0.5, 0.75)] == [32, 24, 16, 8]
    for m in (8, 16, 24, 32):
        assert coverage(largest_preference(m, (30, 6, 160)), 30, 6, 160) == pytest.approx(m)
    assert never_seen(0.75, 30, 6, 160) == pytest.approx(0.95**160)
    for m in (32.01, -1, math.nan):
        with pytest.raises(ConfigError, match="between 0 and K T / N"):
            largest_preference(m, (30, 6, 160))


def test_round_averages_of_figure_2() -> None:
    """160 drawn rounds at 29.93 / 19.48 / 9.04 GiB a boundary: the published 117.32 and 163.78 within 2%."""
    base = dimension_aware([float(b) for b in TIERS], 6, 0.5, Key.of(42, "tie_break"))
    found = round_averages(GIB, TIERS, base, (0.0, 0.25, 0.5, 0.75), seed=42)
    expected = [6 * np.mean(list(GIB.values())) * (1 - b) + 6 * 29.93 * b for b in (0, 0.25, 0.5, 0.75)]
    assert [a.expected for a in found] == pytest.approx(expected)
    assert found[0].drawn == pytest.approx(117.32, rel=0.02)
    assert found[3].drawn == pytest.approx(163.78, rel=0.02)
    for a in found:  # 4 standard errors of independent draws, which dependent rounding stays below
        assert abs(a.drawn - a.expected) < 4 * 8.53 * math.sqrt(6 / 160)
        assert a.drawn < a.largest <= 6 * 29.93 + 1e-9
    again = round_averages(GIB, TIERS, base, (0.0, 0.25, 0.5, 0.75), seed=42)
    assert again == found != round_averages(GIB, TIERS, base, (0.0, 0.25, 0.5, 0.75), seed=43)


def test_water_filling_equals_the_solver() -> None:
    """1,000 random problems of (14), each by the formula and by SciPy, within 1e-8."""
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(1000):
        n = int(rng.integers(2, 13))
        cohort, floor = int(rng.integers(1, n + 1)), float(rng.uniform(0.01, 1))
        weight, costs = 10 ** rng.uniform(-3, 3), rng.random(n) * 10 ** rng.uniform(-2, 2)
        p = water_filling(weight, costs, cohort, floor)
        low, high = limits(n, cohort, floor)
        assert abs(p.sum() - 1) < 1e-12 and p.min() >= low and p.max() <= high
        found = solve(weight * np.eye(n), costs - 2 * weight / n, cohort, floor)
        worst = max(worst, float(np.abs(p - found.shares).max()))
    assert worst < 1e-8


def test_water_filling_at_its_ends() -> None:
    costs = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    even, floor = np.full(5, 0.2), 0.25
    greedy = np.array([0.05, 0.5, 0.35, 0.05, 0.05])  # the two cheapest filled as far as mass goes
    np.testing.assert_allclose(water_filling(0.0, costs, 2, floor), greedy)
    np.testing.assert_allclose(water_filling(1e-9, costs, 2, floor), greedy, atol=1e-9)
    np.testing.assert_allclose(water_filling(1e-320, costs, 2, floor), greedy)  # costs over A overflow
    np.testing.assert_allclose(water_filling(1e12, costs, 2, floor), even, atol=1e-9)
    for weight in (0.0, 1.0, 1e9):
        assert np.array_equal(water_filling(weight, np.full(5, 7.0), 2, floor), even)  # equal costs
        assert np.array_equal(water_filling(weight, costs, 5, floor), even)  # K = N
        assert np.array_equal(water_filling(weight, costs, 2, 1.0), even)  # epsilon = 1
    assert np.array_equal(water_filling(0.0, np.array([1.0]), 1, 0.5), [1.0])


def test_without_dispersion_the_cheapest_are_filled_over_the_floor() -> None:
    """Four of 30 at 1/K and a fifth with what is left at epsilon 1/4; r as epsilon goes to 0."""
    p, costs = water_filling(0.0, np.arange(30.0), 6, 0.25), np.arange(30.0)
    assert p[:4] == pytest.approx(np.full(4, 1 / 6)) and p[5:] == pytest.approx(np.full(25, 0.25 / 30))
    assert p[4] == pytest.approx(1 - 4 / 6 - 25 * 0.25 / 30)
    r = np.where(costs < 6, 1 / 6, 0.0)
    assert distance(water_filling(0.0, costs, 6, 1e-9), r) < 1e-8
    assert distance(water_filling(1e-9, costs, 6, 1e-9), r) < 1e-8


def test_dearer_clients_get_less() -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        costs = rng.random(12)
        p = water_filling(float(rng.uniform(0.1, 10)), costs, 3, 0.2)
        assert (np.diff(p[np.argsort(costs)]) <= 1e-15).all()
        raised = costs.copy()
        raised[4] += 0.5
        assert water_filling(1.0, raised, 3, 0.2)[4] <= water_filling(1.0, costs, 3, 0.2)[4] + 1e-15


@pytest.mark.parametrize(
    ("cohort", "floor", "weight"), [(6, 0.5, 1), (0, 0.5, 1), (2, 0, 1), (2, 1.1, 1), (2, 0.5, -1)]
)
def test_what_cannot_be_solved(cohort: int, floor: float, weight: float) -> None:
    with pytest.raises(ConfigError):
        water_filling(weight, np.arange(5.0), cohort, floor)


def runs_of(rng: np.random.Generator, a: np.ndarray, sd: np.ndarray, runs: int) -> np.ndarray:
    return a + sd[:, None] * rng.normal(size=(runs, *a.shape))


def test_statistics_are_unbiased() -> None:
    """4 runs of 5 clients, 4000 times: v, dispersions and products in the mean are those of the law."""
    rng = np.random.default_rng(2)
    a, sd, g = rng.normal(size=(5, 8)) * 3, rng.uniform(0.5, 1, size=5), rng.normal(size=8)
    found = [statistics(runs_of(rng, a, sd, 4), g) for _ in range(4000)]
    assert np.mean([s.variances for s in found], 0) == pytest.approx(8 * sd**2, rel=0.06)
    spread = np.square(a - a.mean(0)).sum(1)
    assert np.mean([s.dispersions for s in found], 0) == pytest.approx(spread, rel=0.02)
    assert np.mean([s.products for s in found], 0) == pytest.approx(a @ a.T, abs=0.55)
    naive = [
        np.square(u.mean(0) - u.mean((0, 1))).sum(1) for u in (runs_of(rng, a, sd, 4) for _ in range(600))
    ]
    assert (np.mean(naive, 0) > spread + 0.25).all()  # what is subtracted
    for s in found[:20]:
        assert np.linalg.eigvalsh(s.products).min() > -1e-9 and s.dispersions.min() >= 0


def test_the_reference_is_a_minimum() -> None:
    """(13) against 2,000 feasible points and the practical policies; the gap is honest."""
    rng = np.random.default_rng(9)
    a = rng.normal(size=(10, 6))
    known = statistics(runs_of(rng, a, rng.uniform(0.1, 1, 10), 8), a.mean(0))
    costs = known.costs(0.1, 3)
    best = reference(known, costs, 3, 0.2)
    at_best = known.objective(best.shares, costs)
    assert 0 <= best.gap + 1e-12 < 1e-9
    assert best.shares.sum() == pytest.approx(1) and best.shares.max() <= 1 / 3 + 1e-15
    for _ in range(2000):
        p = water_filling(float(rng.uniform(0, 1)), rng.random(10), 3, 0.2)
        assert known.objective(p, costs) >= at_best - 1e-9
    assert known.objective(relaxed(known, costs, 3, 0.2), costs) >= at_best
    upper = known.dispersions.sum() * 2  # (14) bounds (13) up to a constant of p (HO-FL eq. 89)
    constant = 2 * max(0.0, float(np.full(10, 0.1) @ known.products @ np.full(10, 0.1)
                           - 2 * known.with_gradient.mean() + known.gradient))  # fmt: skip
    for beta in (0.0, 0.5, 0.75):
        p = tilted(10, 3, range(3), beta).shares
        bound = upper * np.square(p - 0.1).sum() + costs @ p + constant
        assert known.objective(p, costs) <= bound + 1e-6


def test_without_noise_the_reference_is_the_gradient() -> None:
    """Costs 0 and g among the a_i: p reaches a bias of 0."""
    a = np.vstack([np.eye(4), -np.eye(4)])
    known = statistics(np.stack([a, a]), np.array([0.25, 0.25, 0.0, 0.0]))
    best = reference(known, np.zeros(8), 2, 0.1)
    assert known.objective(best.shares, np.zeros(8)) == pytest.approx(0, abs=1e-12)


def test_a_million_clients() -> None:
    """Policy, one draw and water-filling of 10^6 clients: under 2 s of one core."""
    scores, costs = np.arange(10**6) % 3 + 1.0, np.random.default_rng(1).random(10**6)
    begun = time.process_time()
    policy = dimension_aware(scores, 1000, 0.75, Key.of(1, "tie_break"))
    cohort = policy.draw(1, 1)
    p = water_filling(1e9, costs, 1000, 0.25)
    spent = time.process_time() - begun
    assert len(set(cohort)) == 1000 and cohort == sorted(cohort) and abs(p.sum() - 1) < 1e-12
    assert spent < 2.0


def test_draws_have_the_bits_they_had() -> None:
    """Cohorts of the code before it was made fast, at a size where each branch of the rounding is taken."""
    policy = dimension_aware([float(i % 7) for i in range(40)], 11, 0.75, Key.of(5, "tie_break"))
    assert policy.preferred == PREFERRED
    assert [policy.draw(5, t) for t in (1, 2, 3)] == DRAWS


PREFERRED = (0, 1, 7, 8, 14, 15, 21, 22, 28, 29, 35)
DRAWS = [
    [0, 1, 5, 14, 15, 19, 21, 28, 29, 35, 36],
    [0, 1, 7, 8, 14, 15, 18, 21, 29, 35, 38],
    [7, 8, 12, 14, 15, 16, 21, 22, 28, 29, 35],
]

# SPDX-License-Identifier: Apache-2.0
"""Schedules of the preference: their ends, what adaptive follows, and that they are pure."""

import math

import numpy as np
import pytest

from hofl.core.sampling import tilted
from hofl.theory.convergence import skew
from hofl.theory.optimal_sampling import water_filling
from hofl.theory.schedules import (
    Measured,
    Participation,
    Schedule,
    observe,
    policy_of_round,
    preference,
    probing_noise,
)

MEASURED = Schedule("measured", start=0.75, end=0.0)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_from_start_to_end_without_turning(kind: str) -> None:
    schedule = Schedule(kind, start=0.8, end=0.2)
    betas = [preference(schedule, t, 160, 30) for t in range(1, 161)]
    assert betas[0] == pytest.approx(0.8) and betas[-1] == pytest.approx(0.2)
    assert (np.diff(betas) < 0).all()
    assert betas[79] + betas[80] == pytest.approx(1.0)
    up = Schedule(kind, start=0.1, end=0.6)
    assert preference(up, 1, 1, 30) == pytest.approx(0.1) and preference(up, 200, 160, 30) == pytest.approx(
        0.6
    )


def test_cosine_is_flat_at_its_ends() -> None:
    linear, cosine = Schedule("linear", 0.8, 0.0), Schedule("cosine", 0.8, 0.0)
    assert preference(cosine, 10, 160, 30) > preference(linear, 10, 160, 30)
    assert preference(cosine, 150, 160, 30) < preference(linear, 150, 160, 30)


def test_constant_is_constant() -> None:
    assert {preference(Schedule("constant", 0.5, 0.1), t, 9, 3) for t in range(1, 10)} == {0.5}


def test_measured_before_it_knows_and_at_its_limits() -> None:
    assert preference(MEASURED, 5, 9, 30) == 0.75
    assert preference(MEASURED, 5, 9, 30, Measured(1, 1, 5, 1)) == 0.75  # no drift measured yet
    assert preference(MEASURED, 5, 9, 30, Measured(1, 1, 5, 1, -1, 1)) == 0.75  # noise and no drift at all
    assert preference(MEASURED, 5, 9, 30, Measured(5, 1, 1, 1, 1, 1)) == 0.0  # R is the noisier one
    assert preference(Schedule("measured", 0.75, 0.1), 5, 9, 30, Measured(1, 1, 1.1, 1, 9, 1)) == 0.1


def test_measured_is_the_minimum_of_the_relaxation_on_its_line() -> None:
    """(14) with c = (Lh/K) v along (1 - beta) u + beta r, by a fine grid, and below it water-filling."""
    n, cohort, v_r, v_o, drift = 20, 4, 1.0, 9.0, 0.4
    beta = preference(MEASURED, 5, 9, n, Measured(v_r, 1, v_o, 1, drift, 1))
    costs = np.where(np.arange(n) < cohort, v_r, v_o) / cohort

    def objective(p: np.ndarray) -> float:
        return float(2 * n * drift * n * np.square(p - 1 / n).sum() / n + costs @ p)

    grid = np.linspace(0, 0.75, 3001)
    values = [objective(tilted(n, cohort, range(cohort), b).shares) for b in grid]
    assert 0 < beta < 0.75 and beta == pytest.approx(grid[int(np.argmin(values))], abs=3e-4)
    best = water_filling(2 * n * drift, costs, cohort, 0.25)
    assert objective(best) <= min(values) + 1e-12
    assert best == pytest.approx(
        tilted(n, cohort, range(cohort), beta).shares
    )  # two kinds of clients: the same


def test_noise_of_probing_is_what_repetition_shows() -> None:
    """E steps of q probes of a fixed gradient: the variance of the sum, from one sum, within 5%."""
    rng, d, q, steps, g = np.random.default_rng(1), 12, 2, 3, np.random.default_rng(2).normal(size=12)
    u = rng.normal(size=(4000, steps, q, d))
    deltas = np.einsum("rsqd,d,rsqe->re", u, g, u) / q
    guessed = [probing_noise(Participation(True, d, q, steps, delta)) for delta in deltas]
    assert np.mean(guessed) == pytest.approx(np.square(deltas - steps * g).sum(1).mean(), rel=0.05)


def test_observe_tells_noise_from_drift() -> None:
    """Clients of two gradients 2 apart in each of 8 coordinates and probed bottoms of two sizes."""
    rng, measured, d, q, steps = np.random.default_rng(3), Measured(), 8, 2, 2
    for _ in range(400):
        cohort = []
        for client in range(6):
            bottom, g = (2, 6)[client % 2], np.full(d, 1.0 if client < 3 else -1.0)
            u = rng.normal(size=(steps, q, bottom))
            update = steps * g
            update[:bottom] = np.einsum("sqd,d,sqe->e", u, g[:bottom], u) / q
            cohort.append(Participation(client % 2 == 0, bottom, q, steps, update.astype(np.float32)))
        measured = observe(measured, cohort, memory=0.99)
    kappa = {2: 1.5, 6: 3.5}
    exact = {b: steps * kappa[b] * b for b in kappa}
    assert measured.preferred / measured.preferred_weight == pytest.approx(exact[2], rel=0.15)
    assert measured.other / measured.other_weight == pytest.approx(exact[6], rel=0.15)
    drift = 6 / 5 * steps**2 * d  # of a sample of six, half of each kind
    assert measured.drift / measured.drift_weight == pytest.approx(drift, rel=0.15)
    assert 0 < preference(Schedule("measured", 0.9), 9, 99, 6, measured) < 0.9


def test_a_round_without_news_leaves_what_is_known() -> None:
    one = Participation(True, 2, 1, 1, np.ones(3, dtype=np.float32))
    known = observe(Measured(), [one], 0.5)
    assert (known.preferred_weight, known.other_weight, known.drift_weight) == (1, 0, 0)
    assert known.ratio is None and observe(known, [], 0.5) == known
    again = observe(known, [one], 0.5)
    assert again.preferred / again.preferred_weight == pytest.approx(known.preferred)
    assert Measured.from_values(again.to_values()) == again
    full = Participation(False, 0, 2, 5, np.ones(3, dtype=np.float32))
    assert probing_noise(full) == 0


def test_policy_of_a_round() -> None:
    base = tilted(30, 6, range(6), 0.75)
    assert policy_of_round(base, 0.75).shares.tobytes() == base.shares.tobytes()
    for beta in (0.0, 0.3, 0.6):
        moved = policy_of_round(base, beta)
        assert moved.preferred == base.preferred and math.isclose(
            skew(moved.shares), 4 * beta**2, abs_tol=1e-12
        )


def test_noise_is_of_the_law_of_directions() -> None:
    """(d + 1) / q, (d - 1) / q, and 0 where all rows of a Hadamard matrix are probed."""
    update = np.array([2.0, 2.0, 2.0, 2.0], dtype=np.float32)
    for family, kappa in (("gaussian", 5 / 4), ("rademacher", 3 / 4), ("sphere", 3 / 4), ("hadamard", 0.0)):
        client = Participation(True, 4, probes=4, steps=2, update=update, family=family)
        assert probing_noise(client) == pytest.approx(16 * kappa / (2 + kappa))


def test_squares_of_long_updates_are_exact_to_float64() -> None:
    """Across the blocks that are added elementwise, against an exact sum."""
    update = np.random.default_rng(4).normal(size=40_001).astype(np.float32)
    exact = math.fsum(float(x) ** 2 for x in update)
    kappa = 40_002 / 3
    client = Participation(False, 40_001, probes=3, steps=5, update=update)
    assert probing_noise(client) == pytest.approx(exact * kappa / (5 + kappa), rel=1e-14)

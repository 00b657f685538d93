# SPDX-License-Identifier: Apache-2.0
"""Theorem C.9 in numbers: reference values, conditions, what a policy changes (SYSTEMS 4.2, 6.1)."""

import math

import numpy as np
import pytest

from hofl.core.sampling import tilted, uniform
from hofl.theory.convergence import Assumptions, descent, dimension, guarantee, preference_cap, skew
from hofl.theory.moments import moments, trajectory
from hofl.theory.split_rates import RATES, Scale, radius, rate, step_size

QWEN = [311_296] * 10 + [622_592] * 10 + [933_888] * 10


def test_reference_numbers() -> None:
    """N=4, K=2, E=2, q=2, p=1/4, d_zo = (0, 4, 4, 8), L = L_s = 1, sigma = a_H = zeta = 0, Delta = 1."""
    found = guarantee([0.25] * 4, [0, 4, 4, 8], probes=2, steps=2, assumptions=Assumptions())
    assert (found.dimension, found.c0, found.c_star) == (3, 5677, 4_640_879_376)
    assert (found.least_rounds, found.remainder) == (13_922_638_128, 336)
    assert found.step_size == pytest.approx(2.44652e-6, rel=2e-6)
    assert found.radius == pytest.approx(
        2.09022e-4, rel=3e-5
    )  # 2.090164e-4: the reference's fifth digit is off
    assert found.bound == pytest.approx(0.666725, abs=5e-7)
    assert found.horizon_holds and found.skew_holds and found.bias == 0


def test_reference_numbers_of_qwen() -> None:
    """Three tiers of ten, beta 0.75, q=2, L = L_s = sigma^2 = 1: D, C_0, C_*, T_min and mu."""
    shares = tilted(30, 6, range(6), 0.75).shares
    found = guarantee(shares, QWEN, probes=2, steps=5, assumptions=Assumptions(variance=1.0))
    assert found.floor == pytest.approx(0.25) and found.skew == pytest.approx(2.25)
    assert found.dimension == pytest.approx(194_561) and found.c0 == pytest.approx(77_293)
    assert found.c_star == pytest.approx(8.603e11, rel=1e-4)
    assert found.least_rounds == pytest.approx(1.67e17, rel=5e-3)
    assert found.radius == pytest.approx(3e-12, rel=0.1)
    practical = guarantee(shares, QWEN, probes=2, steps=5, assumptions=Assumptions(), rounds=160)
    assert not practical.horizon_holds  # no practical run meets it


def test_a_preference_takes_the_dimension_down_and_the_skew_up() -> None:
    """Uniform: D = 1 + 622592 / 2; at beta 0.75 five of six draws are of the tier of 311,296."""
    assert dimension(uniform(30, 6).shares, QWEN, 2) == pytest.approx(311_297)
    ratio = dimension(tilted(30, 6, range(6), 0.75).shares, QWEN, 2) / 311_297
    assert ratio == pytest.approx(0.625, abs=1e-3)
    a = Assumptions(heterogeneity=1.0, affine=0.1)
    biased = guarantee(tilted(30, 6, range(6), 0.75).shares, QWEN, probes=2, steps=5, assumptions=a)
    assert biased.bias == pytest.approx(6 * 2.25) and not biased.skew_holds
    assert guarantee(uniform(30, 6).shares, QWEN, probes=2, steps=5, assumptions=a).bias == pytest.approx(0)


@pytest.mark.parametrize("seed", range(20))
def test_the_constants_meet_every_condition_of_the_proof(seed: int) -> None:
    """At T_min the step obeys eq. (78) and (80), whatever the numbers."""
    rng = np.random.default_rng(seed)
    n, cohort, steps, q = int(rng.integers(2, 9)), 2, int(rng.integers(1, 7)), int(rng.integers(1, 5))
    shares = tilted(n, cohort, range(cohort) if n > cohort else (), float(rng.uniform(0, 0.9))).shares
    d_zo = rng.integers(0, 50, size=n).tolist()
    a = Assumptions(*rng.uniform(0.3, 3.0, size=6))
    g = guarantee(shares, d_zo, probes=q, steps=steps, assumptions=a)
    assert a.smoothness * g.step_size * steps <= 1
    for d in d_zo:
        client = moments(d, q, g.radius or 0.0, surrogate=a.surrogate, variance=a.variance)
        local = trajectory(client, 1.0, 1.0, rate=g.step_size, steps=steps, smoothness=a.smoothness)
        assert local.holds
        assert a.smoothness * g.step_size * client.kappa / cohort <= 1
    spread = g.step_size * (steps + g.dimension) / cohort + (g.step_size * (steps - 1)) ** 2 * g.dimension
    assert spread <= 3 * math.sqrt(g.dimension / g.rounds)
    assert g.c0 * (1 + a.affine) * spread <= 0.25 * (1 + 1e-12)
    if g.radius:
        assert g.radius**2 * g.remainder == pytest.approx(math.sqrt(g.dimension / g.rounds))


def test_the_bound_falls_as_the_root_of_the_rounds() -> None:
    first, later = (
        guarantee([0.5, 0.5], [0, 8], probes=1, steps=1, assumptions=Assumptions(), rounds=t)
        for t in (100, 400)
    )
    assert first.progress == pytest.approx(2 * later.progress)


def test_first_order_clients_need_no_radius() -> None:
    found = guarantee([0.5, 0.5], [0, 0], probes=2, steps=3, assumptions=Assumptions())
    assert found.dimension == 1 and found.radius is None


def test_a_client_without_a_share_has_no_guarantee() -> None:
    with pytest.raises(ValueError, match="above 0"):
        guarantee([1.0, 0.0], [4, 4], probes=1, steps=1, assumptions=Assumptions())


def test_skew_equals_the_closed_form_and_its_cap() -> None:
    for beta in (0.0, 0.25, 0.5, 0.75):
        assert skew(tilted(30, 6, range(6), beta).shares) == pytest.approx(beta**2 * 4)
    cap = preference_cap(0.05, 30, 6)
    assert 0.05 * skew(tilted(30, 6, range(6), cap).shares) == pytest.approx(1 / 12)


def test_descent_refuses_too_long_a_step() -> None:
    assert descent(2.0, 0.1, 5, 10, bias=0.0, noise=0.0, smooth=2.0) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="1/L"):
        descent(2.0, 0.3, 5, 10, bias=0.0, noise=0.0, smooth=1.0)


def test_rates_of_ho_sfl() -> None:
    """OPT-125M cut at block 6, T = 800, q = 2: the radius float32 cannot resolve (SYSTEMS 2.2)."""
    assert radius(800, 147_456, 2) == pytest.approx(5e-8, rel=0.1)
    assert step_size(800, 147_456, 2) == pytest.approx(math.sqrt(2 / (800 * 147_456)))
    scale = Scale(rounds=800, d=294_912, d_c=147_456, probes=2)
    four = Scale(rounds=3200, d=294_912, d_c=147_456, probes=2)
    assert rate("ho_sfl", scale) == pytest.approx(math.sqrt(147_456 / 1600))
    for name in RATES:  # all fall as the root of the rounds
        assert rate(name, scale) == pytest.approx(2 * rate(name, four)), name


def test_every_method_has_a_rate_or_none() -> None:
    from hofl.algorithms import ALGORITHMS

    assert set(ALGORITHMS) - set(RATES) == {"hiso"}

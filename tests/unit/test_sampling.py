# SPDX-License-Identifier: Apache-2.0
"""Dependent rounding by exact enumeration with fractions, and HO-FL's policy (SYSTEMS 3.1-3.3)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction as F
from itertools import combinations, permutations

import numpy as np
import pytest

from hofl.core.keys import Key
from hofl.core.sampling import dependent_rounding, dimension_aware, round_in_order, uniform
from hofl.errors import ConfigError

Law = dict[tuple[int, ...], F]


class Undecided(Exception):
    pass


def outcomes(x: Sequence[F], order: Sequence[int]) -> Iterator[tuple[tuple[int, ...], F]]:
    """Every outcome along one order with its exact probability, by trying all sequences of coins."""
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        tosses = pending.pop()
        used, weight = iter(tosses), [F(1)]

        def coin(p: F, used: Iterator[bool] = used, weight: list[F] = weight) -> bool:
            try:
                up = next(used)
            except StopIteration:
                raise Undecided from None
            weight[0] *= p if up else 1 - p
            return up

        try:
            members = tuple(sorted(round_in_order(x, order, coin)))
        except Undecided:
            pending += [(*tosses, True), (*tosses, False)]
            continue
        if weight[0]:
            yield members, weight[0]


def law(x: Sequence[F]) -> Law:
    orders = list(permutations(range(len(x))))
    total: Law = defaultdict(F)
    for order in orders:
        for members, weight in outcomes(x, order):
            total[members] += weight / len(orders)
    return total


def covariances(x: Sequence[F], sets: Law) -> dict[tuple[int, int], F]:
    joint = {
        pair: sum(w for s, w in sets.items() if set(pair) <= set(s))
        for pair in combinations(range(len(x)), 2)
    }
    return {(i, j): p - x[i] * x[j] for (i, j), p in joint.items()}


CASES = [
    [F(1, 2)] * 4,
    [F(2, 5)] * 5,
    [F(4, 5), F(4, 5), F(1, 5), F(1, 10), F(1, 10)],
    [F(1), F(1, 2), F(1, 4), F(1, 4), F(0)],
    [F(1, 3), F(2, 3), F(1)],
]


@pytest.mark.parametrize("x", CASES, ids=str)
def test_marginals_cardinality_and_covariances(x: list[F]) -> None:
    sets = law(x)
    assert sum(sets.values()) == 1
    assert {len(s) for s in sets} == {int(sum(x))}
    for i, share in enumerate(x):
        assert sum(w for s, w in sets.items() if i in s) == share
    cov = covariances(x, sets)
    assert max(cov.values()) <= 0
    for i, share in enumerate(x):  # row sums of the covariance matrix are 0
        assert share * (1 - share) + sum(c for pair, c in cov.items() if i in pair) == 0


def test_reference_values() -> None:
    fifths = law(CASES[1])
    assert len(fifths) == 10 and set(fifths.values()) == {F(1, 10)}
    assert set(covariances(CASES[1], fifths).values()) == {F(-3, 50)}
    assert max(covariances(CASES[2], law(CASES[2])).values()) == F(-163, 24300)


def test_six_halves() -> None:
    """All 20 triples of six, 1/20 each, covariance -1/20."""
    x = [F(1, 2)] * 6
    sets = law(x)
    assert len(sets) == 20 and set(sets.values()) == {F(1, 20)}
    assert set(covariances(x, sets).values()) == {F(-1, 20)}


def test_the_permutation_matters() -> None:
    sets = dict(outcomes([F(1, 2)] * 4, range(4)))
    pairs: Law = defaultdict(F)
    for members, weight in outcomes([F(1, 2)] * 4, range(4)):
        pairs[members] += weight
    assert len(pairs) == 4 and set(pairs.values()) == {F(1, 4)} and len(sets) == 4


def test_degenerate_entries_use_no_coin() -> None:
    def never(_: float) -> bool:
        raise AssertionError("a coin was tossed")

    assert sorted(round_in_order([1.0, 0.0, 1.0, 0.0], [3, 2, 1, 0], never)) == [0, 2]


def test_draws_are_functions_of_the_round() -> None:
    policy = dimension_aware([3.0] * 10 + [2.0] * 10 + [1.0] * 10, 6, 0.75, Key.of(42, "tie_break"))
    assert policy.draw(42, 5) == policy.draw(42, 5)
    assert policy.draw(42, 5) != policy.draw(42, 6) or policy.draw(42, 5) != policy.draw(42, 7)
    assert policy.draw(42, 5, attempt=1) != policy.draw(42, 5) or policy.draw(42, 6, 1) != policy.draw(42, 6)
    for t in range(50):
        cohort = policy.draw(42, t)
        assert len(set(cohort)) == 6 and cohort == sorted(cohort)


def test_frequencies_at_paper_size() -> None:
    """N=30, K=6, beta=0.75: preferred clients in with 0.8, others with 0.05 (3 sigma of 4,000 draws)."""
    policy = dimension_aware([16.0] * 10 + [8.0] * 10 + [24.0] * 10, 6, 0.75, Key.of(7, "tie_break"))
    assert len(policy.preferred) == 6 and set(policy.preferred) <= set(range(10, 20))
    np.testing.assert_allclose(6 * policy.shares[list(policy.preferred)], 0.8)
    counts = np.zeros(30)
    for t in range(4000):
        counts[policy.draw(7, t)] += 1
    preferred = np.zeros(30, dtype=bool)
    preferred[list(policy.preferred)] = True
    assert np.abs(counts[preferred] / 4000 - 0.8).max() < 4 * 0.0063
    assert np.abs(counts[~preferred] / 4000 - 0.05).max() < 4 * 0.0035


@pytest.mark.parametrize(("beta", "chi2"), [(0.0, 0.0), (0.25, 0.25), (0.5, 1.0), (0.75, 2.25)])
def test_policy_closed_form(beta: float, chi2: float) -> None:
    """N ||p - u||^2 = beta^2 (N/K - 1) at N=30, K=6 (SYSTEMS 3.3)."""
    policy = dimension_aware(list(range(30)), 6, beta, Key.of(1, "tie_break"))
    assert policy.shares.sum() == pytest.approx(1) and policy.shares.max() <= 1 / 6 + 1e-12
    assert 30 * ((policy.shares - 1 / 30) ** 2).sum() == pytest.approx(chi2)
    assert policy.preferred == tuple(range(6))


def test_equal_scores_are_uniform_and_ties_are_split_by_the_key() -> None:
    assert dimension_aware([5.0] * 9, 3, 0.9, Key.of(1, "tie_break")).preferred == ()
    sets = {dimension_aware([1.0] * 8 + [2.0], 3, 0.5, Key.of(s, "tie_break")).preferred for s in range(20)}
    assert len(sets) > 5


def test_everybody_and_one() -> None:
    assert uniform(4, 4).draw(0, 0) == [0, 1, 2, 3]
    assert len(dimension_aware([1.0, 2.0, 3.0], 1, 0.9, Key.of(1, "tie_break")).draw(0, 0)) == 1


@pytest.mark.parametrize("call", [
    lambda: dimension_aware([1.0, 2.0], 1, 1.0, Key.of(1, "tie_break")),
    lambda: dimension_aware([1.0, 2.0], 1, -0.1, Key.of(1, "tie_break")),
    lambda: uniform(5, 6),
    lambda: uniform(5, 0),
    lambda: dependent_rounding(np.array([0.5, 0.7]), Key.of(1, "cohort_order"), Key.of(1, "cohort_coins")),
    lambda: dependent_rounding(np.array([1.5, 0.5]), Key.of(1, "cohort_order"), Key.of(1, "cohort_coins")),
])  # fmt: skip
def test_bad_input(call) -> None:
    with pytest.raises(ConfigError):
        call()

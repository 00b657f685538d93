# SPDX-License-Identifier: Apache-2.0
"""Cohorts: dependent rounding (exactly K distinct clients, marginals as asked) and HO-FL's policy.

Source: HO-FL Algorithm 2 (dependent rounding) and section 4 (dimension-aware client sampling).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError

Number = float | Fraction
TOLERANCE = 1e-12
"""Inclusion probabilities this near to 0 or 1 are taken as 0 or 1."""


def round_in_order(
    inclusion: Sequence[Number], order: Sequence[int], coin: Callable[[Number], bool]
) -> list[int]:
    """Dependent rounding along a given order; exact if the numbers are fractions.

    Two fractional entries meet at a time; mass moves between them until one is 0 or 1, by a coin that
    keeps both means. The other is carried to the next, so N entries take at most N-1 coins.

    Args:
        inclusion: x in [0, 1]^N with an integral sum.
        order: a permutation of ``0 .. N-1``.
        coin: probability -> True with that probability.

    Returns:
        the members, in the order they were decided.
    """
    members: list[int] = []
    carry, x = -1, inclusion[0] * 0
    none, full = TOLERANCE, 1 - TOLERANCE
    for j in order:
        y = inclusion[j]
        if not none < y < full:
            if y > none:
                members.append(j)
        elif carry < 0:
            carry, x = j, y
        elif (mass := x + y) <= 1:  # one of the two gives the other all it has
            if not coin(x / mass):
                carry = j
            x = mass
            if x >= full:
                members.append(carry)
                carry = -1
        else:  # one of the two is filled to 1 from the other
            if coin((1 - y) / (2 - mass)):
                members.append(carry)
                carry = j
            else:
                members.append(j)
            x = mass - 1
            if x <= none:
                carry = -1
    if carry >= 0 and x > Fraction(1, 2):  # what rounding left over of an integral sum
        members.append(carry)
    return members


def dependent_rounding(inclusion: NDArray[np.float64], order: Key, coins: Key) -> NDArray[np.int64]:
    """Draw exactly K distinct clients with ``P(i in S) = inclusion[i]`` and covariances at most 0.

    Args:
        inclusion: float64 [N] in [0, 1], with an integral sum K.
        order: key of this call's permutation.
        coins: key of this call's coins.

    Returns:
        int64 [K], ascending.

    Raises:
        ConfigError: the sum is not integral or an entry is outside [0, 1].
    """
    total = float(np.sum(inclusion))
    cohort = round(total)
    if abs(total - cohort) > 1e-6 or inclusion.min() < -TOLERANCE or inclusion.max() > 1 + TOLERANCE:
        raise ConfigError(
            f"inclusion probabilities must be in [0, 1] and sum to a whole number, not {total:.6g}"
        )
    toss = iter(coins.uniforms(len(inclusion)).tolist()).__next__
    permutation = order.permutation(len(inclusion))
    # gathered first: a walk through memory in random order costs a million clients a second
    places = round_in_order(inclusion[permutation].tolist(), range(len(inclusion)), lambda p: toss() < p)
    if len(places) != cohort:
        raise AssertionError(f"dependent rounding gave {len(places)} members for K = {cohort}")
    return np.sort(permutation[places])


@dataclass(frozen=True)
class Policy:
    """Selection shares, fixed for a run.

    Attributes:
        shares: p, float64 [N], sums to 1, each at most 1/K; inclusion probability is ``K p``.
        cohort: K.
        preferred: the set R of clients the policy favours; empty when it favours none.
    """

    shares: NDArray[np.float64]
    cohort: int
    preferred: tuple[int, ...] = ()

    def draw(self, seed: int, round_number: int, attempt: int = 0) -> list[int]:
        """The cohort of a round, ascending; a function of (seed, round, attempt) alone."""
        order = Key.of(seed, "cohort_order", round_number, attempt)
        coins = Key.of(seed, "cohort_coins", round_number, attempt)
        inclusion = np.minimum(self.cohort * self.shares, 1.0)
        return [int(i) for i in dependent_rounding(inclusion, order, coins)]


def uniform(clients: int, cohort: int) -> Policy:
    """Every client with share 1/N.

    Raises:
        ConfigError: the cohort is not in ``1 .. N``.
    """
    if not 1 <= cohort <= clients:
        raise ConfigError(f"cohort.size = {cohort} must be between 1 and the {clients} clients")
    return Policy(np.full(clients, 1.0 / clients), cohort)


def tilted(clients: int, cohort: int, preferred: Sequence[int], preference: float) -> Policy:
    """``p = (1 - beta) u + beta r``, r uniform on the preferred clients (HO-FL eq. 16).

    Args:
        clients: N.
        cohort: K.
        preferred: the K clients of R, ascending; empty for u whatever beta is.
        preference: beta in [0, 1).

    Raises:
        ConfigError: beta is outside [0, 1) or K outside 1..N.
    """
    if not 0.0 <= preference < 1.0:
        raise ConfigError(f"cohort.preference = {preference} must be in [0, 1)")
    policy = uniform(clients, cohort)
    if not len(preferred):
        return policy
    shares = (1.0 - preference) * policy.shares
    shares[np.asarray(preferred)] += preference / cohort
    return Policy(shares, cohort, tuple(int(i) for i in preferred))


def dimension_aware(scores: Sequence[float], cohort: int, preference: float, tie_break: Key) -> Policy:
    """HO-FL's policy ``p = (1 - beta) u + beta r``, r uniform on the K clients of least score.

    Ties are split by one random permutation drawn at the start of the run; if all scores are equal
    nobody is preferred and p is uniform.

    Args:
        scores: ``d_zo[i] / q`` of each client: what its bottom adds to the estimator's variance.
        cohort: K.
        preference: beta in [0, 1).
        tie_break: key of the permutation.

    Raises:
        ConfigError: beta is outside [0, 1) or K outside 1..N.
    """
    costs = np.asarray(scores, dtype=np.float64)
    if not len(costs) or costs.min() == costs.max():
        return tilted(len(costs), cohort, (), preference)
    shuffled = tie_break.permutation(len(costs))
    by_score = shuffled[np.argsort(costs[shuffled], kind="stable")]
    return tilted(len(costs), cohort, np.sort(by_score[: max(cohort, 0)]).tolist(), preference)

# SPDX-License-Identifier: Apache-2.0
"""What a selection policy covers and costs: one row a preference, and averages over drawn rounds.

Source: HO-FL section 5, App. D.2 (coverage) and E.5 (the right panel of Figure 2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hofl.core.sampling import Policy, tilted
from hofl.errors import ConfigError
from hofl.theory.convergence import skew

Floats = NDArray[np.float64]


def closed_form_skew(preference: float, clients: int, cohort: int) -> float:
    """``chi^2 = N ||p - u||^2 = beta^2 (N/K - 1)`` of a policy that prefers somebody (HO-FL section 5).

    >>> [closed_form_skew(beta, 30, 6) for beta in (0, 0.25, 0.5, 0.75)]
    [0.0, 0.25, 1.0, 2.25]
    """
    return preference**2 * (clients / cohort - 1)


def inclusion(policy: Policy) -> Floats:
    """``K p``, the probability that a client is in a round's cohort: float64 [N]."""
    return np.minimum(policy.cohort * policy.shares, 1.0)


def coverage(preference: float, clients: int, cohort: int, rounds: int) -> float:
    """Rounds in which a client that is not preferred is expected: ``(K T / N) (1 - beta)`` (HO-FL eq. 92).

    >>> [coverage(beta, 30, 6, 160) for beta in (0, 0.25, 0.5, 0.75)]
    [32.0, 24.0, 16.0, 8.0]
    """
    return cohort * rounds / clients * (1 - preference)


def never_seen(preference: float, clients: int, cohort: int, rounds: int) -> float:
    """The chance that a given client that is not preferred takes part in no round at all.

    >>> f"{never_seen(0.75, 30, 6, 160):.1e}"
    '2.7e-04'
    """
    return float((1 - cohort / clients * (1 - preference)) ** rounds)


def largest_preference(least: float, *segments: tuple[int, int, int]) -> float:
    """The largest beta that expects everybody in ``least`` rounds: ``1 - m N / (K T)`` (HO-FL eq. 93).

    Where clients or cohorts change within a run, ``K T / N`` is summed over its segments: of a client that
    can be drawn in all of them.

    Args:
        least: m.
        segments: (N, K, T) of each.

    Raises:
        ConfigError: even uniform sampling does not expect that many.

    >>> largest_preference(8, (30, 6, 160)), largest_preference(32, (30, 6, 160))
    (0.75, 0.0)
    >>> largest_preference(8, (30, 6, 80), (20, 4, 80))
    0.75
    """
    most = sum(cohort * rounds / clients for clients, cohort, rounds in segments)
    if not 0 <= least <= most:
        terms = " + ".join(f"{cohort} x {rounds} / {clients}" for clients, cohort, rounds in segments)
        raise ConfigError(
            f"a coverage of {least:g} rounds: must be between 0 and K T / N = {terms}"
            f" = {most:g}, what uniform sampling expects of each client"
        )
    return 1 - least / most


@dataclass(frozen=True)
class Row:
    """One preference and what it does; of groups, the first number is of preferred clients.

    Attributes:
        preference: beta.
        skew: chi^2.
        dimension: D, the sampling-weighted dimension; None where nobody probes.
        inclusion: chance to be in a round's cohort, of a preferred client and of another.
        participations: expected rounds of each, of all T.
        never: chance that a given other client takes part in none.
        cohort: expected clients of a round by boundary, ascending.
        totals: expected sums over a round's cohort, by name (``uplink``, say).
    """

    preference: float
    skew: float
    dimension: float | None
    inclusion: tuple[float | None, float]
    participations: tuple[float | None, float]
    never: float
    cohort: dict[int, float]
    totals: dict[str, float]


def policy_row(
    preference: float,
    policy: Policy,
    boundaries: Sequence[int],
    rounds: int,
    *,
    dimensions: Mapping[int, float] | None = None,
    profiles: Mapping[str, Mapping[int, float]] | None = None,
) -> Row:
    """What a policy covers and costs, by expectation.

    Args:
        preference: beta of the policy.
        policy: shares of the clients.
        boundaries: one for each of them.
        rounds: T.
        dimensions: ``d_zo / q`` by boundary, for D.
        profiles: by name, what one participation adds to a round's total at each boundary.

    >>> policy = tilted(30, 6, range(6), 0.75)
    >>> row = policy_row(0.75, policy, [8] * 10 + [16] * 10 + [24] * 10, 160)
    >>> {b: round(n, 9) for b, n in row.cohort.items()}, [round(x, 9) for x in row.inclusion]
    ({8: 5.0, 16: 0.5, 24: 0.5}, [0.8, 0.05])
    """
    chances = inclusion(policy)
    cuts = np.asarray(boundaries)
    cohort = {int(b): float(chances[cuts == b].sum()) for b in np.unique(cuts)}
    first = float(chances[policy.preferred[0]]) if policy.preferred else None
    other = float(chances.min())
    means = {
        name: sum(n * profile[b] for b, n in cohort.items()) for name, profile in (profiles or {}).items()
    }
    weighted = None
    if dimensions:
        weighted = 1 + sum(n * dimensions[b] for b, n in cohort.items()) / policy.cohort
    return Row(
        preference=preference,
        skew=skew(policy.shares),
        dimension=weighted,
        inclusion=(first, other),
        participations=(None if first is None else rounds * first, rounds * other),
        never=(1 - other) ** rounds,
        cohort=cohort,
        totals=means,
    )


@dataclass(frozen=True)
class Average:
    """A round's total of a profile, over drawn rounds and by expectation.

    Attributes:
        preference: beta.
        drawn: mean over the draws.
        expected: ``K sum_i p_i m_i``.
        largest: the largest round's total among the draws.
    """

    preference: float
    drawn: float
    expected: float
    largest: float


def round_averages(
    profile: Mapping[int, float],
    boundaries: Sequence[int],
    base: Policy,
    preferences: Sequence[float],
    *,
    seed: int,
    draws: int = 160,
    first: int = 1,
) -> list[Average]:
    """What the cohorts of a run's rounds need together, by preference: the right panel of HO-FL's Figure 2.

    Args:
        profile: what one participation needs at each boundary, bytes of memory say.
        boundaries: one for each client of ``base``.
        base: gives the clients, the cohort and the set R of preferred clients.
        preferences: the betas.
        seed: of the draws; round t of the run with that seed has cohort t.
        draws: rounds.
        first: the first of them.

    Returns:
        one average for each preference.
    """
    each = np.array([profile[b] for b in boundaries], dtype=np.float64)
    found = []
    for beta in preferences:
        policy = tilted(len(each), base.cohort, base.preferred, beta)
        totals = [float(each[policy.draw(seed, t)].sum()) for t in range(first, first + draws)]
        expected = float(inclusion(policy) @ each)
        found.append(Average(beta, float(np.mean(totals)), expected, max(totals)))
    return found

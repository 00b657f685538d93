# SPDX-License-Identifier: Apache-2.0
"""Bytes of a participation by formula, in step and at first contact."""

from dataclasses import replace
from statistics import fmean

from hofl.algorithms import ALGORITHMS
from hofl.build import optimizer_of
from hofl.local_work import sizes_at, steps_at
from hofl.session import Session
from hofl.theory import traffic
from hofl.theory.communication import Traffic
from hofl.theory.traffic import Sizes

SHARED = {"ho_sfl": 1, "decomfl": 0, "hiso": 0}
"""Methods whose clients catch up on rounds of others, with the rounds of their own that they have applied
when they come back: a client of HO-SFL has taken the step of its last round, one of DeComFL has not."""


def lag(session: Session) -> int | None:
    """Rounds that a client lacks when it is drawn again, on average; None where it then gets a snapshot."""
    config = session.config
    if config.algorithm not in SHARED:
        return 0
    between = len(session.able) / session.policy.cohort
    missed = max(0, round(between) - SHARED[config.algorithm])
    sizes = session.sizes[session.cuts[0]]
    shared = sizes.d_c if ALGORITHMS[config.algorithm].split else sizes.d
    steps = 1 if config.algorithm == "ho_sfl" else sizes.steps
    window = max(1, min(config.split.history, shared // max(1, 2 * steps * sizes.probes)))
    return missed if missed <= window else None


def moved(session: Session, boundary: int) -> dict[str, int]:
    """Payload bytes of a participation: ``up``, ``down`` of a usual one, ``first_down`` at first contact."""
    sizes = sizes_at(session, boundary, round(fmean(steps_at(session, boundary))))  # of clients on average
    usual, first = (replace(sizes, lag=of, moments=_moments(session)) for of in (lag(session), None))
    ways = _traffic(session, usual)
    down = sum(_traffic(session, first)["down"].values())
    return {"up": sum(ways["up"].values()), "down": sum(ways["down"].values()), "first_down": down}


def _traffic(session: Session, sizes: Sizes) -> Traffic:
    config = session.config
    if config.algorithm == "decomfl" and config.zo.average == "models":
        return traffic.of("ho_fl", replace(sizes, d_c=sizes.d))
    return traffic.of(config.algorithm, sizes)


def _moments(session: Session) -> int:
    """Vectors of optimizer state that go with a snapshot; HiSo's diagonal is one."""
    if session.config.algorithm == "hiso":
        return 1
    return len(optimizer_of(session.config.bottom_optimizer).init(0))

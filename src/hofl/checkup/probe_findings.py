# SPDX-License-Identifier: Apache-2.0
"""What to expect of a run's probes: whether they are noise, find the gradient, and are enough."""

import math
from collections.abc import Callable, Iterator
from statistics import fmean

from hofl.algorithms import ALGORITHMS
from hofl.build import steps_of
from hofl.checkup.finding import Finding, Row, finding, probed, where
from hofl.config import Config
from hofl.local_work import steps_at
from hofl.session import Session

WEAK = 0.5
"""A zo_signal below this is noise, as in a run's own warning."""
ASTRAY = 0.3
"""Share of the expected cosine below which an estimate has lost the gradient: 2.5 standard deviations at
``PAIRS`` probes."""
PAIRS = 8
FEW = 0.5
"""Probes of a run for each number they move, below which a bottom gets less than a third of its worth."""
MANY = 2**13
"""Probes of a step that are still suggested: 32 KiB of scalars."""
SIGN_LIKE = 0.01
"""Probes of a step for each number, below which AdamW's step is the sign of chance."""
SHARED_KEYS = ("ho_sfl", "decomfl", "hiso")
"""Methods whose clients probe along the same directions."""
RESET = ("ho_fl", "heron_sfl", "zo_sfl", "fedzo")
"""Methods whose bottom optimizer is new in each participation; DeComFL is one where it averages models."""


def weak_signal(session: Session, found: Row) -> Iterator[Finding]:
    """Differences that are rounding noise, or curvature."""
    known = [t for t in probed(found) if t["probes"]["signal"] is not None]
    if not known or (worst := min(known, key=lambda t: t["probes"]["signal"]))["probes"]["signal"] >= WEAK:
        return
    config, probes = session.config, worst["probes"]
    ways = ['zo.estimator = "tangent"'] * ("tangent" in ALGORITHMS[config.algorithm].estimators)
    ways += ['model.dtype = "float32"' if config.model.dtype != "float32" else "another zo.radius"]
    yield finding(
        "weak_signal",
        f"zo_signal {probes['signal']:.2f} ({where(session, worst)}, {probes['pairs']} probes): the probes "
        f"are rounding noise at this dtype ({config.model.dtype}) and radius ({config.zo.radius:g}): use "
        f"{' or '.join(ways)}",
        signal=probes["signal"],
        boundary=worst["boundary"],
        pairs=probes["pairs"],
    )


def astray(session: Session, found: Row) -> Iterator[Finding]:
    """Estimates that have less of the gradient than exact scalars would."""
    for tier in probed(found):
        probes = tier["probes"]
        measured, bound = probes["cosine"], ASTRAY * probes["expected_cosine"]
        if measured is not None and probes["pairs"] >= PAIRS and measured < bound:
            yield finding(
                "cosine_low",
                f"{where(session, tier)}: the estimate's cosine with the gradient is {measured:.2g}, where "
                f"exact scalars have {probes['expected_cosine']:.2g}: the probes do not find the gradient",
                boundary=tier["boundary"],
                cosine=measured,
                expected_cosine=probes["expected_cosine"],
            )


def little_movement(session: Session, found: Row) -> Iterator[Finding]:
    """Too few probes in the whole run for the numbers they are to move."""
    tiers, config = probed(found), session.config
    if not tiers:
        return
    worst = min(tiers, key=lambda t: t["probes"]["expected_cosine"])
    d, expected = worst["probes"]["dimension"], worst["probes"]["expected_cosine"]
    shared = config.algorithm in SHARED_KEYS
    steps = config.rounds * (steps_of(config) if shared else _probing_steps(session, found))
    total = steps * config.zo.probes
    if total >= FEW * d:
        return
    recovered = total / (d + total)  # c / (1 + c), c = total / d
    yield finding(
        "little_movement",
        f"{where(session, worst)}: a step's estimate has a cosine of about {expected:.2g} with the "
        f"gradient, and the run's {total:,.0f} probes are few for {d:,} numbers (with c "
        "probes a number a bottom won back roughly c / (1 + c) of its worth, here "
        f"{recovered:.1%}): {_instead(config, d / steps)}",
        dimension=d,
        probes=total,
        expected_cosine=expected,
        expected_recovery=recovered,
    )


def _instead(config: Config, enough: float) -> str:
    """What to do where ``enough`` probes a step would make one for each number."""
    method, power = ALGORITHMS[config.algorithm], 2 ** math.ceil(math.log2(max(2.0, enough)))
    ways = ['compare with zo.estimator = "none"'] if "none" in method.estimators else []
    if "sketch" in method.estimators and power <= MANY:
        ways.append(f'try zo.estimator = "sketch", zo.directions = "hadamard", zo.probes = {power}')
    told = "the top will do the learning" if ways else "expect little to be learnt in so few steps"
    return f"{told}: {', and '.join(ways) or 'probe more, or train fewer numbers'}"


def _probing_steps(session: Session, found: Row) -> float:
    """Local steps of a round in which clients probe, also of tiers that were not tried here."""
    whole = not ALGORITHMS[found["algorithm"]].hybrid
    able = [tier for tier in found["tiers"] if whole or tier["bottom"]]
    return float(sum(tier["expected_clients"] * fmean(steps_at(session, tier["boundary"])) for tier in able))


def sign_like(session: Session, found: Row) -> Iterator[Finding]:
    """AdamW that starts anew, fed by few probes."""
    config, tiers = session.config, probed(found)
    optimizer = config.bottom_optimizer
    reset = config.algorithm in RESET or (config.algorithm == "decomfl" and config.zo.average == "models")
    dimension = min((t["probes"]["dimension"] for t in tiers), default=0)
    if not tiers or not reset or optimizer.name != "adamw" or config.zo.probes >= SIGN_LIKE * dimension:
        return
    steps = max(steps_at(session, tier["boundary"])[-1] for tier in tiers)
    once, whole = optimizer.lr * steps, optimizer.lr * steps * config.rounds
    yield finding(
        "sign_like",
        "AdamW starts anew in each participation and q is small: each probed number moves by about lr a "
        f"step whatever the scalars' size (it is sign-like): {optimizer.lr:g} x {steps} = {once:.2g} a "
        f"participation, {whole:.2g} at most in the run",
        warning=False,
        rate=optimizer.lr,
        steps=steps,
        participation=once,
        run=whole,
    )


WARNINGS: tuple[Callable[[Session, Row], Iterator[Finding]], ...] = (weak_signal, astray, little_movement)
NOTES: tuple[Callable[[Session, Row], Iterator[Finding]], ...] = (sign_like,)
"""Rules, in the order in which they are said."""

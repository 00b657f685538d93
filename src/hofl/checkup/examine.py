# SPDX-License-Identifier: Apache-2.0
"""Everything that a check finds, as plain values: measured at the starting point, planned, or by formula."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hofl.algorithms import ALGORITHMS
from hofl.checkup import payload, trial
from hofl.checkup.begin import Begun, begin
from hofl.checkup.evaluation import evaluated
from hofl.checkup.findings import NO_TIME, findings
from hofl.checkup.memory import Planned, planned
from hofl.config import Config
from hofl.core.replay import hex_digest
from hofl.errors import ModelError
from hofl.local_work import steps_at
from hofl.protocol.base import Vector
from hofl.protocol.probing import zo_signal
from hofl.report.tables import size
from hofl.runtime import prints
from hofl.runtime.rows import finite
from hofl.session import Session
from hofl.theory.estimator_variance import relative_variance

DRAWS = 8
"""Estimates that are compared with the gradient, at most."""
TIMED = 3
"""Steps that are timed alone, where those of an estimate take another time."""
LIMIT, SHARE, LEAST, REST = 50.0, 24.0, 6.0, 10.0
"""Seconds of a whole check, where that can be held; for the trials of all tiers at most, and at least; and
for what comes after them."""

Told = Callable[[str], None]
Row = dict[str, Any]


def examine(config: Config, told: Told = lambda what: None, limit: float | None = None) -> Row:
    """Look at a configuration; the live parameters are at the end what they were.

    Args:
        config: of the run that is to come.
        told: called with what is done next.
        limit: seconds it should take, None for LIMIT; what must be done is done, less is tried where there is
            no time.

    Returns:
        Plain values for JSON; the keys are those of the README's example and ``hofl check --json``.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    clock, limit = time.perf_counter(), LIMIT if limit is None else limit
    told("loading data and model")
    begun = begin(config)
    found = _facts(config, begun)
    session = begun.session
    if session is None or not begun.good:
        return found | {"seconds": time.perf_counter() - clock}
    before = begun.task.model.read()
    told("planning memory")
    plan = planned(session)
    share = min(SHARE, max(min(LEAST, limit), limit - REST - (time.perf_counter() - clock)))
    found |= {"memory": _memory(plan), "tiers": tiers(session, plan, before, told, share)}
    told("evaluating")
    found["evaluation"] = evaluated(session)
    found |= totals(session, found["tiers"], found["evaluation"]["seconds"])
    unchanged = hex_digest(before) == hex_digest(begun.task.model.read())
    found |= {"findings": findings(session, found), "parameters_unchanged": unchanged}
    return dict(finite(found | {"seconds": time.perf_counter() - clock}))


def _facts(config: Config, begun: Begun) -> Row:
    """What was looked at, and the self-test."""
    import torch

    task, method = begun.task, ALGORITHMS[config.algorithm]
    return {
        "algorithm": config.algorithm,
        "task": task.name,
        "model": prints.at_home(config.model.source or config.task.name),
        "dtype": config.model.dtype,
        "device": str(task.model.device),
        "threads": torch.get_num_threads(),
        "blocks": task.model.blocks,
        "trained": task.model.layout.size,
        "estimator": config.zo.estimator if method.estimators else None,
        "probes": config.zo.probes if method.estimators and config.zo.estimator != "none" else 0,
        "radius": config.zo.radius if config.zo.estimator in ("forward", "central") else None,
        "rounds": config.rounds,
        "assumed": begun.assumed,
        "self_test": {"ok": begun.good, "cuts": begun.cuts},
    }


def _memory(plan: Planned) -> Row:
    """The part of the plan that is no tier's."""
    return {
        "first_order_bytes": plan.first_order.get(False),
        "first_order_checkpointed_bytes": plan.first_order.get(True),
        "model_bytes": plan.resident or None,
        "free_bytes": plan.free,
        "why": plan.why,
    }


def tiers(session: Session, plan: Planned, start: Vector, told: Told, share: float) -> list[Row]:
    """A row a boundary, ascending; those at the ends are measured first, in case there is no time for all."""
    cuts, rows = session.cuts, dict[int, Row]()
    order = list(dict.fromkeys([*cuts[:1], *cuts[-1:], *cuts]))
    end = time.perf_counter() + share
    for place, boundary in enumerate(order):
        told(f"trying local steps at boundary {boundary}")
        now = time.perf_counter()
        until = now + max(0.0, end - now) / (len(order) - place)
        rows[boundary] = _tier(session, plan, boundary, start, until, late=place > 1 and now > end)
    return [_with_time(session, rows, boundary) for boundary in cuts]


def _tier(session: Session, plan: Planned, boundary: int, start: Vector, until: float, late: bool) -> Row:
    """What is known of one boundary."""
    layout, at = session.task.model.layout, _holders(session, boundary)
    bottom = layout.bottom_size(boundary)
    subject = trial.Subject(session, boundary, at, start)
    peak = plan.tiers.get(boundary)
    row: Row = {
        "boundary": boundary,
        "clients": len(at),
        "bottom": bottom,
        "top": layout.size - bottom,
        "planned_bytes": peak,
        "bytes": payload.moved(session, boundary),
        "expected_clients": expected(
            session, [float(session.boundaries[i] == boundary) for i in session.able]
        ),
        "probes": None,
    }
    if late or plan.lacks(peak):
        why = f"needs {size(peak)}" if plan.lacks(peak) else NO_TIME
        return row | {"step_seconds": None, "checked_seconds": None, "why": f"not measured: {why}"}
    return row | _tried(subject, plan, until)


def _holders(session: Session, boundary: int) -> list[int]:
    """Clients with data that have a boundary in the first segment in which anybody has it."""
    for segment in session.segments:
        found = [client for client in segment.able if segment.boundaries[client] == boundary]
        if found:
            return found
    return session.able[:1]


def expected(session: Session, values: Sequence[float]) -> float:
    """What a round's cohort comes to on average, of one value a client that can be drawn."""
    return float(session.policy.cohort * session.policy.shares @ np.array(values))


def _tried(subject: trial.Subject, plan: Planned, until: float) -> Row:
    """Trials: times, and of what probes also the signal and the cosine."""
    config, begun = subject.session.config, time.perf_counter()
    separate = not subject.probes or config.zo.estimator == "forward" or config.split.upload_every > 1
    middle = begun + 0.6 * (until - begun) if separate else until
    draws, cosines, unmeasured = _drawn(subject, plan, middle)
    plain = list[trial.Trial]() if separate else draws
    while separate and len(plain) < TIMED and (not plain or time.perf_counter() < until):
        plain.append(trial.timed(subject, len(plain)))
    failed = [each.why for each in (*draws, *plain) if each.why]
    return {
        "probes": _probes(subject, draws, cosines, unmeasured) if subject.probes else None,
        "step_seconds": _median(plain),
        "checked_seconds": _median(draws),
        "why": f"not measured: {failed[0]}" if failed else "",
    }


def _drawn(subject: trial.Subject, plan: Planned, until: float) -> tuple[list[trial.Trial], list[float], str]:
    """Estimates, each one's cosine with its gradient, and why there is none; one estimate at least."""
    draws, cosines, unmeasured = list[trial.Trial](), list[float](), ""
    how = plan.backpropagation()
    if how is None:
        unmeasured = f"needs {size(min(plan.first_order.values()))}"
    while subject.probes and len(draws) < DRAWS and (not draws or time.perf_counter() < until):
        draws.append(one := trial.measured(subject, len(draws)))
        if one.estimate is None:
            break
        if how is None:
            continue
        try:
            cosines.append(trial.cosine(one.estimate, trial.exact(subject, len(draws) - 1, how)))
        except ModelError as error:
            how, unmeasured = None, str(error)
    return draws, cosines, unmeasured


def _median(trials: Sequence[trial.Trial]) -> float | None:
    times = [each.seconds for each in trials if not each.why]
    return statistics.median(times) if times else None


def _probes(
    subject: trial.Subject, draws: Sequence[trial.Trial], cosines: Sequence[float], unmeasured: str
) -> Row:
    """Signal and cosine of a tier's probes, beside what theory expects of exact scalars.

    ``E <g, e> = ||g||^2`` and ``E ||e||^2 = (1 + V) ||g||^2`` of the estimate e with V the relative variance,
    so the cosine is about ``1 / sqrt(1 + V)``: of Gaussian directions ``sqrt(q / (d + q + 1))``. It is the
    root mean square over draws; the mean is lower, 0.80 of it at q = 1, 0.89 at q = 2.
    """
    zo = subject.session.config.zo
    sums = [each for one in draws for each in one.agreements]
    good = [one for one in draws if one.estimate is not None]
    d = len(good[0].estimate) if good and good[0].estimate is not None else subject.probed
    return {
        "dimension": d,
        "signal": zo_signal(sums, str(zo.estimator)),
        "pairs": len(good) * zo.probes,
        "cosine": statistics.fmean(cosines) if cosines else None,
        "draws": len(cosines),
        "expected_cosine": 1 / (1 + relative_variance(zo.directions, d, zo.probes)) ** 0.5,
        "why": f"not measured: {unmeasured}" if unmeasured else "",
    }


def _with_time(session: Session, rows: dict[int, Row], boundary: int) -> Row:
    """A tier with the seconds of a participation; from its neighbour's step where it was not timed."""
    row, method = rows[boundary], ALGORITHMS[session.config.algorithm]
    timed = [b for b in rows if rows[b]["step_seconds"] is not None]
    own = row if boundary in timed else None
    if own is None and timed:
        own = rows[min(timed, key=lambda other: abs(other - boundary))]
    if own is None:
        return row | {"participation_seconds": None}
    steps, step = statistics.fmean(steps_at(session, boundary)), own["step_seconds"]
    mirrored = session.config.zo.estimator == "forward" and method.hybrid and steps > 1
    checked = own["checked_seconds"] if mirrored and own["checked_seconds"] else step
    return row | {"participation_seconds": steps * step + max(0.0, checked - step)}


def totals(session: Session, rows: Sequence[Row], evaluation: float | None) -> Row:
    """An expected round, and the whole run; boundaries and shares are those of the first segment."""
    by = {row["boundary"]: row for row in rows}
    own = [by[session.boundaries[client]] for client in session.able]
    spent = [row["participation_seconds"] for row in own]
    config, clients = session.config, session.policy.cohort
    evaluations = 1 + -(-config.rounds // config.evaluation.every)
    a_round = {way: expected(session, [row["bytes"][way] for row in own]) for way in ("up", "down")}
    seconds = None if None in spent else expected(session, spent)
    whole = None
    if seconds is not None and evaluation is not None:
        whole = config.rounds * seconds + evaluations * evaluation
    met = 1 - (1 - np.minimum(1.0, clients * session.policy.shares)) ** config.rounds  # at least once
    contact = float(met @ [row["bytes"]["first_down"] - row["bytes"]["down"] for row in own])
    return {
        "round": {
            "clients": clients,
            "bytes_up": a_round["up"],
            "bytes_down": a_round["down"],
            "seconds": seconds,
        },
        "run": {
            "bytes_up": config.rounds * a_round["up"],
            "bytes_down": config.rounds * a_round["down"] + contact,
            "first_contact_bytes": contact,
            "evaluations": evaluations,
            "seconds": whole,
        },
    }

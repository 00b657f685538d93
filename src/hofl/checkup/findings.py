# SPDX-License-Identifier: Apache-2.0
"""What to expect of a run, in words: each finding is a rule over what a check found, with its numbers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hofl.algorithms import ALGORITHMS
from hofl.build import steps_of
from hofl.checkup.memory import lacks
from hofl.report.tables import seconds as spelled
from hofl.report.tables import size
from hofl.session import Session

Row = Mapping[str, Any]
Finding = dict[str, Any]

NO_TIME = "no time was left; its steps are taken to be as long as its neighbour's"
"""Why a tier was not tried."""
WEAK = 0.5
"""A zo_signal below this is noise, as in a run's own warning."""
ASTRAY = 0.3
"""Share of the expected cosine below which an estimate has lost the gradient: 2.5 standard deviations at
``PAIRS`` probes."""
PAIRS = 8
FLAT = 0.01
"""A cosine below this, of one step."""
FEW = 0.1
"""Probes of a run for each number they move, below which the run cannot have seen the gradient."""
SIGN_LIKE = 0.01
"""Probes of a step for each number, below which AdamW's step is the sign of chance."""
MOST = 0.5
LONG = 3600.0
SHARED_KEYS = ("ho_sfl", "decomfl", "hiso")
"""Methods whose clients probe along the same directions."""
RESET = ("ho_fl", "heron_sfl", "zo_sfl", "fedzo")
"""Methods whose bottom optimizer is new in each participation; DeComFL is one where it averages models."""


def findings(session: Session, found: Row) -> list[Finding]:
    """All rules that apply, warnings first.

    Args:
        session: of the run.
        found: of :func:`hofl.checkup.examine.examine` so far.

    Returns:
        one each: ``id``, ``level`` (warning or note), ``text`` and ``numbers``.
    """
    every = [one for rule in RULES for one in rule(session, found)]
    return sorted(every, key=lambda one: one["level"] != "warning")


def _finding(id: str, text: str, warning: bool = True, **numbers: Any) -> Finding:
    return {"id": id, "level": "warning" if warning else "note", "text": text, "numbers": numbers}


def _probed(found: Row) -> list[Row]:
    """The tiers that probe."""
    return [tier for tier in found["tiers"] if tier["probes"]]


def unmeasured(session: Session, found: Row) -> Iterator[Finding]:
    """A participation that failed."""
    for tier in found["tiers"]:
        if tier["why"]:
            where = _where(session, tier)
            failed = not tier["why"].endswith(NO_TIME)
            yield _finding("not_measured", f"{where}: {tier['why']}", failed, boundary=tier["boundary"])


def weak_signal(session: Session, found: Row) -> Iterator[Finding]:
    """Differences that are rounding noise, or curvature."""
    known = [t for t in _probed(found) if t["probes"]["signal"] is not None]
    if not known or (worst := min(known, key=lambda t: t["probes"]["signal"]))["probes"]["signal"] >= WEAK:
        return
    config, probes = session.config, worst["probes"]
    ways = ['zo.estimator = "tangent"'] * ("tangent" in ALGORITHMS[config.algorithm].estimators)
    ways += ['model.dtype = "float32"' if config.model.dtype != "float32" else "another zo.radius"]
    yield _finding(
        "weak_signal",
        f"zo_signal {probes['signal']:.2f} ({_where(session, worst)}, {probes['pairs']} probes): the probes "
        f"are rounding noise at this dtype ({config.model.dtype}) and radius ({config.zo.radius:g}): use "
        f"{' or '.join(ways)}",
        signal=probes["signal"],
        boundary=worst["boundary"],
        pairs=probes["pairs"],
    )


def astray(session: Session, found: Row) -> Iterator[Finding]:
    """Estimates that have less of the gradient than exact scalars would."""
    for tier in _probed(found):
        probes = tier["probes"]
        measured, bound = probes["cosine"], ASTRAY * probes["expected_cosine"]
        if measured is not None and probes["pairs"] >= PAIRS and measured < bound:
            yield _finding(
                "cosine_low",
                f"{_where(session, tier)}: the estimate's cosine with the gradient is {measured:.2g}, where "
                f"exact scalars have {probes['expected_cosine']:.2g}: the probes do not find the gradient",
                boundary=tier["boundary"],
                cosine=measured,
                expected_cosine=probes["expected_cosine"],
            )


def little_movement(session: Session, found: Row) -> Iterator[Finding]:
    """Too few probes in the whole run for the numbers they are to move."""
    probed, config = _probed(found), session.config
    if not probed:
        return
    worst = min(probed, key=lambda t: t["probes"]["expected_cosine"])
    d, expected = worst["probes"]["dimension"], worst["probes"]["expected_cosine"]
    clients = 1.0 if config.algorithm in SHARED_KEYS else _probing_clients(found)
    total = config.rounds * steps_of(config) * config.zo.probes * clients
    if expected >= FLAT or total >= FEW * d:
        return
    control = "none" in ALGORITHMS[config.algorithm].estimators
    so = (
        'the top will do the learning: compare with zo.estimator = "none"'
        if control
        else "expect little to be learnt in so few steps: probe more, or train fewer numbers"
    )
    yield _finding(
        "little_movement",
        f"{_where(session, worst)}: a step's estimate has a cosine of about {expected:.2g} with the "
        f"gradient, and the run's {total:,.0f} probes are few for {d:,} numbers: {so}",
        dimension=d,
        probes=total,
        expected_cosine=expected,
    )


def _probing_clients(found: Row) -> float:
    """Clients of a round that probe, also of tiers that were not tried here."""
    whole = not ALGORITHMS[found["algorithm"]].hybrid
    return float(sum(t["expected_clients"] for t in found["tiers"] if whole or t["bottom"]))


def sign_like(session: Session, found: Row) -> Iterator[Finding]:
    """AdamW that starts anew, fed by few probes."""
    config, probed = session.config, _probed(found)
    optimizer = config.bottom_optimizer
    reset = config.algorithm in RESET or (config.algorithm == "decomfl" and config.zo.average == "models")
    dimension = min((t["probes"]["dimension"] for t in probed), default=0)
    if not probed or not reset or optimizer.name != "adamw" or config.zo.probes >= SIGN_LIKE * dimension:
        return
    steps = steps_of(config)
    once, whole = optimizer.lr * steps, optimizer.lr * steps * config.rounds
    yield _finding(
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


def memory(session: Session, found: Row) -> Iterator[Finding]:
    """Where full first order with checkpointing takes less, where this machine is too small, no plan."""
    plan = found["memory"]
    if plan["why"]:
        yield _finding("no_plan", f"memory was not planned: {plan['why']}", warning=False)
    for tier in found["tiers"]:
        if lacks(tier["planned_bytes"], plan["model_bytes"], plan["free_bytes"]):
            yield _finding(
                "machine_too_small",
                f"{_where(session, tier)} is planned to take {size(tier['planned_bytes'])}; beside the model "
                f"this machine has {size(plan['free_bytes'])} free",
                boundary=tier["boundary"],
            )
    cheap, method = plan["first_order_checkpointed_bytes"], ALGORITHMS[session.config.algorithm]
    if cheap is None or method.split or not method.estimators:
        return
    probed = (t for t in found["tiers"] if t["boundary"] or not method.hybrid)
    more = [t for t in probed if t["planned_bytes"] and t["planned_bytes"] > cheap]
    if more:
        tiers = ", ".join(f"{_where(session, t)} {size(t['planned_bytes'])}" for t in more)
        yield _finding(
            "checkpointing_is_cheaper",
            f"backpropagation through everything needs {size(cheap)} with gradient checkpointing, less than "
            f'{tiers}: compare with algorithm = "fedavg" and model.checkpointing = true',
            first_order_checkpointed_bytes=cheap,
            boundaries=[t["boundary"] for t in more],
        )


def budgets(session: Session, found: Row) -> Iterator[Finding]:
    """Clients whose memory fits no boundary, or not the one that was planned."""
    if session.assigned is None:
        return
    clients = session.seen.clients
    out, moved = session.assigned.left_out(clients), session.assigned.moved(clients)
    for id, told, what in (("budget_exceeded", out, "left out"), ("budget_moved", moved, "moved")):
        if told:
            reason = next(iter(told.values()))
            why = reason if isinstance(reason, str) else "from boundary {} to {}: {}".format(*reason)
            text = f"{len(told)} of {len(clients)} clients are {what}: {why}"
            yield _finding(id, text, warning=id == "budget_exceeded", clients=list(told))


def quorum(session: Session, found: Row) -> Iterator[Finding]:
    """Cohorts from which nobody, or too many, may be missing."""
    config, cohort = session.config, session.policy.cohort
    enough = min(config.fleet.enough or cohort, cohort)
    if enough < config.quorum:
        yield _finding(
            "below_quorum",
            f"fleet.enough = {enough} is below quorum = {config.quorum}: on a network a round that waits for "
            "no more answers is void",
            enough=enough,
            quorum=config.quorum,
        )
    elif config.quorum == cohort > 1:
        yield _finding(
            "no_spare_client",
            f"quorum = {config.quorum} is the whole cohort: one lost client voids a round",
            warning=False,
            quorum=config.quorum,
        )


def data(session: Session, found: Row) -> Iterator[Finding]:
    """What the task warns of, and prompts that are mostly cut."""
    facts = session.task.facts
    cut = (facts.get("truncated") or {}).get("train") or 0
    share = cut / max(1, facts.get("n_train") or 1)
    if share > MOST:
        yield _finding(
            "prompts_cut",
            f"most prompts are cut: {share:.0%} of the training texts are longer than task.length = "
            f"{session.config.task.length} tokens: raise it",
            share=share,
        )
    for text in facts.get("warnings", ()):
        if share <= MOST or "cut to task.length" not in text:
            yield _finding("data", text)


def evaluation(session: Session, found: Row) -> Iterator[Finding]:
    """How coarse the result is, and a start that knows nothing."""
    measured = found["evaluation"]
    n, one = measured["n"], measured["one_example"]
    yield _finding(
        "evaluation_size",
        f"evaluation has n = {n}: one example is {one:.2g}, and a standard error at 0.5 is "
        f"{0.5 / max(1, n) ** 0.5:.2g}: smaller differences are no result",
        warning=False,
        n=n,
        one_example=one,
    )
    value, majority = measured["value"], measured["majority"]
    whole = measured["metric"] == "accuracy" and measured["sampled"] == n
    if whole and value is not None and majority is not None and value <= majority:
        yield _finding(
            "no_zero_shot",
            f"the model starts at {value:.3f}, no better than the commonest class ({majority:.3f}): first of "
            "all it has to learn the task's form",
            warning=False,
            value=value,
            majority=majority,
        )


def duration(session: Session, found: Row) -> Iterator[Finding]:
    """Runs of more than an hour on this machine."""
    whole = found["run"]["seconds"]
    if whole is not None and whole > LONG:
        yield _finding(
            "long",
            f"the run takes about {spelled(whole)} on this machine, one client after another",
            seconds=whole,
        )


def control(session: Session, found: Row) -> Iterator[Finding]:
    """What is no experiment of its own."""
    if session.config.zo.estimator == "none" and ALGORITHMS[session.config.algorithm].estimators:
        yield _finding(
            "control", "nothing is probed: the bottom stays where it is; this is the control", warning=False
        )


def _where(session: Session, tier: Row) -> str:
    """A tier in words."""
    return f"boundary {tier['boundary']}" if ALGORITHMS[session.config.algorithm].hybrid else "a client"


RULES: tuple[Callable[[Session, Row], Iterator[Finding]], ...] = (
    unmeasured, weak_signal, astray, little_movement, memory, budgets, quorum, data, duration, sign_like,
    control, evaluation,
)  # fmt: skip
"""In the order in which they are said."""

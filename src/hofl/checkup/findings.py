# SPDX-License-Identifier: Apache-2.0
"""What to expect of a run, in words: each finding is a rule over what a check found, with its numbers."""

from collections.abc import Callable, Iterator

from hofl.algorithms import ALGORITHMS
from hofl.checkup import probe_findings
from hofl.checkup.finding import Finding, Row, finding, where
from hofl.checkup.memory import lacks
from hofl.report.tables import seconds as spelled
from hofl.report.tables import size
from hofl.session import Session

NO_TIME = "no time was left; its steps are taken to be as long as its neighbour's"
"""Why a tier was not tried."""
MOST = 0.5
LONG = 3600.0


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


def unmeasured(session: Session, found: Row) -> Iterator[Finding]:
    """A participation that failed."""
    for tier in found["tiers"]:
        if tier["why"]:
            failed = not tier["why"].endswith(NO_TIME)
            said = f"{where(session, tier)}: {tier['why']}"
            yield finding("not_measured", said, failed, boundary=tier["boundary"])


def memory(session: Session, found: Row) -> Iterator[Finding]:
    """Where full first order with checkpointing takes less, where this machine is too small, no plan."""
    plan = found["memory"]
    if plan["why"]:
        yield finding("no_plan", f"memory was not planned: {plan['why']}", warning=False)
    for tier in found["tiers"]:
        if lacks(tier["planned_bytes"], plan["model_bytes"], plan["free_bytes"]):
            yield finding(
                "machine_too_small",
                f"{where(session, tier)} is planned to take {size(tier['planned_bytes'])}; beside the model "
                f"this machine has {size(plan['free_bytes'])} free",
                boundary=tier["boundary"],
            )
    cheap, method = plan["first_order_checkpointed_bytes"], ALGORITHMS[session.config.algorithm]
    if cheap is None or method.split or not method.estimators:
        return
    probed = (t for t in found["tiers"] if t["boundary"] or not method.hybrid)
    more = [t for t in probed if t["planned_bytes"] and t["planned_bytes"] > cheap]
    if more:
        tiers = ", ".join(f"{where(session, t)} {size(t['planned_bytes'])}" for t in more)
        yield finding(
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
            yield finding(id, text, warning=id == "budget_exceeded", clients=list(told))


def quorum(session: Session, found: Row) -> Iterator[Finding]:
    """Cohorts from which nobody, or too many, may be missing."""
    config, cohort = session.config, session.policy.cohort
    enough = min(config.fleet.enough or cohort, cohort)
    if enough < config.quorum:
        yield finding(
            "below_quorum",
            f"fleet.enough = {enough} is below quorum = {config.quorum}: on a network a round that waits for "
            "no more answers is void",
            enough=enough,
            quorum=config.quorum,
        )
    elif config.quorum == cohort > 1:
        yield finding(
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
        yield finding(
            "prompts_cut",
            f"most prompts are cut: {share:.0%} of the training texts are longer than task.length = "
            f"{session.config.task.length} tokens: raise it",
            share=share,
        )
    for text in facts.get("warnings", ()):
        if share <= MOST or "cut to task.length" not in text:
            yield finding("data", text)


def evaluation(session: Session, found: Row) -> Iterator[Finding]:
    """How coarse the result is, and a start that knows nothing."""
    measured = found["evaluation"]
    n, one = measured["n"], measured["one_example"]
    yield finding(
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
        yield finding(
            "no_zero_shot",
            f"the model starts at {value:.3f}, no better than the commonest class ({majority:.3f}): first of "
            "all it has to learn the task's form",
            warning=False,
            value=value,
            majority=majority,
        )


def language(session: Session, found: Row) -> Iterator[Finding]:
    """A start that tells tokens apart hardly better than chance: wrong weights or another model's tokenizer.

    A uniform guess has the vocabulary's size as its perplexity. Models that are random by design are noted.
    """
    measured, vocabulary = found["evaluation"], session.task.facts.get("vocabulary", 0)
    value = measured["value"] if measured["metric"] == "perplexity" else None
    if value is not None and value >= vocabulary / 10:
        yield finding(
            "no_language",
            f"the model starts at a perplexity of {value:.0f}; a guess among its {vocabulary} tokens has "
            f"{vocabulary}, a language model far below {vocabulary // 10}: look at its file, its tokenizer",
            warning=not session.config.model.source.startswith("tiny:"),
            value=value,
            vocabulary=vocabulary,
        )


def duration(session: Session, found: Row) -> Iterator[Finding]:
    """Runs of more than an hour on this machine."""
    whole = found["run"]["seconds"]
    if whole is not None and whole > LONG:
        yield finding(
            "long",
            f"the run takes about {spelled(whole)} on this machine, one client after another",
            seconds=whole,
        )


def control(session: Session, found: Row) -> Iterator[Finding]:
    """What is no experiment of its own."""
    if session.config.zo.estimator == "none" and ALGORITHMS[session.config.algorithm].estimators:
        yield finding(
            "control", "nothing is probed: the bottom stays where it is; this is the control", warning=False
        )


RULES: tuple[Callable[[Session, Row], Iterator[Finding]], ...] = (
    unmeasured, *probe_findings.WARNINGS, memory, budgets, quorum, data, duration, *probe_findings.NOTES,
    control, evaluation, language,
)  # fmt: skip
"""In the order in which they are said."""

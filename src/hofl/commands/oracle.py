# SPDX-License-Identifier: Apache-2.0
"""``hofl sampling --oracle``: the reference policy (13), estimated from repeated local runs of every client.

A simulation may do what no server can: run each client several times from the start of a run, with fresh
minibatches and directions, and take the gradient of the objective from all examples. The analysis is of
SGD, so the local steps are SGD whatever the configuration's optimizer, at ``eta = 0.1 / (L E)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.algorithms import ALGORITHMS
from hofl.algorithms.ho_fl import reconstruct
from hofl.build import build_algorithm
from hofl.commands.output import print_table, say
from hofl.commands.segments import alone, say_segment
from hofl.config import Config, OptimizerConfig
from hofl.core.record import Record
from hofl.core.sampling import Policy
from hofl.errors import ConfigError
from hofl.report.tables import Table
from hofl.runtime.local import local_call
from hofl.session import Session, prepare
from hofl.theory import optimal_sampling
from hofl.theory.optimal_sampling import Floats, Statistics, distance
from hofl.theory.schedules import policy_of_round

STEP = 0.1
"""L h, a tenth of the longest step that the analysis allows."""
CHUNK = 64
"""Examples of one pass of the gradient."""


def run_oracle(
    config: Config,
    betas: Sequence[float],
    runs: int = 8,
    floor: float = 0.25,
    smoothness: float = 1.0,
    round_number: int = 1,
) -> dict[str, Any]:
    """Estimate a_i, v_i and g at the start of a run, solve (13) and (14), compare the policies.

    Args:
        config: of the run.
        betas: preferences to compare beside the configuration's own.
        runs: R, local runs of each client, at least 2.
        floor: epsilon.
        smoothness: L.
        round_number: of the segment whose boundaries and clients are taken; the weights are the run's first.

    Raises:
        ConfigError: the method has no preference, or a setting is out of range.
    """
    if ALGORITHMS[config.algorithm].boundary != "each":
        raise ConfigError(f"algorithm = '{config.algorithm}' samples uniformly; the reference is HO-FL's")
    if config.local.epochs is not None:
        raise ConfigError("local.epochs: the reference has one number of local steps for all: leave it out")
    if smoothness <= 0:
        raise ConfigError(f"--smoothness {smoothness:g}: must be > 0")
    if not 0 < floor <= 1:
        raise ConfigError(f"--floor {floor:g}: must be in (0, 1]")
    if runs < 2:
        raise ConfigError(f"--runs {runs}: at least 2 are needed for a variance")
    rate = STEP / (smoothness * config.local.steps)
    sgd = OptimizerConfig(name="sgd", lr=rate, weight_decay=0.0)
    zo = config.zo.model_copy(update={"optimizer": sgd})
    session, span = alone(prepare(config), round_number)
    changed = config.model_copy(update={"optimizer": sgd, "zo": zo})  # boundaries stay those of the run
    algorithm = build_algorithm(changed, session.seen, session.boundaries)
    session = replace(session, config=changed, algorithm=algorithm)
    gradient = objective_gradient(session)
    known = optimal_sampling.statistics(local_runs(session, runs, rate), gradient)
    found = _compared(session, known, betas, floor) | span.to_json()
    return found | {"runs": runs, "rate": rate, "floor": floor}


def local_runs(session: Session, runs: int, rate: float) -> Iterator[NDArray[np.float64]]:
    """Of each of R runs, ``U_i = (w - w_i^E) / h`` of every client with data: [N, d].

    Raises:
        ConfigError: a client could not finish.
    """
    algorithm, layout = session.algorithm, session.task.model.layout
    start = algorithm.init(session.task.model.read())
    vector, steps = start.arrays["weights/vector"], session.config.local.steps
    call = local_call(session.seen, algorithm.actions)
    for run in range(runs):
        cursors = start.arrays["cursors/next"] + run * steps
        state = Record({**start.arrays, "cursors/next": cursors}, {**start.values, "round": run})
        outcome = algorithm.round(state, session.able, call)
        if outcome.failures:
            client, why = next(iter(outcome.failures.items()))
            raise ConfigError(f"client {client} could not finish: {why}; give a larger --smoothness")
        deltas = [reconstruct(layout, vector, entry) for entry in outcome.entries]
        yield -np.stack(deltas).astype(np.float64) / (rate * steps)


def objective_gradient(session: Session) -> NDArray[np.float64]:
    """``grad f(w)``, the mean over clients with data of the gradients over all their examples: [d]."""
    task = session.seen
    total = np.zeros(task.model.layout.size)
    for client in session.able:
        shard = task.shards[client]
        for begin in range(0, len(shard), CHUNK):
            part = shard[begin : begin + CHUNK]
            batch = task.collate(part)
            _, gradient, _ = task.model.first_order(batch.inputs, 0, None, task.loss_on(batch))
            total += gradient.astype(np.float64) * (len(part) / len(shard) / len(session.able))
    return total


def _compared(session: Session, known: Statistics, betas: Sequence[float], floor: float) -> dict[str, Any]:
    base, own = session.policy, session.config.cohort.preference
    costs = known.costs(STEP, base.cohort)
    best = optimal_sampling.reference(known, costs, base.cohort, floor)
    water = optimal_sampling.relaxed(known, costs, base.cohort, floor)
    named: list[tuple[str, Floats]] = [("reference (13)", best.shares), ("water-filling (15)", water)]
    named += [(f"preference {b:g}", _shares(base, b)) for b in sorted({*betas, own})]
    cuts = np.array([session.boundaries[client] for client in session.able])
    rows = []
    for name, shares in named:
        noise = float(costs @ shares)
        value = known.objective(shares, costs)
        away = {"to_reference": distance(shares, best.shares), "to_water_filling": distance(shares, water)}
        cohort = {str(b): float(base.cohort * shares[cuts == b].sum()) for b in np.unique(cuts)}
        rows.append(
            {
                "policy": name,
                "objective": value,
                "bias": value - noise,
                "noise": noise,
                **away,
                "cohort": cohort,
            }
        )
    return {
        "rows": rows,
        "preference": own,
        "gap": best.gap,
        "shares": {name: shares.tolist() for name, shares in named},
        "variances": known.variances.tolist(),
        "dispersions": known.dispersions.tolist(),
        "gradient": known.gradient,
        "optimizer": session.config.optimizer.name,
    }


def _shares(base: Policy, beta: float) -> Floats:
    return policy_of_round(base, beta).shares


def show_oracle(found: dict[str, Any]) -> None:
    """The policies beside each other."""
    say(
        f"oracle: {found['runs']} local runs of each client from the start, SGD at rate {found['rate']:.3g}; "
        f"shares of at least {found['floor']:g} of a uniform one"
    )
    say_segment(found)
    own = f"preference {found['preference']:g}"
    rows = tuple(
        (
            row["policy"] + (" (this configuration)" if row["policy"] == own else ""),
            *(f"{row[name]:.4g}" for name in ("objective", "bias", "noise")),
            *(f"{row[name]:.3f}" for name in ("to_reference", "to_water_filling")),
            *(f"{n:.2f}" for n in row["cohort"].values()),
        )
        for row in found["rows"]
    )
    cuts = tuple(f"at boundary {b}" for b in found["rows"][0]["cohort"])
    columns = ("policy", "objective", "bias", "noise", "from (13)", "from (15)", *cuts)
    print_table(Table("one round's bound at the start, and the expected cohort", columns, rows))
    say("from: total variation, the part of the selection that would go to other clients")

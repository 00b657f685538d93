# SPDX-License-Identifier: Apache-2.0
"""A run's participations measured in isolated processes, beside what the plan says of them.

HO-FL App. E.5: one complete local participation, with the optimizer's state made, in a process of its own;
the peak of three repeats.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hofl.algorithms import ALGORITHMS
from hofl.config import Config, dump
from hofl.errors import ConfigError, HoflError, RunFailed
from hofl.memory.configured import of_config
from hofl.memory.measure import REFUSED
from hofl.memory.orders import Costs, Kind, Order, single
from hofl.memory.subject import Attention, Subject, Workload, staged

REPEATS = 3


def participations(config: Config) -> list[Order]:
    """The kinds of participation a run has, their costs left at 0: one a boundary.

    Raises:
        ConfigError: the method's clients do not hold the whole model, or boundaries are declared by nodes.
    """
    method, recompute = ALGORITHMS[config.algorithm], config.model.checkpointing
    if method.split:
        raise ConfigError(
            f"algorithm = '{config.algorithm}': hofl profile measures clients that hold the whole model; "
            "in a run of this one, rounds.jsonl has peak_bytes"
        )
    if method.hybrid and not config.cohort.boundaries:
        raise ConfigError("cohort.boundaries is missing; name the boundaries to measure")
    boundaries = sorted(set(config.cohort.boundaries)) if method.hybrid else [0]
    probed = str(config.zo.estimator) if method.estimators else None
    orders = []
    for boundary in boundaries:
        kind: Kind = (
            "hybrid" if boundary else "zeroth_order" if probed and not method.hybrid else "first_order"
        )
        estimator = None if kind == "first_order" else probed
        orders.append(Order(kind, boundary, estimator, recompute and kind != "zeroth_order", 0, 0.0, 0))
    return orders


def profile(
    config: Config, name: str, repeats: int = REPEATS, told: Callable[[str], None] = lambda what: None
) -> list[dict[str, Any]]:
    """Measure each participation of a run, and plan it for the batches that were seen.

    Args:
        config: of a run in one process.
        name: what messages call its file.
        repeats: processes a boundary; the largest peak counts.
        told: called with what is measured next.

    Returns:
        A row a boundary: the order, the shape, ``planned_bytes`` (with NumPy's state), ``planned_at_most``
        (the same for the largest batch that the run allows: what a budget must have), ``planned_storages``,
        ``tracked_bytes``, their ``ratio`` (plan to measurement), ``rss_bytes``, ``idle_bytes`` (before the
        participation) and what each repeat found.

    Raises:
        HoflError: the configuration is at fault. RunFailed: a process died, or the participation failed.
    """
    orders, (subject, work) = participations(config), of_config(config)
    rows = []
    for order in orders:
        found = []
        for repeat in range(repeats):
            told(f"{order.label}, {repeat + 1} of {repeats}")
            found.append(_apart(config, name, order))
        told(f"{order.label}, plan")
        rows.append(_row(order, found, subject, work))
    return rows


def _apart(config: Config, name: str, order: Order) -> dict[str, Any]:
    """One participation in a process of its own."""
    asked = json.dumps({"config": dump(config), "name": name, "boundary": order.boundary})
    done = subprocess.run(
        [sys.executable, "-m", "hofl.memory.measure"],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    if done.returncode < 0:
        raise RunFailed(
            f"{order.label}: the process was killed by signal {-done.returncode}: the memory of this machine "
            "may be too small; hofl plan says what is needed"
        )
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise (HoflError if done.returncode == REFUSED else RunFailed)(f"{order.label}: {said}")


def _row(order: Order, found: list[dict[str, Any]], subject: Subject, work: Workload) -> dict[str, Any]:
    """The largest of the repeats beside the plan for its batches."""
    most = max(found, key=lambda one: int(one["tracked_bytes"]))
    attention: Attention = "mask" if most["padded"] else "causal"
    shape = {"batch": most["batch"], "length": most["length"] or work.length, "scored": most["scored"]}
    seen = replace(work, attention=attention, **shape)
    plan, most_asked = _planned(subject, seen, order), _planned(subject, work, order)
    storages = plan.peak_bytes - (plan.parts["state"] if most["device"] == "cpu" else 0)
    return {
        "boundary": order.boundary,
        "estimator": order.estimator,
        "checkpointing": order.checkpointing,
        "label": order.label,
        "device": most["device"],
        "batch": most["batch"],
        "length": most["length"],
        "attention": attention,
        "planned_bytes": plan.peak_bytes,
        "planned_at_most": most_asked.peak_bytes,
        "planned_storages": storages,
        "tracked_bytes": most["tracked_bytes"],
        "ratio": round(storages / most["tracked_bytes"], 4),
        "rss_bytes": max((one["rss_bytes"] for one in found if one["rss_bytes"]), default=None),
        "idle_bytes": most["idle_bytes"],
        "repeats": [one["tracked_bytes"] for one in found],
    }


def _planned(subject: Subject, work: Workload, order: Order) -> Order:
    with staged(subject, work) as stage:
        return single(stage, Costs.of(stage, work), order)

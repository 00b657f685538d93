# SPDX-License-Identifier: Apache-2.0
"""A tiny federated run of milliseconds, shared by the runtime's tests and their child processes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.ho_fl import Probing, ho_fl
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, RoundVoid
from hofl.runtime.folder import Settings
from hofl.runtime.local import IN_PROCESS, local_call
from hofl.runtime.loop import Parts, run
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task

SEED, CLIENTS, COHORT = 5, 6, 3
CONFIG = (
    'algorithm = "ho_fl"\nseed = 5\nrounds = {rounds}\n[optimizer]\nlr = {lr}\n[run]\nledger = "{ledger}"\n'
)
TIMES = ("seconds", "peak_bytes", "client_peak_bytes")


def tiny_task() -> Task:
    """Six clients, 60 points, two blocks of width 4."""
    torch.set_num_threads(1)
    divided = Partition(clients=CLIENTS)
    return synthetic_task(
        divided, seed=SEED, classes=3, features=3, width=4, blocks=2, rows=60, evaluation_rows=40
    )


def tiny_algorithm(task: Task, name: str = "ho_fl", lr: float = 0.05, quorum: int = 1) -> Algorithm:
    """Real HO-FL (boundaries 0, 1, 2) or FedAvg, two local steps."""
    optimizer = Optimizer("sgd", lr)
    training = Training(SEED, 2, 5, optimizer, [len(shard) for shard in task.shards], quorum)
    if name == "fedavg":
        return fedavg(task.model.layout, training)
    probing = Probing("tangent", 2, 1e-3, "gaussian", optimizer)
    return ho_fl(task.model.layout, [0, 1, 2] * (CLIENTS // 3), training, probing)


def draw(round: int, attempt: int, state: Record | None = None) -> list[int]:
    """Three of the six clients, in no order."""
    return [int(c) for c in Key.of(SEED, "cohort_order", round, attempt).permutation(CLIENTS)[:COHORT]]


def settings(rounds: int = 4, lr: float = 0.05, ledger: str = "full", **more: Any) -> Settings:
    config = CONFIG.format(rounds=rounds, lr=lr, ledger=ledger)
    base = Settings(
        "ho_fl", "synthetic", SEED, rounds, config, IN_PROCESS, ("scalars", "top delta"), ledger=ledger
    )
    return replace(base, **{"evaluate_every": 3} | more)


def parts(
    algorithm: Algorithm | None = None,
    wrap: Callable[[Call], Call] = lambda call: call,
    warn: Callable[[str], None] = print,
    **more: Any,
) -> Parts:
    """Everything but the folder, on a fresh task."""
    task, meter = tiny_task(), Meter()
    method = tiny_algorithm(task, **more) if algorithm is None else algorithm
    return Parts(task, method, wrap(local_call(task, method.actions, meter)), meter, draw, warn)


def finish(
    where: Path, rounds: int = 4, *, resume: bool = False, lr: float = 0.05, **more: Any
) -> list[dict[str, Any]]:
    """Run to the end; the new rows."""
    return list(run(parts(lr=lr), where, settings(rounds, lr, **more), resume=resume))


def timeless(where: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of a run folder without times and memory."""
    summary = json.loads((where / "summary.json").read_text())
    return timeless_rows(where), without_times(summary)


def timeless_rows(where: Path) -> list[dict[str, Any]]:
    lines = (where / "rounds.jsonl").read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in TIMES}


def counting(
    play: Callable[[int], dict[str, Any]] = lambda r: {}, fail: Callable[[int], bool] = lambda r: False
) -> Algorithm:
    """The smallest honest algorithm: each client adds its number to the vector; the mean is kept.

    Args:
        play: columns of a round's row, by round.
        fail: rounds that are void.
    """

    def init(vector: np.ndarray) -> Record:
        return Record({"weights/vector": vector.copy()}, {"round": 0})

    def advance(state: Record, entries: Any) -> Record:
        deltas = [e.reply.arrays["weights/delta"] for e in entries]
        vector = (state.arrays["weights/vector"] + np.mean(deltas, axis=0)).astype(np.float32)
        return Record({"weights/vector": vector}, {"round": state.values["round"] + 1})

    def round(state: Record, cohort: Any, call: Call) -> Outcome:
        number = state.values["round"] + 1
        plans = {c: Record({}, {"client": c, "round": number}) for c in cohort}
        replies = call("add", {c: Record(state.arrays, p.values) for c, p in plans.items()}, None)
        if fail(number) or not replies.records:
            raise RoundVoid(replies.failures)
        entries = tuple(Entry(c, plans[c], r) for c, r in replies.records.items())
        row = {"loss": 1.0, "boundaries": [0] * len(cohort), "examples": len(entries)} | play(number)
        return Outcome(advance(state, entries), entries, row, replies.failures)

    def add(task: Task, request: Record, memory: Memory) -> Record:
        vector = request.arrays["weights/vector"]
        return Record({"weights/delta": np.full_like(vector, request.values["client"] / 100)})

    return Algorithm(init, round, advance, {"add": add})


def rows_of(algorithm: Algorithm, where: Path, rounds: int, **more: Any) -> Iterator[dict[str, Any]]:
    """The rows of a run of a given algorithm, as they come."""
    warn = more.pop("warn", print)
    return run(parts(algorithm, warn=warn), where, settings(rounds, **more))

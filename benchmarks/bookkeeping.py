# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of bookkeeping a client-round: a whole run of an algorithm that does nothing.

``python benchmarks/bookkeeping.py`` runs N = 100 and N = 100,000 registered clients, cohort 10,
and exits 1 where a client-round costs over 1 ms of processor time: serialising, rows, ledger and
checkpoint. Wall time beside it also has the waits for the disk, about six syncs a round.
Registering the clients and round 0 do not count.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome
from hofl.runtime.folder import Settings
from hofl.runtime.local import IN_PROCESS, local_call
from hofl.runtime.loop import Parts, run
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task

BUDGET_MS, COHORT, ROUNDS = 1.0, 10, 100


def idle() -> Algorithm:
    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        return Record(state.arrays, {"round": state.values["round"] + 1})

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        plans = {c: Record({}, {"client": c, **state.values}) for c in cohort}
        replies = call("nothing", {c: Record(state.arrays, p.values) for c, p in plans.items()}, None)
        entries = tuple(Entry(c, plans[c], r) for c, r in replies.records.items())
        row: dict[str, Any] = {"loss": 1.0, "boundaries": [0] * len(cohort), "examples": 0}
        return Outcome(rebuild(state, entries), entries, row, replies.failures)

    def nothing(task: Task, request: Record, memory: Memory) -> Record:
        return Record({"scalars/s": np.zeros((5, 2), dtype=np.float32)}, request.values)

    return Algorithm(
        lambda vector: Record({"weights/vector": vector}, {"round": 0}), play, rebuild, {"nothing": nothing}
    )


def measure(clients: int) -> tuple[float, float]:
    """Milliseconds a client-round: (processor, wall)."""
    task = synthetic_task(Partition(clients=clients), seed=1, rows=max(clients, 400), evaluation_rows=40)
    algorithm, meter = idle(), Meter()

    def draw(round: int, attempt: int, state: Record) -> list[int]:
        return [int(word % clients) for word in Key.of(1, "cohort_order", round, attempt).words(0, COHORT)]

    call = local_call(task, algorithm.actions, meter)
    settings = Settings("idle", "tiny", 1, ROUNDS, "", IN_PROCESS, ("nothing",), evaluate_every=ROUNDS)
    with tempfile.TemporaryDirectory() as where:
        rows = run(Parts(task, algorithm, call, meter, draw, print), Path(where) / "run", settings)
        next(rows)
        wall, processor = time.perf_counter(), time.process_time()
        for _ in rows:
            pass
        scale = 1e3 / (COHORT * ROUNDS)
        return (time.process_time() - processor) * scale, (time.perf_counter() - wall) * scale


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(100)
    times = {clients: measure(clients) for clients in (100, 100_000)}
    for clients, (processor, wall) in times.items():
        print(
            f"N = {clients:>7,}: {processor:.3f} ms a client-round (budget {BUDGET_MS:g}), wall {wall:.3f} ms"
        )
    sys.exit(max(processor for processor, _ in times.values()) > BUDGET_MS)

# SPDX-License-Identifier: Apache-2.0
"""Reports from the field on memory: plans, devices that differ, a server's copies (C58, C59, C61)."""

import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from hofl.algorithms import ALGORITHMS
from hofl.budgets import fitted, settle
from hofl.build import OUT
from hofl.config import load
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.memory.orders import Costs, Kind, Order, single
from hofl.memory.subject import Workload, staged, subject_of
from hofl.models.load import restrict_head
from hofl.models.tiny import tiny, tiny_config
from hofl.needs import Needs
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Replies
from hofl.protocol.probing import Probing, Shared
from hofl.runtime.local import local_call
from hofl.session import prepare
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from memory_tasks import cut_lora, seen, token_task

HO_FL = Path(__file__).parents[2] / "configs" / "synthetic" / "ho_fl.toml"
GB = 10**9


def test_c61_activations_and_no_count_of_trainables_order_the_plan(tmp_path: Path) -> None:
    """6 layers, batch 8 x 256: zeroth order < cut at 4 < cut at 2 < first order, measured and planned."""
    tiny_config("llama", 6, max_position_embeddings=256).save_pretrained(tmp_path)
    work = Workload(8, 256, steps=1)
    module = tiny("llama", layers=6)
    restrict_head(module, [0, 1])
    task = token_task(cut_lora(module), work)
    asked: list[tuple[Kind, int, str | None]] = [
        ("zeroth_order", 0, "forward"),
        ("hybrid", 4, "forward"),
        ("hybrid", 2, "forward"),
        ("first_order", 0, None),
    ]
    with staged(subject_of(str(tmp_path), "float32"), work) as stage:
        costs = Costs.of(stage, work)
        rows = [single(stage, costs, Order(*each, False, 0, 0.0, 0)) for each in asked]
    measured = [seen(task, work, cut, estimator, kind == "zeroth_order") for kind, cut, estimator in asked]
    assert measured == sorted(set(measured))
    assert [row.peak_bytes - row.parts["state"] for row in rows] == pytest.approx(measured, rel=0.05)
    assert [row.peak_bytes for row in rows] == sorted({row.peak_bytes for row in rows})
    assert len({row.parts["trainables"] for row in rows}) == 1  # it says nothing of their order
    for row in rows:
        assert sum(row.parts.values()) == row.peak_bytes and {"backbone", "state"} < set(row.parts)


# --- devices that differ


NEEDS = Needs({0: 6 * GB, 12: 3 * GB // 2, 24: 7 * GB // 10}, 1, 1.0)
"""Of 24 blocks: first order 6 GB, hybrid 1.5 GB, zeroth order, the whole model below the cut, 0.7 GB."""


def test_c58_each_device_gets_the_most_exact_order_that_fits() -> None:
    assert fitted(NEEDS, (1 * GB, 2 * GB, 8 * GB), (OUT,) * 3) == (24, 12, 0)


def test_c58_a_device_below_every_order_is_refused_with_the_number() -> None:
    found = settle(NEEDS, [(1, (GB // 2, 2 * GB))], (OUT,) * 2)
    assert found.cuts == ((OUT, 12),)
    (said,) = found.left_out(("phone", "board")).values()
    assert "boundary 24 needs" in said and "(700000000 bytes)" in said


def test_c58_a_run_gives_three_devices_three_orders_and_draws_nobody_else() -> None:
    """Budgets by group from the plan of the run itself; the group below it is never drawn."""
    needs = prepare(load(HO_FL, ["cohort.boundaries=[]", "cohort.assign=budgets", 'cohort.budgets=["1GiB"]']))
    assert needs.assigned is not None
    of = needs.assigned.needs.of
    budgets = ", ".join(f'"{size}B"' for size in (of(0), of(2), of(4), of(4) - 1))
    given = ["cohort.boundaries=[]", "cohort.assign=budgets", f"cohort.budgets=[{budgets}]", "cohort.size=3"]
    session = prepare(load(HO_FL, given))
    assert sorted(session.boundaries) == [OUT] * 3 + [0] * 3 + [2] * 3 + [4] * 3
    left = {client for client, boundary in enumerate(session.boundaries) if boundary == OUT}
    assert {client for number in range(1, 60) for client in session.draw(number)} == set(range(12)) - left


# --- a server's copies


def server_peak(name: str, clients: int) -> tuple[int, int]:
    """Bytes that a round takes on the server beside its state, and bytes of the model."""
    task = synthetic_task(Partition(clients=clients), seed=1, rows=2 * clients, width=512, blocks=4)
    optimizer = Optimizer("sgd", 0.01)
    training = Training(3, 1, 2, optimizer, [2] * clients, run="r")
    given = {"layout": task.model.layout, "training": training, "shared": Shared()}
    algorithm = ALGORITHMS[name].build(**given, probing=Probing("central", 2, 1e-3, "gaussian", optimizer))
    whole, blobs = local_call(task, algorithm.actions), dict[int, bytes]()

    def stored(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        if not blobs:
            blobs.update((i, r.to_bytes()) for i, r in whole(action, requests, deadline).records.items())
        return Replies({client: Record.from_bytes(blob) for client, blob in blobs.items()}, {})

    state = algorithm.init(task.model.read())
    algorithm.round(state, range(clients), stored)
    tracemalloc.start()
    try:
        outcome = algorithm.round(state, range(clients), stored)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(outcome.entries) == clients and not outcome.failures
    return peak, 4 * task.model.layout.size


def test_c59_a_server_of_scalars_holds_no_copy_for_a_client() -> None:
    """E q = 2 numbers a client: a round takes two models, the next one and a step, with 16 as with 4."""
    (few, size), (many, _) = server_peak("decomfl", 4), server_peak("decomfl", 16)
    assert many <= 1.05 * few and many <= 2.05 * size

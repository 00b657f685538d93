# SPDX-License-Identifier: Apache-2.0
"""Forward-equivalents against numbers by hand, and against forward passes counted on the real model."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hofl.algorithms import ALGORITHMS
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.models.boundary import cut
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Action, Algorithm
from hofl.protocol.probing import Probing, Shared
from hofl.protocol.split import Split
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from hofl.theory.computation import COSTS, HYBRID, Step, client, server

SEED = 7
QUARTER = Step(share=0.25, probes=2, server_steps=3, upload_every=2)

BY_HAND = {  # share 1/4, q = 2: client and server
    ("ho_fl", "forward"): (3 / 4 + 9 / 4, 0),
    ("ho_fl", "central"): (5 / 4 + 9 / 4, 0),
    ("ho_fl", "tangent"): (3 / 4 + 9 / 4, 0),
    ("ho_fl", "sketch"): (4 / 4 + 9 / 4, 0),
    ("ho_fl", "none"): (1 / 4 + 9 / 4, 0),
    ("ho_sfl", "forward"): (3 / 4, 9 / 4),
    ("ho_sfl", "sketch"): (5 / 4, 9 / 4),
    ("ho_sfl", "none"): (1 / 4, 9 / 4),
    ("hosl", "central"): (5 / 4, 7 * 3 / 4),
    ("hosl", "none"): (1 / 4, 9 / 4),
    ("heron_sfl", "forward"): (3 / 4, 9 / 8),
    ("splitfed_v1", "none"): (4 / 4, 9 / 4),
    ("splitfed_v2", "none"): (4 / 4, 9 / 4),
    ("splitlora", "none"): (4 / 4, 9 / 4),
    ("zo_sfl", "central"): (4 / 4, 4 * 3 / 4),
    ("mu_splitfed", "central"): (5 / 4, (3 * 2 + 2) * 2 * 3 / 4),
    ("fedavg", "none"): (3, 0),
    ("fedprox", "none"): (3, 0),
    ("decomfl", "central"): (4, 0),
    ("decomfl", "forward"): (3, 0),
    ("hiso", "forward"): (3, 0),
    ("fedzo", "forward"): (3, 0),
    ("mezo", "central"): (4, 0),
    ("mezo", "tangent"): (3, 0),
}


@pytest.mark.parametrize(("name", "estimator"), BY_HAND)
def test_by_hand(name: str, estimator: str) -> None:
    step = replace(QUARTER, estimator=estimator)
    assert (client(name, step), server(name, step)) == BY_HAND[name, estimator]


def test_every_method_has_its_numbers() -> None:
    assert set(COSTS) == set(ALGORITHMS) == {name for name, _ in BY_HAND}
    assert {n for n, m in ALGORITHMS.items() if "none" in m.estimators} == HYBRID


def test_a_recomputed_block_is_one_more_pass_of_what_is_backpropagated() -> None:
    saving = replace(QUARTER, checkpointing=True)
    assert (client("fedavg", saving), client("ho_fl", saving)) == (4, 3 / 4 + 4 * 3 / 4)
    assert (client("splitfed_v1", saving), server("splitfed_v1", saving)) == (5 / 4, 3)


def test_a_client_without_a_bottom_is_fedavgs() -> None:
    assert client("ho_fl", Step()) == client("fedavg", Step()) == 3


CLIENTS, BATCH, PROBES, CUT, BLOCKS = 2, 5, 3, 1, 4
WHOLE = ("decomfl", "hiso", "fedzo", "mezo")
COUNTED = [key for key in BY_HAND if key[1] not in ("tangent", "sketch")]


def built(name: str, estimator: str, task: Task) -> Algorithm:
    method, optimizer = ALGORITHMS[name], Optimizer("sgd", 0.01)
    boundaries = [CUT] * len(task.clients) if method.hybrid else []
    training = Training(SEED, 2, BATCH, optimizer, [20] * len(task.clients), run="counted")
    probing = Probing(estimator, PROBES, 1e-3, "gaussian", optimizer)
    return method.build(
        layout=task.model.layout, boundaries=boundaries, training=training, probing=probing, preferred=None,
        split=Split(task, server_steps=3, upload_every=2), shared=Shared(), proximal=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "estimator"), COUNTED)
def test_a_round_runs_the_model_as_often_as_the_formula_says(name: str, estimator: str) -> None:
    """Blocks are counted where they run: one forward, or three where a graph is recorded for a backward."""
    if not find_spec(f"hofl.algorithms.{ALGORITHMS[name].module or name}"):
        pytest.skip("not written yet")
    task = synthetic_task(Partition(clients=CLIENTS), seed=SEED, rows=60, blocks=BLOCKS)
    if ALGORITHMS[name].centralised:
        task = replace(task, clients=("all",), shards=[np.arange(20)])
    algorithm, counts, side = built(name, estimator, task), {"client": 0, "server": 0}, ["server"]

    def count(block: nn.Module, given: Any, output: torch.Tensor) -> None:
        counts[side[0]] += 3 if output.requires_grad else 1

    def inside(act: Action) -> Action:
        def run(*arguments: Any) -> Record:
            side[0] = "client"
            try:
                return act(*arguments)
            finally:
                side[0] = "server"

        return run

    state = algorithm.init(task.model.read())
    task.model.self_test(task.batch(0, 0, 2).inputs)  # as every run begins; it learns what blocks return
    for block in task.model.elements:
        block[0].register_forward_hook(count)  # inside: a skipped block is called, and does nothing
    call = local_call(task, {action: inside(act) for action, act in algorithm.actions.items()})
    outcome = algorithm.round(state, range(len(task.clients)), call)
    assert not outcome.failures
    steps = outcome.row["examples"] / BATCH
    step = Step(CUT / BLOCKS, estimator, PROBES, server_steps=3, upload_every=2)
    part = 1.0 if name in WHOLE else step.share
    checked = PROBES * part * len(task.clients) / steps if estimator == "forward" else 0.0
    checked += 1.0 if name in WHOLE and estimator == "central" else 0.0  # the loss at the anchor
    found = {who: total / BLOCKS / steps for who, total in counts.items()}
    assert found["client"] == pytest.approx(client(name, step) + checked)
    assert found["server"] == pytest.approx(server(name, step))


@pytest.mark.parametrize(("estimator", "runs"), [("forward", 4), ("central", 7), ("none", 1)])
def test_probes_run_the_bottom_as_often_as_the_formula_says(estimator: str, runs: int) -> None:
    counts = np.zeros(4, dtype=int)

    class Counting(nn.Linear):
        place = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            counts[self.place] += 1
            return super().forward(input)

    module = nn.Sequential(*(Counting(3, 3) for _ in range(4)))
    for place, block in enumerate(module):
        block.place = place
    model = cut(module)
    inputs: Any = {"input": torch.ones(2, 3)}
    directions = Directions(Key.of(1, "directions", 0, 1), "gaussian", 3, model.layout.bottom_size(2))
    z, scalars = ESTIMATORS[estimator](model.surrogate(inputs, 2), directions, 1e-3, False)
    scalars(torch.ones_like(z))
    assert counts.tolist() == [runs, runs, 0, 0]
    assert client("ho_sfl", Step(share=0.5, estimator=estimator, probes=3)) == counts.sum() / 4

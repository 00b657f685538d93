# SPDX-License-Identifier: Apache-2.0
"""SplitLoRA on paper, on a tiny model with adapters, and where a client is lost."""

import numpy as np
import pytest

from families import digest
from hofl.algorithms.splitlora import splitlora
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Replies
from hofl.protocol.split import Split
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from split_tasks import chain_task, losing, text_of

EXAMPLES = ((1.0, 1), (2.0, 0))
V, W = 0.5, 0.25


def build(task: Task, optimizer: Optimizer, boundary: int = 1, steps: int = 2, seed: int = 3) -> Algorithm:
    """The method with batches of four."""
    clients = len(task.clients)
    training = Training(seed, steps, 4, optimizer, (1,) * clients, run="t")
    return splitlora(task.model.layout, (boundary,) * clients, training, Split(task))


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_two_rounds_are_those_on_paper(seed: int) -> None:
    """o = w v x, loss (o - y)^2 / 2 at rate 0.125, momentum 0.5; 0 is before 1, whatever the seed.

    w's momentum m goes on over steps and rounds; v_i begins each of two rounds at the mean with none.
    """
    v, w, m = V, W, 0.0
    for _ in range(2):
        bottoms, own = [v, v], [0.0, 0.0]
        for _ in range(2):
            for i, (x, y) in enumerate(EXAMPLES):
                error = w * bottoms[i] * x - y
                own[i] = 0.5 * own[i] + error * w * x
                m = 0.5 * m + error * bottoms[i] * x
                bottoms[i], w = bottoms[i] - 0.125 * own[i], w - 0.125 * m
        v = sum(bottoms) / 2
    task = chain_task(EXAMPLES, [[V]], [[W]])
    algorithm = build(task, Optimizer("sgd", 0.125, momentum=0.5), seed=seed)
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    for _ in range(2):
        state = algorithm.round(state, [0, 1], call).state
    np.testing.assert_allclose(state.arrays["weights/vector"], [v, w], rtol=1e-6)
    np.testing.assert_allclose(state.arrays["weights/top_moments"], [[m]], rtol=1e-5)
    assert state.values["top_steps"] == 8


def test_only_adapters_train_and_are_averaged_apart() -> None:
    """A and B are averaged as they are; the mean of B A is another matrix: a known error of aggregation."""
    task = text_of("opt")
    model = task.model
    frozen = {n: p.detach().clone() for n, p in model.module.named_parameters() if not p.requires_grad}
    start, boundary = model.read(), 2
    d_c = model.layout.bottom_size(boundary)
    algorithm = build(task, Optimizer("adamw", 1e-2), boundary)
    state = algorithm.init(start)
    outcome = algorithm.round(state, [0, 1, 2], local_call(task, algorithm.actions))
    assert not outcome.failures
    assert all("lora_" in slot.name for slot in model.layout.slots)
    assert all(p.equal(frozen[n]) for n, p in model.module.named_parameters() if n in frozen)
    deltas = [e.reply.arrays["weights/delta"].astype(np.float64) for e in outcome.entries[1:]]
    vector = outcome.state.arrays["weights/vector"]
    assert np.array_equal(vector[:d_c], (start[:d_c] + sum(deltas) / 3).astype(np.float32))
    assert not np.array_equal(vector[d_c:], start[d_c:])
    a, b = (
        next(s for s in model.layout.slots if f"lora_{side}" in s.name and "v_proj" in s.name)
        for side in "AB"
    )

    def matrix(whole: np.ndarray, slot: object) -> np.ndarray:
        return whole[slot.offset : slot.offset + slot.size].reshape(slot.shape)

    ends = [start[:d_c] + delta for delta in deltas]
    products = np.mean([matrix(end, b) @ matrix(end, a) for end in ends], 0)
    kept = matrix(vector.astype(np.float64), b) @ matrix(vector.astype(np.float64), a)
    assert np.abs(kept - products).max() > 1e-6


def test_it_learns_with_adapters_on_both_sides() -> None:
    task = text_of("opt")
    algorithm = build(task, Optimizer("adamw", 2e-2), boundary=2, steps=3)
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    losses = []
    for _ in range(6):
        outcome = algorithm.round(state, [0, 1, 2], call)
        state = outcome.state
        losses.append(outcome.row["loss"])
    assert losses[-1] < 0.5 * losses[0]
    before = digest(task.model.module)
    assert np.array_equal(
        algorithm.rebuild(state, outcome.entries).arrays["weights/top_moments"],
        state.arrays["weights/top_moments"],
    )
    assert digest(task.model.module) == before  # a rebuild runs no model


def test_a_client_is_lost_and_one_sends_nonsense() -> None:
    """Left out of the average and explained; what the server learnt of the first one's batch stays."""
    task = chain_task((*EXAMPLES, (0.5, 3)), [[V]], [[W]])
    algorithm = build(task, Optimizer("sgd", 0.125))
    whole = losing(local_call(task, algorithm.actions), 0, "backward", 1)

    def hostile(asked, requests, deadline):
        replies = whole(asked, requests, deadline)
        if asked == "finish":
            bad = Record({"weights/delta": np.array([np.nan], dtype=np.float32)}, replies.records[2].values)
            return Replies({**replies.records, 2: bad}, replies.failures)
        return replies

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], hostile)
    assert outcome.failures[0] == "gone" and outcome.failures[2].startswith("refused: ")
    assert [e.client for e in outcome.entries] == [SERVER, 1]
    assert outcome.state.values["top_steps"] == 6
    assert outcome.state.arrays["cursors/next"].tolist() == [0, 2, 0]

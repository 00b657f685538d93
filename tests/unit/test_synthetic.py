# SPDX-License-Identifier: Apache-2.0
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from hofl.core.layout import EMBED
from hofl.errors import ConfigError
from hofl.tasks.base import Task
from hofl.tasks.files import CLIENT_ID
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task


def _task(seed: int = 1, kind: str = "iid", clients: int = 6, **sizes: Any) -> Task:
    return synthetic_task(Partition(kind, clients=clients), seed=seed, **sizes)


def _round(task: Task, start: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
    """One round of federated averaging, five steps a client, written out."""
    ends = []
    for client in range(len(task.clients)):
        task.model.write(start)
        for step in range(5):
            batch = task.batch(client, 5 * number + step, 16)
            _, gradient, _ = task.model.first_order(batch.inputs, 0, None, task.loss_on(batch))
            task.model.write(task.model.read() - np.float32(0.2) * gradient)
        ends.append(task.model.read())
    mean: np.ndarray[Any, Any] = np.mean(ends, 0, dtype=np.float64).astype(np.float32)
    task.model.write(mean)
    return mean


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "by_label"])
def test_twenty_rounds_of_averaging_learn_it(kind: str) -> None:
    task = _task(kind=kind)
    before = task.evaluate()
    values = task.model.read()
    for number in range(20):
        values = _round(task, values, number)
    after = task.evaluate()
    assert before.accuracy < 0.5 < 0.9 < after.accuracy and after.loss < 0.3 * before.loss


def test_everything_follows_the_seed_and_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = _task(1), _task(1), _task(2)
    assert np.array_equal(one.model.read(), same.model.read())
    assert not np.array_equal(one.model.read(), other.model.read())
    assert one.facts == same.facts and one.facts["data_sha256"] != other.facts["data_sha256"]
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_model_is_cut_as_it_should_be() -> None:
    task = _task(blocks=5, width=7, features=3, classes=2)
    layout = task.model.layout
    assert layout.blocks == 5 and layout.size == (3 + 1) * 7 + 4 * (7 + 1) * 7 + (7 + 1) * 2
    assert {slot.block for slot in layout.slots} == {0, 1, 2, 3, 4, 5} and EMBED not in {
        s.block for s in layout.slots
    }
    task.model.self_test(task.batch(0, 0, 4).inputs)


@pytest.mark.parametrize("boundary", [1, 2, 4])
def test_the_top_alone_has_the_full_gradient(boundary: int) -> None:
    task = _task()
    batch = task.batch(0, 0, 16)
    loss = task.loss_on(batch)
    whole, gradient, _ = task.model.first_order(batch.inputs, 0, None, loss)
    z = task.model.bottom(batch.inputs, boundary)
    part, top, feedback = task.model.first_order(batch.inputs, boundary, z, loss)
    assert part == whole and feedback is not None
    assert np.array_equal(top, gradient[task.model.layout.bottom_size(boundary) :])


def test_local_effort_is_counted_in_steps_and_wraps_in_a_new_order() -> None:
    task = _task(clients=1, rows=10)
    seen = [task.batch(0, position, 4).inputs["input"] for position in range(7)]
    assert sum(map(len, seen)) == 28
    passes = [torch.cat(seen[i : i + 2]) for i in (0, 2, 4)]
    assert all(len(torch.unique(visits, dim=0)) == 8 for visits in passes)
    assert not torch.equal(passes[0], passes[1])


def test_a_shard_below_the_batch_is_one_batch() -> None:
    task = _task(clients=6, rows=12)
    assert [len(task.batch(0, position, 16).targets) for position in range(3)] == [2, 2, 2]


def test_facts_and_ids_are_fit_for_a_manifest() -> None:
    task = _task(rows=100, evaluation_rows=40)
    facts = json.loads(json.dumps(task.facts, allow_nan=False))
    assert (facts["n_train"], facts["n_evaluation"], task.evaluate().n) == (100, 40, 40)
    assert facts["majority_class"]["rate"] == task.evaluate().majority_rate
    assert all(re.fullmatch(CLIENT_ID, client) for client in task.clients)
    assert [row["examples"] for row in facts["partition"]] == [len(shard) for shard in task.shards]


@pytest.mark.parametrize("name", ["classes", "features", "width", "blocks", "rows", "evaluation_rows"])
def test_a_size_that_is_too_small_names_itself(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"task.{name} = 0: allowed is {2 if name == 'classes' else 1} or more"
    ):
        _task(**{name: 0})

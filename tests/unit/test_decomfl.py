# SPDX-License-Identifier: Apache-2.0
"""DeComFL: a round by hand, MeZO as its special case, marks, models instead of scalars."""

from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from laws_base import ADAMW, MOMENTUM, SGD, make_task, training
from torch import nn

from clients import Clients, last, play
from hofl.algorithms import ALGORITHMS
from hofl.algorithms.decomfl import decomfl
from hofl.algorithms.mezo import mezo
from hofl.core.directions import Directions, gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, hex_digest, replay_
from hofl.models.boundary import cut
from hofl.protocol import aggregate
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Entry
from hofl.protocol.probing import SHARED, Probing, Shared, root_key
from hofl.protocol.split import Split
from hofl.runtime.local import local_call
from hofl.tasks.base import Batch, Task, cross_entropy
from hofl.tasks.metrics import Sums
from pair_task import START, pair_task


def built(
    task: Task, optimizer: Optimizer = SGD, estimator: str = "central", probes: int = 2, **more: object
) -> Algorithm:
    probing = Probing(estimator, probes, 1e-2, "gaussian", optimizer)
    shared = Shared(average=more.pop("average", "scalars"))  # type: ignore[arg-type]
    return decomfl(task.model.layout, training(optimizer, task, **more), probing, shared)


EXAMPLES = [(1.0, -0.5, 1), (0.5, 2.0, -1)]


def slope(w: list[float], example: tuple[float, float, int], u: list[float]) -> float:
    """``<gradient, u>`` of the pair's loss; a central difference of a quadratic is this exactly."""
    x1, x2, y = example
    residual = w[0] * x1 + w[1] * x2 - y
    return residual * (x1 * u[0] + x2 * u[1])


def directions_by_hand(seed: int, round: int, step: int, probe: int) -> list[float]:
    return gaussian(Key.of(seed, "directions", 0, round).fold(step).fold(probe), 0, 2).tolist()


@pytest.mark.parametrize("estimator", ["central", "tangent"])
def test_two_rounds_of_two_steps_by_hand(estimator: str) -> None:
    """Each client walks E = 2 steps with its own scalars and reverts; the averages move the model."""
    lr, decay, seed = 0.05, 0.1, 21
    x, sent = list(START), []

    def moved(w: list[float], scalars: list[float], us: list[list[float]]) -> list[float]:
        gradient = [sum(s * u[i] for s, u in zip(scalars, us, strict=True)) / 2 for i in range(2)]
        return [w[i] - lr * (gradient[i] + decay * w[i]) for i in range(2)]

    for number in range(2):
        us = [[directions_by_hand(seed, number, e, j) for j in range(2)] for e in range(2)]
        learnt = []
        for example in EXAMPLES:
            own, mine = list(x), []
            for e in range(2):
                mine.append([slope(own, example, u) for u in us[e]])
                own = moved(own, mine[-1], us[e])
            learnt.append(mine)
        sent += learnt
        for e in range(2):
            x = moved(x, [(learnt[0][e][j] + learnt[1][e][j]) / 2 for j in range(2)], us[e])
    task = pair_task(EXAMPLES)
    probing = Probing(estimator, 2, 0.1, "gaussian", Optimizer("sgd", lr, weight_decay=decay))
    setup = Training(seed, 2, 1, Optimizer("sgd", 99.0), (1, 1))
    algorithm = decomfl(task.model.layout, setup, probing, Shared())
    state, found = algorithm.init(task.model.read()), []
    for outcome in play(algorithm, state, Clients(task, algorithm.actions), [[0, 1]] * 2):
        found += [entry.reply.arrays["scalars/s"] for entry in outcome.entries]
    np.testing.assert_allclose(np.array(found), sent, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(outcome.state.arrays["weights/vector"], x, rtol=1e-4)


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_one_client_and_one_step_is_mezo(optimizer: Optimizer) -> None:
    """The whole trajectory, bit for bit (SYSTEMS 4.3)."""
    task = make_task(True)
    start = task.model.read()
    probing, setup = Probing("central", 2, 1e-2, "gaussian", optimizer), training(optimizer, task, steps=1)
    trajectories = []
    for algorithm in (
        decomfl(task.model.layout, setup, probing, Shared()),
        mezo(task.model.layout, setup, probing),
    ):
        outcomes = play(algorithm, algorithm.init(start), Clients(task, algorithm.actions), [[0]] * 6)
        trajectories.append([hex_digest(o.state.arrays["weights/vector"]) for o in outcomes])
    assert trajectories[0] == trajectories[1] and len(set(trajectories[0])) == 6


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
def test_averaged_scalars_are_averaged_models_but_not_under_adamw(optimizer: Optimizer) -> None:
    """Why AdamW needs the models: affine steps commute with a mean, its steps do not (SYSTEMS 4.3)."""
    size, start, key = 50, gaussian(Key.of(1, "init"), 0, 50), Key.of(1, "directions", 0)
    scalars = gaussian(key.fold(99), 0, 4 * 5 * 2).reshape(4, 5, 2)

    def end(grid: np.ndarray) -> np.ndarray:
        w = start.copy()
        replay_(
            w, [Step(Directions(key.fold(e), "gaussian", 2, size), s) for e, s in enumerate(grid)], optimizer
        )
        return w.astype(np.float64)

    models = np.mean([end(grid) for grid in scalars], axis=0)
    single = end(scalars.astype(np.float64).mean(axis=0).astype(np.float32))
    apart = np.linalg.norm(models - single) / np.linalg.norm(models - start)
    assert apart > 0.1 if optimizer is ADAMW else apart < 1e-5


def test_a_client_holds_the_round_before_the_one_it_took_part_in() -> None:
    """It reverts its own steps and has not seen the averages: its mark after round r is r, not r + 1."""
    task = make_task()
    algorithm = built(task)
    call = Clients(task, algorithm.actions)
    state = algorithm.init(task.model.read())
    for number, outcome in enumerate(play(algorithm, state, call, [[0, 1], [0, 2], [0, 1]])):
        kept = call.memories[0].kept
        assert kept is not None and kept.values["round"] == number
        assert np.array_equal(kept.arrays["weights/bottom"], state.arrays["weights/vector"])
        assert outcome.state.arrays["cursors/synced"][0] == number
        state = outcome.state
    assert state.arrays["cursors/synced"].tolist() == [2, 2, 1, -1, -1, -1]


def test_after_first_contact_nothing_grows_with_d() -> None:
    task = make_task()
    algorithm = built(task)
    call = Clients(task, algorithm.actions)
    last(algorithm, algorithm.init(task.model.read()), call, [[0], [0], [1], [1], [0]])
    first, second, third = call.requests(0)
    assert "weights/bottom" in first.arrays
    for request, missed in ((second, 1), (third, 3)):
        assert not [n for n in request.arrays if n.startswith("weights/")]
        assert request.arrays["scalars/history"].shape == (missed, 5, 2)


def test_learning_rate_changed_in_the_middle_of_a_run() -> None:
    """A client that missed both regimes ends where one is that missed none (the ledger has the lr)."""
    task = make_task()
    start, slower = task.model.read(), replace(SGD, lr=0.004)
    before, after = built(task), built(task, slower)
    call = Clients(task, before.actions)
    state = last(before, before.init(start), call, [[0, 1], [0], [0]])
    state = last(after, state, call, [[0], [0], [0, 1]])
    assert [r["optimizer"]["lr"] for _, r in state.values["recipes"]] == [0.05, 0.004]
    one, other = (call.memories[c].kept for c in (0, 1))
    assert one is not None and other is not None and one.values == other.values == {"round": 5}
    assert hex_digest(one.arrays["weights/bottom"]) == hex_digest(other.arrays["weights/bottom"])
    assert call.requests(1)[-1].values["since"] == 0  # by replay
    fast = Clients(task, before.actions)
    constant = last(before, before.init(start), fast, [[0, 1], [0], [0], [0], [0], [0, 1]])
    assert not np.array_equal(constant.arrays["weights/vector"], state.arrays["weights/vector"])


def cut_task(sizes: tuple[int, ...]) -> Task:
    """One network of four layers, cut into blocks of these many."""
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    with torch.no_grad():
        for place, parameter in enumerate(p for layer in layers for p in layer.parameters()):
            parameter.copy_(
                torch.from_numpy(gaussian(Key.of(1, "init", place), 0, parameter.numel())).view_as(parameter)
            )
    firsts = np.cumsum((0, *sizes))
    blocks = nn.Sequential(*(nn.Sequential(*layers[a:b]) for a, b in pairwise(firsts)))
    model = cut(nn.Sequential(OrderedDict(blocks=blocks, head=nn.Identity())), blocks="blocks")
    x = torch.from_numpy(gaussian(Key.of(2, "init"), 0, 40).reshape(10, 4))

    def collate(numbers: np.ndarray) -> Batch:
        return Batch({"input": x[numbers]}, torch.from_numpy(numbers % 4))

    shards = [np.arange(5), np.arange(5, 10)]
    return Task("cut", model, ("a", "b"), shards, collate, cross_entropy, Sums, 1)


def test_directions_do_not_depend_on_the_layout() -> None:
    """One flat stream whatever the blocks: no 'paramwise' order that only one side has (a known defect)."""
    ends = []
    for sizes in ((1, 1, 1, 1), (2, 2), (4,)):
        task = cut_task(sizes)
        algorithm = built(task, probes=1, batch=2)
        state = last(
            algorithm, algorithm.init(task.model.read()), Clients(task, algorithm.actions), [[0, 1]] * 2
        )
        ends.append((task.model.layout.fingerprint, hex_digest(state.arrays["weights/vector"])))
    assert len({layout for layout, _ in ends}) == 3 and len({end for _, end in ends}) == 1


def test_a_round_is_shared_in_scalars_and_private_in_models() -> None:
    task = make_task()
    for average, different in (("scalars", 1), ("models", 3)):
        algorithm = built(task, average=average)
        (outcome,) = play(
            algorithm, algorithm.init(task.model.read()), Clients(task, algorithm.actions), [[0, 1, 2]]
        )
        keys = {tuple(e.plan.arrays["seeds/root"].tolist()) for e in outcome.entries}
        assert len(keys) == different
        expected = {
            tuple(root_key(11, SHARED if different == 1 else c, 0).array().tolist()) for c in range(3)
        }
        assert keys == expected


def test_models_are_replayed_checked_and_averaged() -> None:
    """The mean of models that AdamW, new in each round, makes of each client's own scalars."""
    task = make_task()
    algorithm = built(task, ADAMW, "tangent", average="models")
    call = Clients(task, algorithm.actions)
    for outcome in play(algorithm, algorithm.init(task.model.read()), call, [[0, 1, 2], [1, 2, 3]]):
        start = call.requests(2)[-1].arrays["weights/vector"]
        ends = []
        for client, plan, reply in outcome.entries:
            root, w = root_key(11, client, plan.values["round"]), start.copy()
            grid = reply.arrays["scalars/s"]
            steps = [Step(Directions(root.fold(e), "gaussian", 2, len(w)), s) for e, s in enumerate(grid)]
            replay_(w, steps, ADAMW)
            ends.append(w.astype(np.float64))
        np.testing.assert_allclose(outcome.state.arrays["weights/vector"], np.mean(ends, axis=0), atol=1e-6)
        assert outcome.row["replay_ok"] is True and outcome.row["zo_signal"] == 1.0
    assert not call.memories[2].kept and outcome.state.arrays.keys() == {"weights/vector", "cursors/next"}


def test_a_model_that_differs_from_its_scalars_is_refused() -> None:
    task = make_task()
    algorithm = built(task, ADAMW, average="models")
    whole = Clients(task, algorithm.actions)

    def hostile(action, requests, deadline):
        replies = whole(action, requests, deadline)
        replies.records[1].arrays["scalars/s"].view(np.uint32)[2, 1] ^= 1 << 22
        return replies

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], hostile)
    assert outcome.failures == {1: f"refused: {aggregate.MISMATCH}"} and outcome.row["replay_ok"] is False
    assert [entry.client for entry in outcome.entries] == [0, 2]


@pytest.mark.parametrize("average", ["scalars", "models"])
def test_a_replay_takes_everything_from_the_ledger(average: str) -> None:
    """An algorithm with nobody's settings and no task rebuilds the state: optimizer, law, mode, weights."""
    task = make_task()
    algorithm = built(task, MOMENTUM, average=average, weighting="examples", sizes=(9, 1, 4, 7, 2, 5))
    state = algorithm.init(task.model.read())
    nobody = ALGORITHMS["decomfl"].build(
        layout=task.model.layout,
        boundaries=(),
        training=Training(0, 1, 1, Optimizer("sgd", 1.0), ()),
        probing=Probing("none", 1, 1.0, "gaussian", Optimizer("sgd", 1.0)),
        split=Split(),
        shared=Shared(),
        preferred=None,
        proximal=0.0,
    )
    for outcome in play(algorithm, state, Clients(task, algorithm.actions), [[0, 1], [1, 2], [0, 3]]):
        stored = [Entry(c, *(Record.from_bytes(r.to_bytes()) for r in two)) for c, *two in outcome.entries]
        state = nobody.rebuild(state, stored)
        for name, array in outcome.state.arrays.items():
            assert np.array_equal(state.arrays[name], array), name
        assert state.values == outcome.state.values


def test_it_learns() -> None:
    task = make_task()
    algorithm = built(task, Optimizer("sgd", 0.02), "tangent", probes=4)
    before = task.evaluate().to_row()["loss"]
    call = local_call(task, algorithm.actions)
    state = algorithm.init(task.model.read())
    for _ in range(25):
        state = algorithm.round(state, range(6), call).state
    task.model.write(state.arrays["weights/vector"])
    assert task.evaluate().to_row()["loss"] < before - 0.1

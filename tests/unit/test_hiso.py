# SPDX-License-Identifier: Apache-2.0
"""HiSo: rounds by hand, DeComFL where the diagonal is one, and when and how often the diagonal moves."""

import math

import numpy as np
import pytest
from laws_base import SGD, make_task, training

from clients import Clients, last, play
from hofl.algorithms.decomfl import decomfl
from hofl.algorithms.hiso import Whitened, hiso, whitened
from hofl.core.directions import Directions, gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, hex_digest, replay_
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm
from hofl.protocol.probing import Probing, Shared
from hofl.tasks.base import Task
from pair_task import START, pair_task

Pair = list[float]
EXAMPLES = [(1.0, -0.5, 1), (0.5, 2.0, -1)]
SEED, LR, DECAY, NU, FLOOR, STEPS, Q = 21, 0.05, 0.1, 0.25, 0.01, 2, 2


def by_hand(every: str, rounds: int) -> tuple[Pair, Pair, list[float]]:
    """x, H and all scalars sent, in plain arithmetic from the method's equations."""
    x, h, sent = list(START), [1.0, 1.0], []

    def slope(w: Pair, example: tuple[float, float, int], z: Pair) -> float:
        residual = w[0] * example[0] + w[1] * example[1] - example[2]
        return residual * (example[0] * z[0] + example[1] * z[1])

    def walk(w: Pair, diagonal: Pair, scalars: list[float], us: list[Pair], e: int) -> tuple[Pair, Pair]:
        dx = [
            sum(s * u[i] for s, u in zip(scalars, us, strict=True)) / Q / math.sqrt(diagonal[i])
            for i in (0, 1)
        ]
        if every == "step" or e == STEPS - 1:
            after = [(1 - NU) * diagonal[i] + NU * (dx[i] ** 2 + FLOOR) for i in (0, 1)]
        else:
            after = diagonal
        return [w[i] - LR * (dx[i] + DECAY * w[i]) for i in (0, 1)], after

    for number in range(rounds):
        root = Key.of(SEED, "directions", 0, number)
        us = [[gaussian(root.fold(e).fold(j), 0, 2).tolist() for j in range(Q)] for e in range(STEPS)]
        learnt = []
        for example in EXAMPLES:
            own, diagonal, mine = list(x), list(h), []
            for e in range(STEPS):
                zs = [[u[i] / math.sqrt(diagonal[i]) for i in (0, 1)] for u in us[e]]
                mine.append([slope(own, example, z) for z in zs])
                own, diagonal = walk(own, diagonal, mine[-1], us[e], e)
            learnt.append(mine)
        sent += np.array(learnt).ravel().tolist()
        for e in range(STEPS):
            x, h = walk(x, h, [(learnt[0][e][j] + learnt[1][e][j]) / 2 for j in range(Q)], us[e], e)
    return x, h, sent


@pytest.mark.parametrize("every", ["round", "step"])
def test_three_rounds_of_two_steps_by_hand(every: str) -> None:
    """Probes along H^{-1/2} u, the step, and H by the last step's dx or by each one's."""
    x, h, sent = by_hand(every, 3)
    task = pair_task(EXAMPLES)
    probing = Probing("central", Q, 0.1, "gaussian", Optimizer("sgd", LR, weight_decay=DECAY))
    setup = Training(SEED, STEPS, 1, Optimizer("sgd", 99.0), (1, 1))
    algorithm = hiso(task.model.layout, setup, probing, Shared(curvature=NU, floor=FLOOR, every=every))  # type: ignore[arg-type]
    found: list[float] = []
    state = algorithm.init(task.model.read())
    for outcome in play(algorithm, state, Clients(task, algorithm.actions), [[0, 1]] * 3):
        found += np.array([entry.reply.arrays["scalars/s"] for entry in outcome.entries]).ravel().tolist()
    np.testing.assert_allclose(found, sent, rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(outcome.state.arrays["weights/moments"], [h], rtol=1e-4)
    np.testing.assert_allclose(outcome.state.arrays["weights/vector"], x, rtol=1e-4)


def built(method, task: Task, estimator: str = "central", probes: int = 2, **more: object) -> Algorithm:
    return method(
        task.model.layout,
        training(SGD, task),
        Probing(estimator, probes, 1e-2, "gaussian", SGD),
        Shared(**more),
    )


@pytest.mark.parametrize("estimator", ["forward", "central"])
@pytest.mark.parametrize("every", ["round", "step"])
def test_a_diagonal_of_ones_is_decomfl(estimator: str, every: str) -> None:
    """Scalars, trajectory and what clients keep, bit for bit (SYSTEMS 4.3)."""
    task = make_task()
    start, cohorts, seen = task.model.read(), [[0, 1], [1, 2], [0, 3], [0, 2]], []
    for algorithm in (
        built(hiso, task, estimator, curvature=0.0, every=every),
        built(decomfl, task, estimator),
    ):
        call = Clients(task, algorithm.actions)
        outcomes = list(play(algorithm, algorithm.init(start), call, cohorts))
        scalars = [e.reply.arrays["scalars/s"].tobytes() for o in outcomes for e in o.entries]
        vectors = [hex_digest(o.state.arrays["weights/vector"]) for o in outcomes]
        kept = [hex_digest(call.memories[c].kept.arrays["weights/bottom"]) for c in range(4)]
        seen.append((scalars, vectors, kept))
    assert seen[0] == seen[1]
    moving = built(hiso, task, estimator)
    state = last(moving, moving.init(start), Clients(task, moving.actions), cohorts)
    assert hex_digest(state.arrays["weights/vector"]) != seen[0][1][-1]


@pytest.mark.parametrize("probes", [1, 2, 5])
def test_the_diagonal_moves_once_a_step_by_the_square_of_the_mean(probes: int) -> None:
    """Whatever q is; not q times, and not by each direction's own square (a known defect)."""
    size, key = 40, Key.of(1, "directions", 0)
    update = Whitened(0.1, 0.0, 0.05, 1e-8, 1)
    directions, scalars = Directions(key, "gaussian", probes, size), gaussian(key.fold(9), 0, probes)
    h = (1.0 + gaussian(key.fold(8), 0, size) ** 2).astype(np.float32)
    state, w = [h.copy()], np.zeros(size, dtype=np.float32)
    replay_(w, [Step(directions, scalars)], update, state)
    us = np.array([directions.block(j, 0, size) for j in range(probes)], dtype=np.float64)
    dx = (scalars.astype(np.float64) @ us) / probes / np.sqrt(h)
    np.testing.assert_allclose(state[0], 0.95 * h + 0.05 * (dx**2 + 1e-8), rtol=1e-5)
    np.testing.assert_allclose(w, -0.1 * dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [7, 64, 1000])
def test_bits_do_not_depend_on_the_block(block: int) -> None:
    key, update = Key.of(2, "directions", 0), Whitened(0.1, 0.01, 0.2, 1e-8, 2)
    steps = [
        Step(Directions(key.fold(e), "gaussian", 2, 300), gaussian(key.fold(50 + e), 0, 2)) for e in range(6)
    ]
    ends = []
    for size in (block, 1 << 16):
        w, state = gaussian(key, 0, 300), list(update.init(300))
        replay_(w, steps, update, state, block=size)
        ends.append((hex_digest(w), hex_digest(state[0])))
    assert ends[0] == ends[1]


def test_the_diagonal_moves_at_the_end_of_a_round_only() -> None:
    """Steps are counted over the run: of E = 3 the third, the sixth ... move it, and later steps see that."""
    update, moves = Whitened(0.1, 0.0, 0.5, 0.0, 3), []
    w, state = np.zeros(4, dtype=np.float32), list(update.init(4))
    for step in range(1, 8):
        before = state[0].copy()
        update.update_(w, np.full(4, 2.0, dtype=np.float32), state, step)
        moves.append(not np.array_equal(before, state[0]))
    assert moves == [False, False, True, False, False, True, False]


def test_a_client_keeps_the_diagonal_of_the_round_whatever_its_own_steps_are() -> None:
    task = make_task()
    for every in ("round", "step"):
        algorithm = built(hiso, task, every=every)
        call, state = Clients(task, algorithm.actions), algorithm.init(task.model.read())
        for outcome in play(algorithm, state, call, [[0, 1], [0, 2], [0, 1]]):
            for client in (e.client for e in outcome.entries):
                kept = call.memories[client].kept
                assert kept is not None
                assert np.array_equal(kept.arrays["weights/moments"], state.arrays["weights/moments"])
            state = outcome.state
        assert (state.arrays["weights/moments"] != 1.0).all()


def test_probing_whitens_and_stepping_does_not() -> None:
    directions = Directions(Key.of(1, "directions", 0), "gaussian", 2, 50)
    h = np.linspace(0.25, 4.0, 50, dtype=np.float32)
    z = whitened(directions, [h])
    assert np.array_equal(z.block(1, 10, 30), directions.block(1, 10, 30) / np.sqrt(h[10:30]))
    assert np.array_equal(whitened(directions, [np.ones_like(h)]).block(0, 0, 50), directions.block(0, 0, 50))


def test_a_snapshot_has_the_diagonal_and_a_recipe_the_whole_law() -> None:
    task = make_task()
    algorithm = built(hiso, task, curvature=0.2, floor=1e-6, every="step")
    call = Clients(task, algorithm.actions)
    state = last(algorithm, algorithm.init(task.model.read()), call, [[0], [0], [1], [0]])
    newcomer = call.requests(1)[0]
    assert newcomer.arrays["weights/moments"].shape == (1, task.model.layout.size)
    assert not (newcomer.arrays["weights/moments"] == 1.0).any()
    ((_, recipe),) = state.values["recipes"]
    assert recipe["optimizer"] == {
        "lr": 0.05,
        "weight_decay": 1e-3,
        "curvature": 0.2,
        "floor": 1e-6,
        "every": 1,
    }
    law = Whitened.from_values(Record.from_bytes(Record({}, recipe).to_bytes()).values["optimizer"])
    assert law == Whitened(0.05, 1e-3, 0.2, 1e-6, 1)

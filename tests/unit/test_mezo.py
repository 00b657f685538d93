# SPDX-License-Identifier: Apache-2.0
"""MeZO: two steps by hand, DeComFL's special case, what crosses, and a run that is keys and scalars."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from laws_base import ADAMW, MOMENTUM, SGD, make_task
from laws_base import training as laws_training

from hofl.algorithms.decomfl import decomfl
from hofl.algorithms.mezo import mezo
from hofl.core.directions import gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Call, Replies, RoundVoid
from hofl.protocol.probing import Probing, Shared
from hofl.runtime import ledger
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from pair_task import START, pair_task


def central(task: Task, optimizer: Optimizer = SGD, probes: int = 2, **more: object) -> Algorithm:
    probing = Probing("central", probes, 1e-2, "gaussian", optimizer)
    return mezo(task.model.layout, laws_training(optimizer, task, **more), probing)


def watched(call: Call, sent: list[Record]) -> Call:
    """A call that keeps the requests."""

    def spied(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        sent.extend(requests.values())
        return call(action, requests, deadline)

    return spied


def test_two_rounds_of_two_steps_by_hand() -> None:
    """``s = (loss+ - loss-) / 2 eps`` at theta +- eps z, ``theta -= lr (s z + decay theta)``, n = 1."""
    eps, lr, decay, seed, example = 0.5, 0.05, 0.1, 21, (1.0, -0.5, 1)

    def loss(w: list[float]) -> float:
        return (w[0] * example[0] + w[1] * example[1] - example[2]) ** 2 / 2

    theta, scalars = list(START), []
    for number in range(2):
        for step in range(2):
            key = Key.of(seed, "directions", 0, number).fold(step).fold(0)
            z = gaussian(key, 0, 2).tolist()
            ahead, behind = ([theta[i] + side * eps * z[i] for i in range(2)] for side in (1, -1))
            scalars.append((loss(ahead) - loss(behind)) / (2 * eps))
            theta = [theta[i] - lr * (scalars[-1] * z[i] + decay * theta[i]) for i in range(2)]
    task = pair_task([example])
    probing = Probing("central", 1, eps, "gaussian", Optimizer("sgd", lr, weight_decay=decay))
    algorithm = mezo(task.model.layout, Training(seed, 2, 1, Optimizer("sgd", 99.0), (1,)), probing)
    state, call, found = algorithm.init(task.model.read()), local_call(task, algorithm.actions), []
    for _ in range(2):
        outcome = algorithm.round(state, [0], call)
        state = outcome.state
        found += outcome.entries[0].reply.arrays["scalars/s"].ravel().tolist()
    np.testing.assert_allclose(found, scalars, rtol=1e-5)
    np.testing.assert_allclose(state.arrays["weights/vector"], theta, rtol=1e-5)
    assert outcome.row["replay_ok"] is True and state.arrays["cursors/synced"].tolist() == [2]


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM], ids=["sgd", "momentum"])
@pytest.mark.parametrize("probes", [1, 3])
def test_it_is_decomfl_with_one_client_and_one_step(optimizer: Optimizer, probes: int) -> None:
    """Bit for bit, over rounds that lag in one and not in the other (SYSTEMS 4.3)."""
    start, states = make_task(True).model.read(), []
    for method in ("mezo", "decomfl"):
        task = make_task(True)
        probing = Probing("central", probes, 1e-2, "gaussian", optimizer)
        training = laws_training(optimizer, task, steps=1)
        algorithm = (
            mezo(task.model.layout, training, probing)
            if method == "mezo"
            else decomfl(task.model.layout, training, probing, Shared())
        )
        state, call = algorithm.init(start), local_call(task, algorithm.actions)
        for _ in range(5):
            outcome = algorithm.round(state, [0], call)
            assert not outcome.failures
            state = outcome.state
        states.append(state)
    for name in ("weights/vector", "weights/moments", "cursors/next"):
        assert np.array_equal(states[0].arrays[name], states[1].arrays[name]), name
    assert not np.array_equal(states[0].arrays["weights/vector"], start)


def test_weights_cross_once_and_again_after_a_loss_of_memory() -> None:
    task = make_task(True)
    algorithm = central(task, ADAMW)
    sent: list[Record] = []
    state, straight = algorithm.init(task.model.read()), []
    call = watched(local_call(task, algorithm.actions), sent)
    for _ in range(4):
        state = algorithm.round(state, [0], call).state
        straight.append(state.arrays["weights/vector"])
    holding = [sorted(n for n in r.arrays if n.startswith("weights/")) for r in sent]
    assert holding == [["weights/bottom", "weights/moments"], [], [], []]
    # the same from round 2 on, with a trainer that was started anew: asked in vain, then sent a snapshot
    state = algorithm.init(make_task(True).model.read())
    call, sent = local_call(task, algorithm.actions), []
    for number in range(4):
        if number == 2:
            call = watched(local_call(task, algorithm.actions), sent)
        outcome = algorithm.round(state, [0], call)
        assert not outcome.failures
        state = outcome.state
        assert np.array_equal(state.arrays["weights/vector"], straight[number])
    assert ["weights/bottom" in r.arrays for r in sent] == [False, True, False]


@pytest.mark.parametrize("wrong", ["digest", "scalar", "gone"])
def test_a_void_round_is_repeated_from_the_servers_state(wrong: str) -> None:
    """The trainer has moved, the server has not: it is sent where the server is, and all goes on."""
    task = make_task(True)
    algorithm = central(task, MOMENTUM)
    call = local_call(task, algorithm.actions)
    first = algorithm.round(algorithm.init(task.model.read()), [0], call).state

    def hostile(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = call(action, requests, deadline)
        if wrong == "gone":
            return Replies({}, {0: "gone"})
        arrays = {n: a.copy() for n, a in replies.records[0].arrays.items()}
        if wrong == "digest":
            arrays["digests/bottom"][3] ^= 1
        else:
            arrays["scalars/s"].view(np.uint32)[0, 0] ^= 1 << 22
        return Replies({0: Record(arrays, replies.records[0].values)}, {})

    with pytest.raises(RoundVoid) as void:
        algorithm.round(first, [0], hostile)
    assert void.value.failures[0] == "gone" if wrong == "gone" else "differs" in void.value.failures[0]
    again = algorithm.round(first, [0], call)
    other = make_task(True)
    fresh = algorithm.round(first, [0], local_call(other, algorithm.actions))
    assert not again.failures
    assert np.array_equal(again.state.arrays["weights/vector"], fresh.state.arrays["weights/vector"])


def test_a_ledger_of_everything_holds_no_weights(tmp_path: Path) -> None:
    """Mode "full": scalars, a key and a digest a round, whatever d is; the run comes back from them."""
    task = make_task(True)
    start = task.model.read()
    algorithm = central(task, ADAMW, 1, steps=50)
    state, call = algorithm.init(start), local_call(task, algorithm.actions)
    book = ledger.create(tmp_path / "ledger.sqlite", "full", "mezo")
    stored = 0
    for number in range(1, 4):
        outcome = algorithm.round(state, [0], call)
        (entry,) = outcome.entries
        assert {n.partition("/")[0] for r in (entry.plan, entry.reply) for n in r.arrays} == {
            "seeds", "scalars", "digests", "metrics"
        }  # fmt: skip
        stored += len(entry.plan.to_bytes()) + len(entry.reply.to_bytes())
        book.append(number, outcome.entries)
        state = outcome.state
    book.close()
    assert stored / (3 * 50) < 40  # bytes a step, of them 4 the scalar
    file = (tmp_path / "ledger.sqlite").read_bytes()
    for vector in (start, state.arrays["weights/vector"]):
        fours = [vector[i : i + 4] for i in range(0, len(vector) - 4, 4)]
        looked_for = [four.tobytes() for four in fours if four.all()]  # zeros are everywhere
        assert len(looked_for) > 20 and not any(four in file for four in looked_for)


def test_the_recipe_of_a_round_is_in_its_entry() -> None:
    """A replay reads learning rate and q from the ledger, never from today's settings."""
    task = make_task(True)
    algorithm = central(task)
    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, [0], local_call(task, algorithm.actions))
    other = central(task, Optimizer("sgd", 9.0), 2, seed=99)
    rebuilt = other.rebuild(state, outcome.entries)
    assert np.array_equal(rebuilt.arrays["weights/vector"], outcome.state.arrays["weights/vector"])


def test_it_learns() -> None:
    task = make_task(True)
    optimizer = Optimizer("sgd", 1e-2)
    algorithm = central(task, optimizer, 1, steps=20)
    state, call, losses = algorithm.init(task.model.read()), local_call(task, algorithm.actions), []
    for _ in range(15):
        outcome = algorithm.round(state, [0], call)
        state = outcome.state
        losses.append(outcome.row["loss"])
        assert outcome.row["examples"] == 20 * 8 and outcome.row["zo_signal"] > 0.9
    assert losses[-1] < 0.6 * losses[0]

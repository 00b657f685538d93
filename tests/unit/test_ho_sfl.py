# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import numpy as np
import pytest

from hofl.algorithms import ALGORITHMS
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.models.boundary import CutModel
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Replies
from hofl.protocol.probing import Probing
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from hofl.theory import communication
from two_numbers import built, played, texts, two_numbers


def points() -> Task:
    return synthetic_task(Partition(clients=2), seed=1, rows=40, width=6)


def gradients(w0: float, w1: float, x: float, y: float) -> tuple[float, float]:
    """Of ``(w1 w0 x - y)^2 / 2``: dloss/dz times x, and the top's."""
    error = w1 * w0 * x - y
    return error * w1 * x, error * w0 * x


@pytest.mark.parametrize("estimator", ["forward", "central", "tangent", "sketch"])
@pytest.mark.parametrize("probes", [1, 3])
def test_a_round_worked_out_by_hand(estimator: str, probes: int) -> None:
    """Two clients at (0.5, 3): gradients (12, 2) and (4.5, 0.75), averaged once: (8.25, 1.375)."""
    task = two_numbers((0, 1))
    algorithm = built("ho_sfl", task, estimator=estimator, probes=probes)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1, (0, 1))
    assert gradients(0.5, 3.0, 2.0, 1.0) == (12.0, 2.0) and gradients(0.5, 3.0, 1.0, 0.0) == (4.5, 0.75)
    # z is linear in w0, so every estimator has the exact slope along u = +-1
    expected = [0.5 - 0.01 * (12.0 + 4.5) / 2, 3.0 - 0.1 * (2.0 + 0.75) / 2]
    assert outcome.state.arrays["weights/vector"] == pytest.approx(expected, rel=1e-6)
    # losses (3 - 1)^2 / 2 and (1.5 - 0)^2 / 2
    assert outcome.row["loss"] == pytest.approx((2.0 + 1.125) / 2) and outcome.row["examples"] == 2
    for entry, slope in zip(outcome.entries[1:], (12.0, 4.5), strict=True):
        assert np.abs(entry.reply.arrays["scalars/s"]) == pytest.approx(slope)


@pytest.mark.parametrize("clients", [2, 5])
def test_identical_clients_take_the_step_of_one(clients: int) -> None:
    """Under SGD, so nothing is divided by K twice: neither the feedback nor the top's gradient (D-3)."""
    vectors = []
    for places in ((0,), (0,) * clients):
        task = two_numbers(places)
        algorithm = built("ho_sfl", task, estimator="forward", probes=2)
        cohort = range(len(places))
        *_, last = played(algorithm, task, local_call(task, algorithm.actions), 3, cohort)
        vectors.append(last.state.arrays["weights/vector"])
    np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-6)
    assert np.abs(vectors[0] - [0.5, 3.0]).min() > 0.05


def federated(task: Task, boundary: int, estimator: str) -> Algorithm:
    """HO-FL with the same cut, seeds and rates, one local step."""
    sgd = Optimizer("sgd", 0.05)
    training = Training(3, 1, 4, sgd, tuple(map(len, task.shards)), run="two")
    probing = Probing(estimator, 2, 0.01, "gaussian", sgd)
    cuts = (boundary,) * len(task.clients)
    given = {"layout": task.model.layout, "boundaries": cuts, "training": training, "probing": probing}
    return ALGORITHMS["ho_fl"].build(**given, preferred=None)


@pytest.mark.parametrize("estimator", ["forward", "tangent"])
@pytest.mark.parametrize(
    ("make", "boundary"), [(points, 2), (lambda: texts("llama"), 2), (lambda: texts("bert", "head-v1"), 1)]
)
def test_with_one_client_it_is_ho_fl_with_one_step(
    make: Callable[[], Task], boundary: int, estimator: str
) -> None:
    """SGD, client 0, the top on the server: scalars, losses and the whole path have the same bits."""
    task = make()
    start = task.model.read()
    settings = {"estimator": estimator, "probes": 2, "radius": 0.01, "directions": "gaussian", "batch": 4}
    split = built("ho_sfl", task, boundary, rates=(0.05, 0.05), **settings)
    one = [*played(split, task, local_call(task, split.actions), 6)]
    task.model.write(start)
    whole = federated(task, boundary, estimator)
    other = [*played(whole, task, local_call(task, whole.actions), 6)]
    for here, there in zip(one, other, strict=True):
        scalars = [o.entries[-1].reply.arrays["scalars/s"] for o in (here, there)]
        assert np.array_equal(*scalars) and here.row["loss"] == there.row["loss"]
        vectors = [o.state.arrays["weights/vector"] for o in (here, there)]
        assert np.array_equal(*vectors)
    assert not np.array_equal(vectors[0], start)


def test_half_precision_on_the_wire_halves_the_bytes_and_learns() -> None:
    taken = {}
    for wire in ("float32", "bfloat16"):
        task, meter = points(), Meter()
        settings = {"estimator": "tangent", "probes": 8, "directions": "gaussian", "batch": 8}
        algorithm = built("ho_sfl", task, 2, rates=(0.05, 0.3), wire=wire, **settings)
        call = local_call(task, algorithm.actions, meter)
        outcomes = [*played(algorithm, task, call, 40, (0, 1))]
        assert not any(outcome.failures for outcome in outcomes)
        assert outcomes[-1].row["loss"] < 0.5 * outcomes[0].row["loss"]
        taken[wire] = meter.take()
    for way, category in ((0, "activations"), (1, "feedback")):
        assert taken["float32"][way][category] == 2 * taken["bfloat16"][way][category] == 40 * 2 * 8 * 6 * 4
    assert taken["float32"][0]["labels"] == taken["bfloat16"][0]["labels"]


@pytest.mark.parametrize(("estimator", "passes"), [("tangent", 0), ("forward", 2), ("central", 4)])
def test_forward_passes_left_when_the_feedback_arrives(
    estimator: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exact tangents a client has dot products left: not one pass of the bottom."""
    task, runs = points(), []
    algorithm = built("ho_sfl", task, 2, estimator=estimator, probes=2, directions="gaussian")
    whole, run = local_call(task, algorithm.actions), CutModel.stop

    def counting(model: CutModel, *given: object, **named: object) -> object:
        runs.append(model)
        return run(model, *given, **named)

    monkeypatch.setattr(CutModel, "stop", counting)
    found = []

    def spying(action, requests, deadline):
        runs.clear()
        replies = whole(action, requests, deadline)
        found.append((action, len(runs)))
        return replies

    outcomes = [*played(algorithm, task, spying, 4)]  # the last one after the rounds with diagnostic passes
    assert not outcomes[-1].failures
    assert [action for action, _ in found[-3:]] == ["activate", "probe", "settle"]
    assert found[-3][1] > 0 and found[-2:] == [("probe", passes), ("settle", 0)]


def test_a_client_that_was_away_replays_what_it_missed_and_one_away_for_long_gets_a_snapshot() -> None:
    """Client 1 is there in rounds 0, 3 and 9 of a window of 4; its bottom is always the server's."""
    task, meter = points(), Meter()
    algorithm = built("ho_sfl", task, 2, estimator="tangent", probes=2, directions="gaussian", history=4)
    d_c = task.model.layout.bottom_size(2)
    whole, news = local_call(task, algorithm.actions, meter), []

    def spying(action, requests, deadline):
        if action == "activate" and 1 in requests:
            mine = {"weights", "scalars", "seeds", "digests"}
            news.append({n: a.nbytes for n, a in requests[1].arrays.items() if n.partition("/")[0] in mine})
        return whole(action, requests, deadline)

    state = algorithm.init(task.model.read())
    for t in range(10):
        outcome = algorithm.round(state, [0, 1] if t in (0, 3, 9) else [0], spying)
        assert not outcome.failures and outcome.row["replay_ok"]
        state = outcome.state
    for sent, lag in zip(news, (None, 2, None), strict=True):
        del sent["seeds/root"]
        expected = communication.catch_up(d_c, 1, 2, lag)
        assert sum(sent.values()) == sum(expected.values())
        assert ("weights/bottom" in sent) == (lag is None)


def test_a_client_lost_after_its_activation_is_left_out_of_the_scalars() -> None:
    """The scalars are averaged over those that returned, and the top keeps the step it could take (D-2)."""
    task = two_numbers((0, 1))
    algorithm = built("ho_sfl", task, estimator="tangent")
    whole = local_call(task, algorithm.actions)

    def lossy(action, requests, deadline):
        replies = whole(action, requests, deadline)
        if action == "probe":
            del replies.records[1]
            return Replies(replies.records, {1: "gone"})
        return replies

    (outcome,) = played(algorithm, task, lossy, 1, (0, 1))
    assert outcome.failures == {1: "gone"} and [e.client for e in outcome.entries] == [SERVER, 0]
    # the bottom by client 0 alone; the top by both gradients it had
    assert outcome.state.arrays["weights/vector"] == pytest.approx(
        [0.5 - 0.01 * 12, 3 - 0.1 * 1.375], rel=1e-6
    )


def test_feedback_of_another_batch_is_refused() -> None:
    task = two_numbers((0, 1))
    algorithm = built("ho_sfl", task, estimator="tangent")
    whole = local_call(task, algorithm.actions)

    def crossing(action, requests, deadline):
        if action == "probe":  # the feedback of client 0's batch goes to client 1
            values = {**requests[1].values, "batch_id": requests[0].values["batch_id"]}
            requests = {**requests, 1: Record(requests[0].arrays, values)}
        return whole(action, requests, deadline)

    (outcome,) = played(algorithm, task, crossing, 1, (0, 1))
    assert "not in the step" in outcome.failures[1] and set(outcome.failures) == {1}


def test_a_frozen_bottom_gets_neither_key_nor_feedback() -> None:
    task, asked = two_numbers(), []
    algorithm = built("ho_sfl", task, estimator="none")
    whole = local_call(task, algorithm.actions)

    def spying(action, requests, deadline):
        asked.append((action, {name.partition("/")[0] for name in requests[0].arrays}))
        return whole(action, requests, deadline)

    *_, last = played(algorithm, task, spying, 2)
    assert asked == [("activate", {"digests", "weights"}), ("activate", {"digests"})]
    w0, w1 = last.state.arrays["weights/vector"]
    assert w0 == 0.5 and w1 < 2.9


def test_adaptive_moments_are_shared_persist_and_are_replayed() -> None:
    """Under AdamW a client that missed two rounds has the bits of the others, moments included."""
    task = two_numbers((0, 1))
    algorithm = built("ho_sfl", task, estimator="tangent", optimizer="adamw", rates=(0.01, 0.01))
    whole = local_call(task, algorithm.actions)
    state = algorithm.init(task.model.read())
    for t in range(4):
        outcome = algorithm.round(state, [0, 1] if t in (0, 3) else [0], whole)
        assert not outcome.failures and outcome.row["replay_ok"]
        state = outcome.state
    assert all(e.reply.values["in_step"] for e in outcome.entries[1:])
    m, v = state.arrays["weights/moments"][:, 0]
    assert m != 0 and v > 0

# SPDX-License-Identifier: Apache-2.0
"""HERON-SFL on paper, its estimate beside backpropagation, and where something is lost or wrong."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hofl.algorithms.heron_sfl import heron_sfl
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError, ModelError, RecordError
from hofl.models.auxiliary import AuxiliarySurrogate, features, head_loss, start_head
from hofl.protocol import learner
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Memory, RoundVoid
from hofl.protocol.probing import Probing, root_key
from hofl.protocol.split import Split
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task, cross_entropy
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from split_tasks import chain_task, losing, text_of

SGD = Optimizer("sgd", 0.125)
MU = 2.0**-7
V = [[0.5], [-1.0], [0.25]]
W = [[0.25, -0.5, 1.0], [0.75, 0.5, -0.25]]


def build(task: Task, steps: int = 2, every: int = 1, boundary: int = 1, **more: Any) -> Algorithm:
    """The method with batches of four; by default one sign direction, forward."""
    clients = len(task.clients)
    probing = Probing(
        more.pop("estimator", "forward"),
        more.pop("probes", 1),
        MU,
        more.pop("family", "rademacher"),
        more.pop("optimizer", SGD),
    )
    training = Training(3, steps, 4, more.pop("server", SGD), (1,) * clients, run="t", **more)
    return heron_sfl(
        task.model.layout, (boundary,) * clients, training, probing, Split(task, upload_every=every)
    )


def softmax_loss(logits: list[float], y: int) -> float:
    """On paper: ln sum exp o - o_y."""
    return math.log(sum(math.exp(o) for o in logits)) - logits[y]


def auxiliary_on_paper(local: list[float], x: float, y: int) -> float:
    """v (3), then the head's weight (2 x 3) and bias (2): layer norm of v x, linear, cross-entropy."""
    z = [v * x for v in local[:3]]
    mean = sum(z) / 3
    spread = math.sqrt(sum((a - mean) ** 2 for a in z) / 3 + 1e-5)
    seen = [(a - mean) / spread for a in z]
    rows = [local[3:6], local[6:9]]
    return softmax_loss(
        [sum(a * b for a, b in zip(r, seen, strict=True)) + c for r, c in zip(rows, local[9:], strict=True)],
        y,
    )


def test_a_round_is_the_one_on_paper() -> None:
    """Two clients, h = 3, k = 2: theta_l by sign directions, theta_s by gradients of uploads at 0 and 2."""
    examples = ((1.0, 1), (2.0, 0))
    task = chain_task(examples, V, W, cross_entropy, ("no", "yes"))
    algorithm = build(task, steps=3, every=2)
    state = algorithm.init(task.model.read())
    head = state.arrays["weights/auxiliary"].tolist()
    local_start = [row[0] for row in V] + head
    assert len(head) == 8 and head[6:] == [0.0, 0.0]
    ends, uploads = [], {0: {}, 2: {}}
    for client, (x, y) in enumerate(examples):
        local = list(local_start)
        for e in range(3):
            if e in uploads:
                uploads[e][client] = [v * x for v in local[:3]]
            key = root_key(3, client, 0).fold(e)
            u = Directions(key, "rademacher", 1, 11).block(0, 0, 11).tolist()
            ahead = [a + MU * b for a, b in zip(local, u, strict=True)]
            s = (auxiliary_on_paper(ahead, x, y) - auxiliary_on_paper(local, x, y)) / MU
            local = [a - 0.125 * s * b for a, b in zip(local, u, strict=True)]
        ends.append(local)
    w, losses = [list(row) for row in W], []
    for e in (0, 2):
        for client in learner.seeded_order(3, 0, e, [0, 1]):
            z, y = uploads[e][client], examples[client][1]
            logits = [sum(a * b for a, b in zip(row, z, strict=True)) for row in w]
            losses.append(softmax_loss(logits, y))
            share = [math.exp(o) / sum(map(math.exp, logits)) for o in logits]
            w = [
                [a - 0.125 * (share[c] - (c == y)) * b for a, b in zip(w[c], z, strict=True)] for c in (0, 1)
            ]
    outcome = algorithm.round(state, [0, 1], local_call(task, algorithm.actions))
    vector, found = outcome.state.arrays["weights/vector"], outcome.state.arrays["weights/auxiliary"]
    expected = np.mean(ends, 0)
    np.testing.assert_allclose(vector[:3], expected[:3], atol=3e-5)
    np.testing.assert_allclose(found, expected[3:], atol=3e-5)
    np.testing.assert_allclose(vector[3:], np.ravel(w), rtol=1e-4)
    assert outcome.row["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert outcome.row["examples"] == 6 and outcome.state.values["top_steps"] == 4
    assert outcome.state.arrays["cursors/next"].tolist() == [3, 3]


def mlp() -> Task:
    return synthetic_task(Partition(clients=3), seed=5, rows=60, width=6)


def surrogate_of(task: Task, boundary: int, client: int = 0) -> tuple[AuxiliarySurrogate, np.ndarray]:
    """The auxiliary loss of a batch, and its gradient by backpropagation: float64 [d_c + d_a]."""
    batch, model = task.batch(client, 0, 8), task.model
    z = model.bottom(batch.inputs, boundary)
    head = start_head(Key.of(1, "init"), features(z, batch.inputs).shape[1], len(task.facts["labels"]))
    theta = torch.from_numpy(head.astype(np.float64)).requires_grad_()
    below = model.bottom_parameters(boundary)
    loss = head_loss(theta, features(model.stop(batch.inputs, boundary), batch.inputs), batch.targets)
    gradient = np.concatenate([g.numpy().ravel() for g in torch.autograd.grad(loss, [*below, theta])])
    return AuxiliarySurrogate(model, batch.inputs, boundary, head, batch.targets), gradient


@pytest.mark.parametrize(
    ("make", "boundary"), [(mlp, 2), (lambda: text_of("opt"), 1), (lambda: text_of("bert"), 1)],
    ids=["mlp", "opt", "bert"],
)  # fmt: skip
def test_all_hadamard_directions_make_the_gradient_of_the_auxiliary_loss(
    make: Callable[[], Task], boundary: int
) -> None:
    """Bottom and head together, central differences: cosine and length of the first-order step."""
    task = make()
    surrogate, gradient = surrogate_of(task, boundary)
    n, before = len(gradient), task.model.read()
    q = 1 << (n - 1).bit_length()
    directions = Directions(Key.of(2, "directions"), "hadamard", q, n)
    loss, probe = ESTIMATORS["central"](surrogate, directions, 1e-3, False)
    learnt = probe(torch.ones_like(loss))
    estimate = directions.combination(learnt.values.astype(np.float32))(0, n)
    cosine = estimate @ gradient / np.linalg.norm(estimate) / np.linalg.norm(gradient)
    assert cosine > 0.99 and np.linalg.norm(estimate) == pytest.approx(np.linalg.norm(gradient), rel=0.02)
    d_c = task.model.layout.bottom_size(boundary)
    assert np.linalg.norm(gradient[:d_c]) > 0 and np.linalg.norm(gradient[d_c:]) > 0
    assert np.array_equal(task.model.read(), before)
    assert np.array_equal(surrogate.anchor[:d_c], before[:d_c])


def test_the_sphere_is_the_papers_with_its_factor_once() -> None:
    """(d_l / mu) [L(l + mu e) - L(l)] e for the unit vector e, where our radius is mu / sqrt(d_l)."""
    task = mlp()
    surrogate, gradient = surrogate_of(task, 2)
    d, mu = len(gradient), 0.05
    directions = Directions(Key.of(2, "directions"), "sphere", 1, d)
    loss, probe = ESTIMATORS["forward"](surrogate, directions, mu / math.sqrt(d), False)
    ours = probe(torch.ones_like(loss)).values[0] * directions.block(0, 0, d)
    unit = directions.block(0, 0, d).astype(np.float64) / math.sqrt(d)
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    surrogate.write((surrogate.anchor + mu * unit).astype(np.float32), 0)
    papers = d / mu * (float(surrogate.outputs()) - float(loss)) * unit
    np.testing.assert_allclose(ours, papers, rtol=1e-3)


def test_what_a_head_sees() -> None:
    """Vectors as they are, images by their mean, a text by its last token whichever side the pads are."""
    z = torch.arange(24.0).reshape(2, 4, 3)
    assert torch.equal(features(z[:, 0], {}), z[:, 0])
    assert features(z.reshape(2, 3, 2, 2), {}).tolist() == z.reshape(2, 3, 4).mean(2).tolist()
    left = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(features(z, {"attention_mask": left}), z[:, 3])
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(features(z, {"attention_mask": right}), torch.stack([z[0, 1], z[1, 3]]))
    with pytest.raises(ModelError, match="no auxiliary head"):
        features(z, {})
    surrogate, _ = surrogate_of(mlp(), 2)
    for refused in (lambda: surrogate.tangents(torch.zeros(1, 1)), surrogate.recorded):
        with pytest.raises(ModelError, match='use "forward" or "central"'):
            refused()


def test_a_surrogate_is_written_in_any_slices() -> None:
    surrogate, gradient = surrogate_of(mlp(), 2)
    n = len(gradient)
    values = np.linspace(-1, 1, n, dtype=np.float32)
    surrogate.write(values, 0)
    whole = float(surrogate.outputs())
    for size in (1, 7, n - 1):
        surrogate.write(surrogate.anchor, 0)
        for start in range(0, n, size):
            surrogate.write(values[start : start + size], start)
        assert float(surrogate.outputs()) == whole
    with pytest.raises(ModelError, match="beyond"):
        surrogate.write(values, 1)


def test_the_head_is_the_same_for_the_same_seed_and_no_part_of_the_vector() -> None:
    task = mlp()
    one, same = (build(task).init(task.model.read()) for _ in range(2))
    assert np.array_equal(one.arrays["weights/auxiliary"], same.arrays["weights/auxiliary"])
    assert one.arrays["weights/auxiliary"].shape == ((6 + 1) * 4,)
    assert len(one.arrays["weights/vector"]) == task.model.layout.size
    weight = start_head(Key.of(1, "init"), 400, 100)[:40_000]
    assert weight.std() * 20 == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(("every", "uploads"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_uploads_are_ceil_of_steps_over_every_and_nothing_comes_back(every: int, uploads: int) -> None:
    """k above h: the upload of step 0 is the round's one."""
    task, meter = mlp(), Meter()
    algorithm = build(task, steps=5, every=every)
    asked: list[tuple[str, int]] = []
    whole = local_call(task, algorithm.actions, meter)

    def spying(action, requests, deadline):
        asked.append((action, requests[0].values["step"]))
        return whole(action, requests, deadline)

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], spying)
    assert asked == [*(("local_steps", e) for e in range(0, 5, every)), ("finish", 5)]
    assert outcome.state.values["top_steps"] == 3 * uploads and outcome.row["examples"] == 60
    assert meter.up["activations"] == 3 * uploads * 4 * 4 * 6 and "feedback" not in meter.down


def test_how_often_is_uploaded_does_not_change_the_clients() -> None:
    """Nothing comes back, so theta_l cannot depend on k."""
    task = mlp()
    start, ends = task.model.read(), []
    for every in (1, 2, 7):
        algorithm = build(task, steps=5, every=every, optimizer=Optimizer("adamw", 1e-2))
        outcome = algorithm.round(algorithm.init(start), [0, 1, 2], local_call(task, algorithm.actions))
        task.model.write(start)
        d_c = task.model.layout.bottom_size(1)
        arrays = outcome.state.arrays
        ends.append(np.concatenate([arrays["weights/vector"][:d_c], arrays["weights/auxiliary"]]))
    assert np.array_equal(ends[0], ends[1]) and np.array_equal(ends[0], ends[2])
    assert not np.array_equal(ends[0][:d_c], start[:d_c])


def test_without_probes_bottom_and_head_are_frozen_and_the_top_learns() -> None:
    task = mlp()
    algorithm = build(task, estimator="none")
    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, [0, 1, 2], local_call(task, algorithm.actions))
    d_c = task.model.layout.bottom_size(1)
    before, after = (s.arrays["weights/vector"] for s in (state, outcome.state))
    assert np.array_equal(before[:d_c], after[:d_c]) and not np.array_equal(before[d_c:], after[d_c:])
    assert np.array_equal(state.arrays["weights/auxiliary"], outcome.state.arrays["weights/auxiliary"])
    assert outcome.row["zo_signal"] is None
    assert all("seeds/root" not in e.plan.arrays for e in outcome.entries)


@pytest.mark.parametrize("family", ["opt", "bert"])
def test_texts_of_unequal_lengths_train_on_either_side_of_the_pads(family: str) -> None:
    """Activations of one client's uploads have different shapes; the server learns, and so do the clients."""
    task = text_of(family)
    adam = Optimizer("adamw", 2e-2)
    algorithm = build(
        task, steps=4, every=2, boundary=2, estimator="central", probes=4, server=adam, optimizer=adam
    )
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    losses = []
    for _ in range(5):
        outcome = algorithm.round(state, [0, 1, 2], call)
        assert not outcome.failures
        state = outcome.state
        losses.append(outcome.row["loss"])
    assert losses[-1] < 0.8 * losses[0]
    assert outcome.row["zo_signal"] > 0.9


def test_a_client_lost_later_leaves_what_its_uploads_taught() -> None:
    task = mlp()
    algorithm = build(task, steps=3)
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    outcome = algorithm.round(state, [0, 1, 2], losing(call, 1, "local_steps", 2))
    assert outcome.failures == {1: "gone"} and [e.client for e in outcome.entries] == [SERVER, 0, 2]
    assert outcome.state.values["top_steps"] == 8 and outcome.row["examples"] == 24
    assert outcome.state.arrays["cursors/next"].tolist() == [3, 0, 3]
    d_c = task.model.layout.bottom_size(1)
    deltas = [e.reply.arrays["weights/delta"].astype(np.float64) for e in outcome.entries[1:]]
    expected = (state.arrays["weights/auxiliary"] + sum(deltas)[d_c:] / 2).astype(np.float32)
    assert np.array_equal(outcome.state.arrays["weights/auxiliary"], expected)
    before = {name: array.copy() for name, array in state.arrays.items()}
    with pytest.raises(RoundVoid):
        build(task, steps=3, quorum=3).round(state, [0, 1, 2], losing(call, 1, "finish", 0))
    assert all(np.array_equal(before[name], array) for name, array in state.arrays.items())


@pytest.mark.parametrize(
    ("action", "array", "change", "word"),
    [
        ("finish", "weights/delta", lambda a: a[1:], "expected float32"),
        ("finish", "weights/delta", lambda a: a * np.float32("inf"), "non-finite"),
        ("finish", "metrics/agreement", lambda a: a - 1e9, "negative"),
        ("finish", "metrics/agreement", lambda a: a[:2], "expected float64"),
        ("local_steps", "activations/z", lambda a: a * np.float32("nan"), "non-finite"),
        ("local_steps", "activations/z", lambda a: a[:, 1:], "do not fit the top"),
        ("local_steps", "labels/targets", lambda a: a + 9, "labels outside"),
        ("local_steps", "labels/targets", lambda a: np.tile(a, 3), "not of one batch"),
    ],
)
def test_what_a_client_sends_is_checked_and_it_alone_is_refused(
    action: str, array: str, change: Callable, word: str
) -> None:
    task = mlp()
    algorithm = build(task)
    whole = local_call(task, algorithm.actions)

    def hostile(asked, requests, deadline):
        replies = whole(asked, requests, deadline)
        if asked == action and 1 in replies.records:
            good = replies.records[1]
            replies.records[1] = Record({**good.arrays, array: change(good.arrays[array])}, good.values)
        return replies

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], hostile)
    assert set(outcome.failures) == {1} and [e.client for e in outcome.entries] == [SERVER, 0, 2]
    assert outcome.failures[1].startswith("refused: ") and word in outcome.failures[1]
    assert all(np.isfinite(a).all() for a in outcome.state.arrays.values())


def test_a_message_that_comes_twice_or_late_is_refused() -> None:
    task = mlp()
    algorithm = build(task, steps=5, every=2)
    log: list[tuple[str, Record]] = []
    whole = local_call(task, algorithm.actions)

    def spying(asked, requests, deadline):
        log.append((asked, requests[0]))
        return whole(asked, requests, deadline)

    algorithm.round(algorithm.init(task.model.read()), [0], spying)
    memory = Memory()
    for place, (asked, request) in enumerate(log):
        algorithm.actions[asked](task, request, memory)
        for other, (again, message) in enumerate(log):
            if other not in (0, place + 1):  # a new round's first request always begins; the next is due
                with pytest.raises(ClientError, match="not in the step"):
                    algorithm.actions[again](task, message, memory)
    first = log[0][1]
    with pytest.raises(ClientError, match="another layout"):
        algorithm.actions["local_steps"](
            task, Record(first.arrays, {**first.values, "layout": "x"}), Memory()
        )
    for name in ("weights/bottom", "weights/auxiliary"):
        with pytest.raises(RecordError, match="non-finite"):
            spoilt = {**first.arrays, name: first.arrays[name] * np.float32("nan")}
            algorithm.actions["local_steps"](task, Record(spoilt, first.values), Memory())

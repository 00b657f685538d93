# SPDX-License-Identifier: Apache-2.0
"""SplitFed on paper, beside FedAvg, and where something is lost or wrong."""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from families import perceptron
from hofl.algorithms import splitfed
from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.splitfed import splitfed_v1, splitfed_v2
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.models.boundary import CutModel, cut
from hofl.models.tiny import tiny
from hofl.protocol import learner
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Memory, Outcome, Replies, RoundVoid
from hofl.protocol.split import Split
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from split_tasks import chain_task, losing, text_of

SGD = Optimizer("sgd", 0.125)
ADAMW = Optimizer("adamw", 0.2)
EXAMPLES = ((1.0, 1), (2.0, 0), (0.5, 3))
V, W = 0.5, 0.25


def build(
    method: Callable[..., Algorithm], task: Task, optimizer: Optimizer = SGD, steps: int = 2, **more: int
) -> Algorithm:
    """The method at boundary 1, batches of four."""
    training = Training(more.pop("seed", 3), steps, 4, optimizer, (1,) * len(task.clients), run="t", **more)
    return method(task.model.layout, (1,) * len(task.clients), training, Split(task))


def rounds(algorithm: Algorithm, task: Task, number: int = 1) -> Outcome:
    """All clients, in process, from the task's start, which is put back."""
    start = task.model.read()
    state, call = algorithm.init(start), local_call(task, algorithm.actions)
    for _ in range(number):
        outcome = algorithm.round(state, range(len(task.clients)), call)
        assert not outcome.failures
        state = outcome.state
    task.model.write(start)
    return outcome


def step(x: float, y: int, v: float, w: float, lr: float = 0.125) -> tuple[float, float, float]:
    """On paper: o = w v x, loss (o - y)^2 / 2 -> the next v and w, from gradients at (v, w), the loss."""
    z = v * x
    o = w * z
    feedback = (o - y) * w  # dloss/dz, before the server's step
    return v - lr * feedback * x, w - lr * (o - y) * z, (o - y) ** 2 / 2


def test_a_round_of_v1_is_the_one_on_paper() -> None:
    """v, w = 0.5, 0.25; clients (1, 1) and (2, 0); 2 steps at 0.125; then both halves are averaged."""
    task = chain_task(EXAMPLES[:2], [[V]], [[W]])
    ends, losses = [], []
    for x, y in EXAMPLES[:2]:
        v, w = V, W
        for _ in range(2):
            v, w, loss = step(x, y, v, w)
            losses.append(loss)
        ends.append((v, w))
    outcome = rounds(build(splitfed_v1, task), task)
    np.testing.assert_allclose(outcome.state.arrays["weights/vector"], np.mean(ends, 0), rtol=1e-6)
    assert outcome.row["loss"] == pytest.approx(np.mean(losses), rel=1e-6) and outcome.row["examples"] == 4
    assert outcome.state.arrays["cursors/next"].tolist() == [2, 2]


def test_the_first_step_of_v1_in_numbers() -> None:
    """Client (1, 1): o - y = 0.125 - 1; v' = 0.5 + 0.125 0.875 0.25 and w' = 0.25 + 0.125 0.875 0.5."""
    task = chain_task(EXAMPLES[:1], [[V]], [[W]])
    outcome = rounds(build(splitfed_v1, task, steps=1), task)
    assert outcome.state.arrays["weights/vector"].tolist() == [0.52734375, 0.3046875]
    assert outcome.row["loss"] == 0.3828125


def v2_on_paper(orders: tuple[tuple[int, ...], ...], momentum: float, steps: int = 2) -> list[float]:
    """Two rounds of two steps on (1, 1) and (2, 0): one w and its momentum m for all; v_i have their own."""
    v, w, m = V, W, 0.0
    for start in range(0, len(orders), steps):
        bottoms, own = [v, v], [0.0, 0.0]
        for order in orders[start : start + steps]:
            for i in order:
                x, y = EXAMPLES[i]
                vi = bottoms[i]
                error = w * vi * x - y
                own[i] = momentum * own[i] + error * w * x
                m = momentum * m + error * vi * x
                bottoms[i], w = vi - 0.125 * own[i], w - 0.125 * m
        v = sum(bottoms) / 2
    return [v, w, m]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_two_rounds_of_v2_are_those_on_paper(momentum: float) -> None:
    """One top, steps interleaved, seeded orders: the end is that of one sequence of orders and no other."""
    task, found = chain_task(EXAMPLES[:2], [[V]], [[W]]), set()
    possible = {orders: v2_on_paper(orders, momentum) for orders in product([(0, 1), (1, 0)], repeat=4)}
    for seed in range(6):
        optimizer = Optimizer("sgd", 0.125, momentum=momentum)
        outcome = rounds(build(splitfed_v2, task, optimizer, seed=seed), task, 2)
        v, w = outcome.state.arrays["weights/vector"]
        near = [o for o, end in possible.items() if np.allclose([v, w], end[:2], rtol=3e-6)]
        expected = tuple(tuple(learner.seeded_order(seed, t, e, [0, 1])) for t in range(2) for e in range(2))
        assert near == [expected]
        assert outcome.state.values["top_steps"] == 8
        if momentum:
            moments = outcome.state.arrays["weights/top_moments"]
            np.testing.assert_allclose(moments, [[possible[expected][2]]], rtol=1e-4)
        found |= set(expected)
    assert found == {(0, 1), (1, 0)}


def test_orders_are_fair_new_in_each_step_and_do_not_depend_on_who_else_is_there() -> None:
    orders = [learner.seeded_order(1, t, e, range(5)) for t in range(40) for e in range(5)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    places = np.mean([[order.index(i) for i in range(5)] for order in orders], 0)
    assert np.abs(places - 2).max() < 0.4  # 4.0 standard errors of a mean of 200
    assert len({tuple(order) for order in orders}) > 80
    without = [[i for i in order if i != 3] for order in orders]
    again = [learner.seeded_order(1, t, e, [0, 1, 2, 4]) for t in range(40) for e in range(5)]
    assert again == without
    draw = Key.of(1, "cohort_order", 0, 0)  # what the cohort of round 0 is drawn with
    assert all(Key.of(1, "cohort_order", 0, 0, i) != draw for i in range(-1, 5))


def adam(g: float, m: float, s: float, number: int) -> tuple[float, float, float]:
    """On paper: the step at rate 0.2, and the moments after it."""
    m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
    return 0.2 * (m / (1 - 0.9**number)) / (math.sqrt(s / (1 - 0.999**number)) + 1e-8), m, s


def adam_on_paper(rounds: int, steps: int, server: str) -> tuple[float, float, float, float]:
    """Client (1, 0): v's Adam is new in each round, w's in each ``server``: run, round or batch."""
    v, w, m, s, number = V, W, 0.0, 0.0, 0
    for _ in range(rounds):
        own = (0.0, 0.0)
        if server == "round":
            m, s, number = 0.0, 0.0, 0
        for e in range(steps):
            if server == "batch":
                m, s, number = 0.0, 0.0, 0
            number += 1
            error = w * v
            change_v, *own = adam(error * w, *own, e + 1)
            change_w, m, s = adam(error * v, m, s, number)
            v, w = v - change_v, w - change_w
    return v, w, m, s


@pytest.mark.parametrize(("method", "life"), [(splitfed_v2, "run"), (splitfed_v1, "round")])
def test_adam_of_a_top_lives_as_long_as_the_top(method: Callable[..., Algorithm], life: str) -> None:
    """2 rounds of 2 steps; an Adam made anew for each batch is a known defect of the public code."""
    task = chain_task([(1.0, 0)], [[V]], [[W]])
    outcome = rounds(build(method, task, ADAMW), task, 2)
    ends = {server: adam_on_paper(2, 2, server) for server in ("run", "round", "batch")}
    vector = outcome.state.arrays["weights/vector"]
    near = [server for server, end in ends.items() if np.allclose(vector, end[:2], rtol=1e-4)]
    assert near == [life]
    if life == "run":
        moments = outcome.state.arrays["weights/top_moments"][:, 0]
        np.testing.assert_allclose(moments, ends["run"][2:], rtol=1e-4)
        assert outcome.state.values["top_steps"] == 4


def mlp() -> Task:
    return synthetic_task(Partition(clients=3), seed=5, rows=60, width=6)


TASKS = {"mlp": mlp, "opt": lambda: text_of("opt"), "bert": lambda: text_of("bert")}


@pytest.mark.parametrize("optimizer", [SGD, Optimizer("adamw", 1e-3)], ids=lambda o: o.name)
@pytest.mark.parametrize("name", TASKS)
def test_v1_is_fedavg_of_the_whole_network_bit_for_bit(name: str, optimizer: Optimizer) -> None:
    """3 clients, 2 steps, 2 rounds: the same products and sums in the same order, so the same float32 bits.

    Adam too: both methods begin its state anew in each participation.
    """
    task = TASKS[name]()
    whole = Training(3, 2, 4, optimizer, (1,) * 3, run="t")
    cuts = range(1, task.model.blocks)
    expected = rounds(fedavg(task.model.layout, whole), task, 2)
    for boundary in cuts:
        split = splitfed_v1(task.model.layout, (boundary,) * 3, whole, Split(task))
        found = rounds(split, task, 2)
        assert np.array_equal(found.state.arrays["weights/vector"], expected.state.arrays["weights/vector"])
        assert found.row["loss"] == expected.row["loss"]
    assert not np.array_equal(expected.state.arrays["weights/vector"], task.model.read())


def doubled(name: str) -> tuple[CutModel, list[list[dict[str, Tensor]]], Callable[[Tensor], Tensor]]:
    """A network in float64, batches by client and step, and a loss of the output."""
    if name == "mlp":
        model = cut(perceptron())
        drawn = torch.from_numpy(Key.of(2, "init").generator().standard_normal((3, 2, 4, 12)))
        batches = [[{"input": drawn[i, e]} for e in range(2)] for i in range(3)]
    else:
        model = cut(tiny("opt", layers=3), trainable=lambda n: ".weight" in n and ("fc" in n or "_proj" in n))
        tokens = torch.from_numpy(Key.of(2, "init").generator().integers(3, 500, (3, 2, 4, 7)))
        mask = torch.ones(4, 7, dtype=torch.int64)
        batches = [[{"input_ids": tokens[i, e], "attention_mask": mask} for e in range(2)] for i in range(3)]
    model.module.double()  # parameters of their own from here on: only the cut of the forward pass is used
    return model, batches, lambda output: output.logsumexp(-1).square().mean()


@pytest.mark.parametrize("name", ["mlp", "opt"])
def test_v1_is_fedavg_in_float64(name: str) -> None:
    """The messages of V1, by this library's cut, against backpropagation through the module as it is.

    3 clients, 2 steps, 2 rounds of SGD. The algorithms' own code is float32 and equal to the bit, above; here
    the definitions are: z and dloss/dz cross as detached arrays, and each half knows only its own.
    """
    model, batches, loss_of = doubled(name)
    boundary, module = 2, model.module
    parameters = [p for _, p in model.trainables()]
    count = len(model.bottom_parameters(boundary))
    start = [p.detach().clone() for p in parameters]

    def write(values: list[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)

    def mean(ends: list[list[Tensor]]) -> list[Tensor]:
        return [torch.stack(same).mean(0) for same in zip(*ends, strict=True)]

    def whole(values: list[Tensor], inputs: dict[str, Tensor]) -> list[Tensor]:
        write(values)
        output = module(inputs["input"]) if name == "mlp" else module(**inputs, use_cache=False).logits
        gradient = torch.autograd.grad(loss_of(output), parameters)
        return [p - 0.1 * g for p, g in zip(values, gradient, strict=True)]

    def halves(values: list[Tensor], inputs: dict[str, Tensor]) -> list[Tensor]:
        write(values)
        with torch.no_grad():
            z = model.stop(inputs, boundary).numpy().copy()  # the client's upload
        received = torch.from_numpy(z).requires_grad_()
        loss = loss_of(model.top(inputs, boundary, received))
        *above, feedback = torch.autograd.grad(loss, [*parameters[count:], received])
        returned = torch.from_numpy(feedback.numpy().copy())
        below = torch.autograd.grad(model.stop(inputs, boundary), parameters[:count], returned)
        return [p - 0.1 * g for p, g in zip(values, [*below, *above], strict=True)]

    def trained(one_step: Callable[[list[Tensor], dict[str, Tensor]], list[Tensor]]) -> list[Tensor]:
        values = start
        for _ in range(2):
            ends = []
            for client in range(3):
                own = values
                for e in range(2):
                    own = one_step(own, batches[client][e])
                ends.append(own)
            values = mean(ends)
        return values

    fedavg_end, split_end = trained(whole), trained(halves)
    for a, b, first in zip(fedavg_end, split_end, start, strict=True):
        assert a.dtype == torch.float64 and not torch.equal(a, first)
        assert float((a - b).abs().max()) <= 1e-12 * float(a.abs().max())


def test_v1_loses_a_client_with_its_replica() -> None:
    """Gone at its second step: the round is that of the others, bit for bit."""
    task = mlp()
    algorithm = build(splitfed_v1, task)
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    for action in ("forward", "backward", "finish"):
        outcome = algorithm.round(state, [0, 1, 2], losing(call, 1, action, int(action != "finish")))
        rest = algorithm.round(state, [0, 2], call)
        assert outcome.failures == {1: "gone"}
        assert np.array_equal(outcome.state.arrays["weights/vector"], rest.state.arrays["weights/vector"])
        assert outcome.state.arrays["cursors/next"].tolist() == [2, 0, 2]


def test_v2_keeps_the_steps_of_a_client_that_is_lost_later() -> None:
    """Its bottom is left out and its cursor stays; the top has learnt from its first batch."""
    task = mlp()
    algorithm = build(splitfed_v2, task)
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    outcome = algorithm.round(state, [0, 1, 2], losing(call, 1, "forward", 1))
    rest = algorithm.round(state, [0, 2], call)
    assert outcome.failures == {1: "gone"} and [e.client for e in outcome.entries] == [SERVER, 0, 2]
    assert (outcome.state.values["top_steps"], rest.state.values["top_steps"]) == (5, 4)
    assert outcome.state.arrays["cursors/next"].tolist() == [2, 0, 2]
    d_c = task.model.layout.bottom_size(1)
    assert not np.array_equal(
        outcome.state.arrays["weights/vector"][d_c:], rest.state.arrays["weights/vector"][d_c:]
    )
    deltas = [e.reply.arrays["weights/delta"].astype(np.float64) for e in outcome.entries[1:]]
    expected = (state.arrays["weights/vector"][:d_c] + sum(deltas) / 2).astype(np.float32)
    assert np.array_equal(outcome.state.arrays["weights/vector"][:d_c], expected)


def test_a_void_round_of_v2_moves_nothing() -> None:
    """Below the quorum the state is that before the round, server steps and all."""
    task = mlp()
    algorithm = build(splitfed_v2, task, quorum=3)
    state, call = algorithm.init(task.model.read()), local_call(task, algorithm.actions)
    before = {name: array.copy() for name, array in state.arrays.items()}
    with pytest.raises(RoundVoid):
        algorithm.round(state, [0, 1, 2], losing(call, 1, "finish", 0))
    assert all(np.array_equal(before[name], array) for name, array in state.arrays.items())


@pytest.mark.parametrize("method", [splitfed_v1, splitfed_v2])
@pytest.mark.parametrize(
    ("action", "array", "change", "word"),
    [
        ("finish", "weights/delta", lambda a: a[1:], "expected float32"),
        ("finish", "weights/delta", lambda a: a * np.float32("nan"), "non-finite"),
        ("forward", "activations/z", lambda a: a * np.float32("inf"), "non-finite"),
        ("forward", "activations/z", lambda a: a[:, 1:], "do not fit the top"),
        ("forward", "labels/targets", lambda a: a - 9, "labels outside"),
        ("forward", "labels/targets", lambda a: np.tile(a, 2), "not of one batch"),
    ],
)
def test_what_a_client_sends_is_checked_and_it_alone_is_refused(
    method: Callable[..., Algorithm], action: str, array: str, change: Callable, word: str
) -> None:
    task = mlp()
    algorithm = build(method, task, Optimizer("adamw", 1e-3))
    whole = local_call(task, algorithm.actions)

    def hostile(asked, requests, deadline):
        replies = whole(asked, requests, deadline)
        if asked == action and 1 in replies.records:
            good = replies.records[1]
            arrays = {**good.arrays, array: change(good.arrays[array])}
            replies.records[1] = Record(arrays, good.values)
        return replies

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], hostile)
    assert set(outcome.failures) == {1}
    assert outcome.failures[1].startswith("refused: ") and word in outcome.failures[1]
    assert all(np.isfinite(a).all() for a in outcome.state.arrays.values())


@pytest.mark.parametrize("method", [splitfed_v1, splitfed_v2])
@pytest.mark.parametrize(
    ("z", "optimizer", "why"),
    [
        (1e15, ADAMW, "non-finite loss or gradient of the top, or one beyond 1e+12"),
        (1e5, Optimizer("sgd", 1e4), "the server's step on it is not finite, or beyond 1e+12"),
    ],
)
def test_a_step_that_would_spoil_the_top_is_refused(
    method: Callable[..., Algorithm], z: float, optimizer: Optimizer, why: str
) -> None:
    """Loss and gradient are finite; the gradient's square, or the step, would leave the range of use."""
    task = chain_task([(1 / W, 1), (z, 1)], [[1.0]], [[W]])  # the first is at its minimum
    algorithm = build(method, task, optimizer)
    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, [0, 1], local_call(task, algorithm.actions))
    assert outcome.failures == {1: f"refused: {why}"}
    assert all(np.isfinite(a).all() for a in outcome.state.arrays.values())


@pytest.mark.parametrize("change", ["nan", "shape", "missing", "batch", "step", "round"])
def test_a_client_refuses_feedback_that_is_not_its_own(change: str) -> None:
    """It is explained as lost, and its bottom has not moved."""
    task = mlp()
    algorithm = build(splitfed_v1, task)
    whole = local_call(task, algorithm.actions)

    def hostile(asked, requests, deadline):
        if asked == "backward" and 1 in requests:
            good = requests[1]
            arrays, values = dict(good.arrays), dict(good.values)
            if change == "nan":
                arrays["feedback/delta"] = arrays["feedback/delta"] * np.float32("nan")
            elif change == "shape":
                arrays["feedback/delta"] = arrays["feedback/delta"][:, 1:]
            elif change == "missing":
                arrays = {}
            else:
                values |= {"batch": {"batch_id": "0"}, "step": {"step": 7}, "round": {"round": 4}}[change]
            requests = {**requests, 1: Record(arrays, values)}
        return whole(asked, requests, deadline)

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], hostile)
    assert set(outcome.failures) == {1} and [e.client for e in outcome.entries] == [0, 2]
    words = {"nan": "non-finite", "shape": "shape", "missing": "shape"}
    assert words.get(change, "not in the step") in outcome.failures[1]


def test_a_message_that_comes_twice_or_late_is_refused() -> None:
    """Each request is good once: a step cannot be repeated, skipped, or gone on with after a restart."""
    task = mlp()
    algorithm = build(splitfed_v1, task)
    log: list[tuple[str, Record]] = []
    whole = local_call(task, algorithm.actions)

    def spying(asked, requests, deadline):
        log.append((asked, requests[0]))
        return whole(asked, requests, deadline)

    algorithm.round(algorithm.init(task.model.read()), [0], spying)
    assert [asked for asked, _ in log] == ["forward", "backward"] * 2 + ["finish"]
    memory = Memory()
    for place, (asked, request) in enumerate(log):
        algorithm.actions[asked](task, request, memory)
        for other, (again, message) in enumerate(log):
            if other in (0, place + 1):  # a new round's first request always begins; the next is due
                continue
            with pytest.raises(ClientError, match="not in the step"):
                algorithm.actions[again](task, message, memory)
    with pytest.raises(ClientError, match="another layout"):
        splitfed.forward(task, Record(log[0][1].arrays, {**log[0][1].values, "layout": "other"}), Memory())
    with pytest.raises(RecordError, match="expected float32"):
        short = {"weights/bottom": log[0][1].arrays["weights/bottom"][1:]}
        splitfed.forward(task, Record(short, log[0][1].values), Memory())


def test_a_reply_to_another_step_is_refused() -> None:
    task = mlp()
    algorithm = build(splitfed_v2, task)
    whole = local_call(task, algorithm.actions)
    first: dict[int, Record] = {}

    def stale(asked, requests, deadline):
        replies = whole(asked, requests, deadline)
        if asked == "forward" and 1 in replies.records:
            first.setdefault(1, replies.records[1])
            return Replies({**replies.records, 1: first[1]}, replies.failures)
        return replies

    outcome = algorithm.round(algorithm.init(task.model.read()), [0, 1, 2], stale)
    assert outcome.failures == {1: "refused: reply is for step 0, not 1"}

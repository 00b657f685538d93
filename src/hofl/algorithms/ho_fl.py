# SPDX-License-Identifier: Apache-2.0
"""HO-FL: hybrid-order federated learning, an order boundary for each client.

Chen, Wu, Ma, Chen, arXiv 2609.39074, Algorithms 1, 3, 4 and Appendix B.3. Client i trains the blocks
below its boundary b_i by q zeroth-order probes of ``<delta, f_bottom(x; v)>`` and those above by
backpropagation. It returns E q scalars and the top's delta; the server replays the bottom.

Symbols: N clients, K cohort, T rounds, E ``steps``, q ``probes``, mu ``radius``, delta ``feedback``
(dloss/dz at the boundary), s ``scalars``, u ``directions``, w the vector, d_zo(b_i) the boundary's offset.

Deviations: one root key in place of E q seeds; scalars are rounded to float32 before they are used; a
digest of the bottom, so a replay that differs is refused; clients that fail are left out of the mean;
the estimator is a choice (``forward`` is the paper's); a round can be measured for a preference that moves.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS, Scalars, agreement
from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, digest, replay_
from hofl.errors import ClientError, RecordError
from hofl.protocol import aggregate, measuring
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector
from hofl.protocol.probing import Probing, agreement_of, checks, root_key, step_directions, zo_signal
from hofl.tasks.base import Batch, Task

Boundaries = Sequence[int] | Callable[[int, int], int]
"""b_i of each client i; or ``(t, i) -> b_i`` where it follows a budget, round t counted from 0."""


def ho_fl(
    layout: Layout,
    boundaries: Boundaries,
    training: aggregate.Training,
    probing: Probing,
    preferred: measuring.Preferred | None = None,
) -> Algorithm:
    """HO-FL over ``layout``; a client's boundary stays as it is while it takes part in a round.

    With ``preferred`` the state measures what a schedule of the preference follows; without it, nothing.
    """
    boundary_of = boundaries if callable(boundaries) else lambda _, client: boundaries[client]

    def plan(state: Record, client: int) -> Record:
        """Say what a client is asked: everything but the weights."""
        values = aggregate.plan_values(state, client, training)
        boundary = boundary_of(values["round"], client)
        # A full first-order client, or a frozen bottom, has no directions and gets no key.
        values |= {"boundary": boundary, "layout": layout.fingerprint, **probing.to_values()}
        values["probes"] *= int(layout.bottom_size(boundary) > 0)
        values |= {"preferred": preferred(values["round"], client)} if preferred else {}
        root = root_key(training.seed, client, values["round"]).array()
        return Record({"seeds/root": root} if values["probes"] else {}, values)

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        # Alg. 1: send (w_t, root key, E, q, mu, optimizers), wait for (scalars, top delta)
        plans = {i: plan(state, i) for i in cohort}
        requests = {i: aggregate.request(state, p) for i, p in plans.items()}
        replies = call("local_steps", requests, None)
        # Alg. 4: each client's full delta, its bottom replayed and compared by digest; then the mean
        entries: list[Entry] = []
        failures = dict(replies.failures)
        delta = partial(reconstruct, layout, state.arrays["weights/vector"])
        parts = aggregate.verified(plans, replies, delta, entries, failures)
        moved = measuring.advance(layout, state, parts)
        if len(entries) < training.quorum:
            raise RoundVoid(failures)
        row = {"boundaries": [plans[i].values["boundary"] for i in cohort], **aggregate.loss_row(entries)}
        row["replay_ok"] = not any(aggregate.MISMATCH in why for why in failures.values())
        sums = (agreement_of(e.reply) for e in entries if e.plan.values["probes"])
        row["zo_signal"] = zo_signal(sums, probing.estimator)
        return Outcome(moved, tuple(entries), row, failures)

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        parts = ((e, reconstruct(layout, state.arrays["weights/vector"], e)) for e in entries)
        return measuring.advance(layout, state, parts)

    init = partial(measuring.initial_state, training, preferred is not None)
    return Algorithm(init, play, rebuild, {"local_steps": local_steps})


def hybrid_step(
    task: Task, batch: Batch, plan: dict[str, Any], directions: Directions, check: bool
) -> tuple[float, Vector, Scalars]:
    """Alg. 3, items 1-3, at the live parameters -> loss, top gradient [d_fo], scalars [q]."""
    model, boundary = task.model, plan["boundary"]
    # 1. z = f_bottom(x; v) without a graph (b = 0 has no bottom)
    z, probe = None, None
    if boundary:
        estimator = ESTIMATORS[plan["estimator"] if directions.count else "none"]
        z, probe = estimator(model.surrogate(batch.inputs, boundary), directions, plan["radius"], check)
    # 2. loss, gradient of the top, and feedback = dloss/dz, by backpropagation through the top alone
    loss, gradient, feedback = model.first_order(batch.inputs, boundary, z, task.loss_on(batch))
    # 3. s_j = <feedback, f_bottom(x; v + mu u_j) - z> / mu
    learnt = Scalars(np.empty(0)) if probe is None or feedback is None else probe(feedback)
    return loss, gradient, learnt


def local_steps(task: Task, request: Record, memory: Memory) -> Record:
    """Alg. 3, the client's half: E hybrid steps from w_t -> scalars float32 [E, q], top delta [d_fo]."""
    plan, layout = request.values, task.model.layout
    aggregate.check_layout(task, request)
    d_zo, q = layout.bottom_size(plan["boundary"]), plan["probes"]
    vector = request.array("weights/vector", "float32", (layout.size,)).copy()
    bottom, top, start = vector[:d_zo], vector[d_zo:], vector[d_zo:].copy()
    below, above = (Optimizer.from_values(plan[name]) for name in ("bottom_optimizer", "optimizer"))
    below_state, above_state = below.init(d_zo), above.init(len(top))
    root = Key.from_array(request.array("seeds/root", "uint64", (2,))) if q else Key(0, 0)
    scalars = np.zeros((plan["steps"], q), dtype=np.float32)
    loss_sum, examples, agreed = 0.0, 0, np.zeros(3)
    for e in range(plan["steps"]):
        batch = task.batch(plan["client"], plan["position"] + e, plan["batch"])
        task.model.write(vector)
        directions = step_directions(plan, root, e, d_zo)
        loss, gradient, learnt = hybrid_step(task, batch, plan, directions, checks(plan, e))
        with np.errstate(over="ignore"):
            scalars[e] = learnt.values  # rounded to the wire's float32, then used
        if not (np.isfinite(loss) and np.isfinite(gradient).all() and np.isfinite(scalars[e]).all()):
            raise ClientError(f"non-finite loss, gradient or scalar in local step {e + 1}")
        # 4.-5. both parts move from one anchor: the bottom by replay, the top by its gradient
        if q:
            replay_(bottom, [Step(directions, scalars[e])], below, below_state, first=e + 1)
        above.update_(top, gradient, above_state, e + 1)
        agreed += agreement(learnt)
        loss_sum += loss * len(batch.targets)
        examples += len(batch.targets)
    proof: dict[str, NDArray[Any]] = (
        {"digests/bottom": digest(bottom), "metrics/agreement": agreed, "scalars/s": scalars} if q else {}
    )
    counts = {"loss_sum": loss_sum, "examples": examples}
    identity = {name: plan[name] for name in ("run", "round", "client")}
    return Record({**proof, "weights/delta": top - start}, {**identity, **counts})


def reconstruct(layout: Layout, vector: Vector, entry: Entry) -> Vector:
    """Alg. 4 and App. B.3, the server's half: a client's delta float32 [d], its digest checked."""
    plan, q = entry.plan.values, entry.plan.values["probes"]
    d_zo = layout.bottom_size(plan["boundary"])
    delta = np.zeros(layout.size, dtype=np.float32)
    delta[d_zo:] = entry.reply.array("weights/delta", "float32", (layout.size - d_zo,))
    if q:
        scalars = entry.reply.array("scalars/s", "float32", (plan["steps"], q))
        root = Key.from_array(entry.plan.array("seeds/root", "uint64", (2,)))
        steps = [Step(step_directions(plan, root, e, d_zo), s) for e, s in enumerate(scalars)]
        bottom = vector[:d_zo].copy()
        with np.errstate(all="ignore"):
            replay_(bottom, steps, Optimizer.from_values(plan["bottom_optimizer"]))
        agreement_of(entry.reply)
        if not np.array_equal(digest(bottom), entry.reply.array("digests/bottom", "uint8", (32,))):
            raise RecordError(aggregate.MISMATCH)
        delta[:d_zo] = bottom - vector[:d_zo]
    if not np.isfinite(delta).all():
        raise RecordError("its bottom is not finite")
    return delta

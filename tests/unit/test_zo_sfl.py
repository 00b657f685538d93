# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import numpy as np
import pytest

from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.models.boundary import CutModel
from hofl.protocol.base import SERVER, Replies
from hofl.runtime.local import local_call
from two_numbers import built, played, two_numbers


def loss(w0: float, w1: float, x: float = 2.0, y: float = 1.0) -> float:
    return 0.5 * (w1 * w0 * x - y) ** 2


def test_a_step_worked_out_by_hand() -> None:
    """Both weights are displaced together: s is 14.875 where their signs agree and 9.375 where not."""
    task, seen = two_numbers(), set()
    for seed in range(8):
        task.model.write(np.array([0.5, 3.0], dtype=np.float32))
        algorithm = built("zo_sfl", task, seed=seed)
        (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
        w0, w1 = outcome.state.arrays["weights/vector"]
        together = np.sign(0.5 - w0) == np.sign(3.0 - w1)
        other = 3.25 if together else 2.75  # w1 on the side where w0 is 0.75
        s = (loss(0.75, other) - loss(0.25, 6.0 - other)) / 0.5
        assert s == (14.875 if together else 9.375)
        # one scalar and one rate for both halves; where w0's direction is -1 both signs turn
        assert abs(w0 - 0.5) == pytest.approx(0.01 * s, rel=1e-5)
        assert abs(w1 - 3.0) == pytest.approx(0.01 * s, rel=1e-5)
        assert outcome.row["loss"] == (loss(0.75, other) + loss(0.25, 6.0 - other)) / 2
        seen.add(bool(together))
    assert seen == {True, False}


def test_several_probes_are_averaged_once_and_share_one_base_point() -> None:
    """4 probes: each is 14.875 or 9.375 along (u_c, u_s), all at (0.5, 3); the mean moves both halves."""
    task = two_numbers()
    algorithm = built("zo_sfl", task, probes=4)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    server, client = outcome.entries
    roots = client.plan.arrays["seeds/root"], server.plan.arrays["seeds/top.0"]
    (u_c, u_s) = ([sign(root, j) for j in range(4)] for root in roots)
    s = [
        (loss(0.5 + 0.25 * c, 3.0 + 0.25 * t) - loss(0.5 - 0.25 * c, 3.0 - 0.25 * t)) / 0.5
        for c, t in zip(u_c, u_s, strict=True)
    ]
    assert client.reply.arrays["scalars/s"][0] == pytest.approx(s)
    bottom = 0.5 - 0.01 * sum(a * c for a, c in zip(s, u_c, strict=True)) / 4
    top = 3.0 - 0.01 * sum(a * t for a, t in zip(s, u_s, strict=True)) / 4
    assert outcome.state.arrays["weights/vector"] == pytest.approx([bottom, top], rel=1e-5)


def sign(root: np.ndarray, probe: int) -> float:
    """The first coordinate of a Rademacher direction of step 0: the lowest bit of its key's first word."""
    word = int(Key.from_array(root).fold(0).fold(probe).words(0, 1)[0])
    return 1.0 - 2.0 * (word & 1)


def test_nobody_backpropagates(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a backward pass")

    monkeypatch.setattr(CutModel, "first_order", refuse)
    task = two_numbers((0, 1))
    for name in ("zo_sfl", "mu_splitfed"):
        algorithm = built(name, task)
        for outcome in played(algorithm, task, local_call(task, algorithm.actions), 2, (0, 1)):
            assert not outcome.failures


def test_halves_clients_and_rounds_have_directions_of_their_own() -> None:
    task = two_numbers((0, 1))
    algorithm = built("zo_sfl", task)
    keys = []
    for outcome in played(algorithm, task, local_call(task, algorithm.actions), 3, (0, 1)):
        server, *clients = outcome.entries
        keys += [key.tobytes() for key in server.plan.arrays.values()]
        keys += [e.plan.arrays["seeds/root"].tobytes() for e in clients]
    assert len(set(keys)) == len(keys) == 3 * 2 * 2


def test_both_halves_are_averaged_over_the_clients() -> None:
    """Two clients alone, then together: the pair's vector is the mean of theirs."""
    alone = []
    for cohort in ((0,), (1,), (0, 1)):
        task = two_numbers((0, 1))
        algorithm = built("zo_sfl", task, steps=3)
        (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1, cohort)
        alone.append(outcome.state.arrays["weights/vector"])
    one, two, both = alone
    assert not np.allclose(one, two)
    np.testing.assert_allclose(both, (one + two) / 2, rtol=1e-6)


def test_optimizers_are_new_in_each_round_and_go_on_within_one() -> None:
    """AdamW's first step is of the size of its rate; of two steps a round only the first is such a step."""
    task = two_numbers()
    algorithm = built("zo_sfl", task, optimizer="adamw", steps=1)
    path = [np.array([0.5, 3.0])]
    path += [
        o.state.arrays["weights/vector"]
        for o in played(algorithm, task, local_call(task, algorithm.actions), 3)
    ]
    for before, after in pairwise(path):
        np.testing.assert_allclose(np.abs(after - before), 0.01, rtol=1e-4)


@pytest.mark.parametrize("lost_at", [1, 2, 3])
def test_a_client_lost_in_any_step_takes_its_replica_with_it(lost_at: int) -> None:
    """Both replicas are discarded (SYSTEMS 2.15): the round is that of the other client."""
    task, calls = two_numbers((0, 1)), [0]
    algorithm = built("zo_sfl", task, steps=3)
    whole = local_call(task, algorithm.actions)

    def lossy(action, requests, deadline):
        replies = whole(action, requests, deadline)
        calls[0] += 1
        if calls[0] == lost_at + 1:
            del replies.records[1]
            return Replies(replies.records, {1: "gone"})
        return replies

    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, [0, 1], lossy)
    rest = algorithm.round(state, [0], local_call(task, algorithm.actions))
    assert outcome.failures == {1: "gone"} and [e.client for e in outcome.entries] == [SERVER, 0]
    assert np.array_equal(outcome.state.arrays["weights/vector"], rest.state.arrays["weights/vector"])


def test_a_bottom_that_is_not_the_replay_of_its_scalars_is_refused() -> None:
    task = two_numbers((0, 1))
    algorithm = built("zo_sfl", task)
    whole = local_call(task, algorithm.actions)

    def hostile(action, requests, deadline):
        replies = whole(action, requests, deadline)
        if action == "advance":
            far = Record({"weights/delta": np.float32([9.0])}, replies.records[1].values)
            replies.records[1] = far
        return replies

    (outcome,) = played(algorithm, task, hostile, 1, (0, 1))
    assert "differs" in outcome.failures[1] and outcome.row["replay_ok"] is False
    assert [e.client for e in outcome.entries] == [SERVER, 0]


def test_a_late_or_repeated_message_is_refused() -> None:
    """A client that has moved on does not step twice by the same scalars."""
    task, kept = two_numbers(), []
    algorithm = built("zo_sfl", task, steps=2)
    whole = local_call(task, algorithm.actions)

    def repeating(action, requests, deadline):
        if action == "advance":
            kept.append(requests)
            if len(kept) == 2:
                late = whole(action, kept[0], deadline)
                assert "not in the step" in late.failures[0] and not late.records
        return whole(action, requests, deadline)

    (outcome,) = played(algorithm, task, repeating, 1)
    assert not outcome.failures and len(kept) == 2


def test_more_or_fewer_activations_than_asked_for_are_refused() -> None:
    task = two_numbers((0, 1))
    algorithm = built("zo_sfl", task)
    whole = local_call(task, algorithm.actions)
    for change in (lambda z: z[:1], lambda z: np.concatenate([z, z]), lambda z: np.tile(z, (1, 5, 1))):

        def hostile(action, requests, deadline, change=change):
            replies = whole(action, requests, deadline)
            if action == "activate":
                sent = replies.records[1]
                z = change(sent.arrays["activations/z"])
                labels = np.zeros(z.shape[1], dtype=np.int32)
                replies.records[1] = Record({"activations/z": z, "labels/targets": labels}, sent.values)
            return replies

        (outcome,) = played(algorithm, task, hostile, 1, (0, 1))
        assert outcome.failures[1].startswith("refused: activations [")


def test_the_ledger_is_keys_and_scalars() -> None:
    task = two_numbers((0, 1))
    algorithm = built("zo_sfl", task, steps=2)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1, (0, 1))
    names = {name for e in outcome.entries for record in (e.plan, e.reply) for name in record.arrays}
    assert names == {
        "seeds/root",
        "scalars/s",
        *(f"{kind}/top.{i}" for kind in ("seeds", "scalars") for i in (0, 1)),
    }

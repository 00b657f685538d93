# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from hofl.core.record import Record
from hofl.protocol.base import SERVER, Replies, RoundVoid
from hofl.runtime.local import local_call
from two_numbers import built, played, two_numbers


@pytest.mark.parametrize("probes", [1, 2])
def test_a_step_worked_out_by_hand(probes: int) -> None:
    """x = 2, y = 1, w = (0.5, 3), mu = 1/4: losses 6.125 and 0.125, so s u = 6 / 0.5 = 12; 1/q once."""
    task = two_numbers()
    algorithm = built("hosl", task, probes=probes)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    ahead = 0.5 * (3.0 * (0.5 + 0.25) * 2.0 - 1.0) ** 2
    behind = 0.5 * (3.0 * (0.5 - 0.25) * 2.0 - 1.0) ** 2
    assert (ahead, behind) == (6.125, 0.125)
    bottom = 0.5 - 0.01 * (6.125 - 0.125) / (2 * 0.25)
    top = 3.0 - 0.1 * (3.0 * 1.0 - 1.0) * 1.0  # (output - y) z, all at the weights before the step
    assert outcome.state.arrays["weights/vector"] == pytest.approx([bottom, top], rel=1e-6)
    assert outcome.row["loss"] == 0.5 * (3.0 - 1.0) ** 2 and outcome.row["replay_ok"] is True
    assert outcome.row["examples"] == 1
    # (l+ - l)/mu = 16.5 against (l - l-)/mu = 7.5, for each direction: one probe correlates with itself
    assert outcome.row["zo_signal"] == pytest.approx(1.0)


def test_the_second_step_is_at_the_weights_after_the_first() -> None:
    """Two steps a round are two rounds of one: the bottom and the top move in between."""
    task = two_numbers()
    w0, w1 = 0.5, 3.0
    for _ in range(2):
        error = w1 * w0 * 2.0 - 1.0
        # on a loss quadratic in w0 the central difference is the derivative: (output - y) w1 x
        w0, w1 = w0 - 0.01 * error * w1 * 2.0, w1 - 0.1 * error * w0 * 2.0
    algorithm = built("hosl", task, steps=2)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    assert outcome.state.arrays["weights/vector"] == pytest.approx([w0, w1], rel=1e-5)


def test_optimizers_persist_over_rounds() -> None:
    """AdamW's second step is not its first again: the moments of both halves go on."""
    task = two_numbers()
    algorithm = built("hosl", task, optimizer="adamw", rates=(0.01, 0.01), steps=3)
    one = [*played(algorithm, task, local_call(task, algorithm.actions), 1)][-1]
    task.model.write(np.array([0.5, 3.0], dtype=np.float32))
    single = built("hosl", task, optimizer="adamw", rates=(0.01, 0.01))
    three = [*played(single, task, local_call(task, single.actions), 3)][-1]
    assert (
        three.row["replay_ok"] is True and not three.failures
    )  # the client counts its steps over rounds too
    for name in ("weights/vector", "weights/top_moments", "weights/moments"):
        # the probes have other keys, but u = +-1 either way
        np.testing.assert_allclose(one.state.arrays[name], three.state.arrays[name], rtol=1e-5, err_msg=name)


def test_the_bottom_travels_once() -> None:
    task, asked = two_numbers(), []
    algorithm = built("hosl", task, steps=2)
    whole = local_call(task, algorithm.actions)

    def spying(action, requests, deadline):
        asked.append((action, "weights/bottom" in requests[0].arrays))
        return whole(action, requests, deadline)

    for _ in played(algorithm, task, spying, 2):
        pass
    assert asked == [("activate", True)] + 2 * [("advance", False)] + [("activate", False)] + 2 * [
        ("advance", False)
    ]


@pytest.mark.parametrize("lost_at", range(4))
def test_a_client_lost_on_the_way_voids_the_round_and_nothing_has_moved(lost_at: int) -> None:
    task, calls = two_numbers(), [0]
    algorithm = built("hosl", task, steps=3)
    whole = local_call(task, algorithm.actions)

    def lossy(action, requests, deadline):
        replies = whole(action, requests, deadline)  # it works, and the answer is lost
        calls[0] += 1
        return Replies({}, {0: "gone"}) if calls[0] == lost_at + 1 else replies

    state = algorithm.init(task.model.read())
    before = state.to_bytes()
    with pytest.raises(RoundVoid) as void:
        algorithm.round(state, [0], lossy)
    assert void.value.failures == {0: "gone"} and state.to_bytes() == before
    again = algorithm.round(state, [0], lossy)  # with whatever the client now holds
    task.model.write(state.arrays["weights/vector"])
    straight = algorithm.round(state, [0], local_call(task, algorithm.actions))
    assert not again.failures and again.state.to_bytes() == straight.state.to_bytes()


def test_a_loss_that_is_not_finite_voids_the_round() -> None:
    task = two_numbers()
    algorithm = built("hosl", task)
    state = algorithm.init(np.array([1e30, 1e30], dtype=np.float32))
    with pytest.raises(RoundVoid) as void:
        algorithm.round(state, [0], local_call(task, algorithm.actions))
    assert "non-finite" in void.value.failures[0]


def test_a_frozen_bottom_costs_one_upload_and_no_losses() -> None:
    task, seen = two_numbers(), []
    algorithm = built("hosl", task, estimator="none", steps=2)
    whole = local_call(task, algorithm.actions)

    def spying(action, requests, deadline):
        replies = whole(action, requests, deadline)
        seen.append((requests[0].arrays.keys(), replies.records[0].arrays.get("activations/z")))
        return replies

    (outcome,) = played(algorithm, task, spying, 1)
    assert [z.shape for _, z in seen[:2]] == [(1, 1, 1)] * 2 and seen[2][1] is None
    assert not any("scalars" in name or "seeds" in name for keys, _ in seen for name in keys)
    w0, w1 = outcome.state.arrays["weights/vector"]
    assert w0 == 0.5 and w1 < 3.0 and outcome.row["zo_signal"] is None


def test_a_digest_that_differs_is_said_and_mended_by_a_snapshot() -> None:
    task, snapshots = two_numbers(), []
    algorithm = built("hosl", task)
    whole = local_call(task, algorithm.actions)

    def hostile(action, requests, deadline):
        snapshots.append("weights/bottom" in requests[0].arrays)
        replies = whole(action, requests, deadline)
        for client, reply in list(replies.records.items()):
            if "digests/bottom" in reply.arrays and len(snapshots) == 2:
                wrong = {"digests/bottom": reply.arrays["digests/bottom"] ^ 1}
                replies.records[client] = Record(wrong, reply.values)
        return replies

    first, second = played(algorithm, task, hostile, 2)
    assert "differs" in first.failures[0] and first.row["replay_ok"] is False
    assert not second.failures and second.row["replay_ok"] is True
    assert snapshots == [True, False, True, False]


def test_the_ledger_has_scalars_of_the_client_and_the_top_of_the_server() -> None:
    task = two_numbers()
    algorithm = built("hosl", task, steps=2)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    server, client = outcome.entries
    assert server.client == SERVER and set(server.reply.arrays) == {"weights/top", "weights/top_moments"}
    assert set(client.reply.arrays) == {"scalars/s", "metrics/agreement"}
    assert client.reply.arrays["scalars/s"].shape == (2, 1)

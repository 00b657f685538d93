# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from hofl.core.keys import Key
from hofl.protocol.base import SERVER, Replies
from hofl.runtime.local import local_call
from two_numbers import built, played, two_numbers


@pytest.mark.parametrize("law", ["rademacher", "sphere"])
@pytest.mark.parametrize("probes", [1, 3])
def test_a_round_worked_out_by_hand(law: str, probes: int) -> None:
    """tau = 2 at eta_s = 0.1: w1 goes 3, 2.8, 2.62; then delta_c of w0 at w1 = 2.62; eta_g = 1/2."""
    task = two_numbers()
    algorithm = built("mu_splitfed", task, directions=law, probes=probes, server_steps=2, global_lr=0.5)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    h, w1 = 0.5 * 2.0, 3.0
    for _ in range(2):
        # quadratic in w1, so the central difference is the derivative, (w1 h - y) h
        w1 -= 0.1 * (w1 * h - 1.0) * h
    assert w1 == pytest.approx(2.62)
    ahead = 0.5 * (w1 * (0.5 + 0.25) * 2.0 - 1.0) ** 2
    behind = 0.5 * (w1 * (0.5 - 0.25) * 2.0 - 1.0) ** 2
    w0 = 0.5 - 0.01 * (ahead - behind) / (2 * 0.25)
    expected = [0.5 + 0.5 * (w0 - 0.5), 3.0 + 0.5 * (w1 - 3.0)]
    assert expected == pytest.approx([0.457556, 2.81], rel=1e-5)
    assert outcome.state.arrays["weights/vector"] == pytest.approx(expected, rel=1e-5)
    # the loss at both sides of w1 = 3: (0.5 * 2.25^2 + 0.5 * 1.75^2) / 2
    assert outcome.row["loss"] == pytest.approx((0.5 * 2.25**2 + 0.5 * 1.75**2) / 2)
    assert outcome.row["examples"] == 1


def test_tau_steps_are_of_one_upload() -> None:
    """Whatever tau is, a client sends 2q + 1 activations and gets q scalars (SYSTEMS 2.8)."""
    sent = {}
    for tau in (1, 4):
        task, seen = two_numbers(), []
        algorithm = built("mu_splitfed", task, probes=2, server_steps=tau)
        whole = local_call(task, algorithm.actions)

        def spying(action, requests, deadline, seen=seen, whole=whole):
            replies = whole(action, requests, deadline)
            for record in (requests[0], replies.records[0]):
                seen.append({name: a.shape for name, a in record.arrays.items()})
            return replies

        (outcome,) = played(algorithm, task, spying, 1)
        assert outcome.entries[0].reply.arrays["scalars/top.0"].shape == (tau, 2)
        sent[tau] = seen
    assert sent[1] == sent[4]
    assert sent[1][1]["activations/z"] == (5, 1, 1) and sent[1][2] == {"scalars/s": (2,)}


def test_the_server_takes_fresh_directions_in_each_of_its_steps() -> None:
    task = two_numbers()
    algorithm = built("mu_splitfed", task, server_steps=8, rates=(0.01, 1e-6))
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    scalars = outcome.entries[0].reply.arrays["scalars/top.0"][:, 0]
    # at a negligible rate |s| stays (w1 h - y) h = 2, and its sign is that of the direction
    np.testing.assert_allclose(np.abs(scalars), 2.0, rtol=1e-4)
    assert set(np.sign(scalars)) == {1.0, -1.0}


def test_the_server_has_the_plain_rule_whatever_its_optimizer_is_called() -> None:
    """eta_s is the rate of [optimizer]; the update law is SGD on both sides, as the paper has it."""
    task = two_numbers()
    algorithm = built("mu_splitfed", task, top_optimizer="adamw", server_steps=1)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    values = outcome.entries[0].plan.values["optimizer"]
    assert (values["name"], values["lr"]) == ("sgd", 0.1)
    assert outcome.state.arrays["weights/vector"][1] == pytest.approx(2.8)


def test_a_lost_client_takes_its_server_steps_with_it() -> None:
    """The server keeps its tau steps only for those that finished (SYSTEMS 2.15)."""
    task = two_numbers((0, 1))
    algorithm = built("mu_splitfed", task)
    whole = local_call(task, algorithm.actions)

    def lossy(action, requests, deadline):
        replies = whole(action, requests, deadline)
        if action == "finish":
            del replies.records[1]
            return Replies(replies.records, {1: "gone"})
        return replies

    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, [0, 1], lossy)
    rest = algorithm.round(state, [0], local_call(task, algorithm.actions))
    assert outcome.failures == {1: "gone"} and [e.client for e in outcome.entries] == [SERVER, 0]
    assert not any(name.endswith("top.1") for name in outcome.entries[0].reply.arrays)
    assert np.array_equal(outcome.state.arrays["weights/vector"], rest.state.arrays["weights/vector"])


def test_simulated_time_overlaps_the_wait() -> None:
    """max over clients of max(delay, tau), beside max delay + tau; the delays are those of the keys."""
    task = two_numbers((0, 1))
    algorithm = built("mu_splitfed", task, server_steps=3, delay=5.0)
    times = []
    for t, outcome in enumerate(played(algorithm, task, local_call(task, algorithm.actions), 40, (0, 1))):
        draws = [Key.of(3, "directions", i, t).fold(2).uniforms(1)[0] for i in (0, 1)]
        longest = max(-5.0 * np.log(1.0 - u) for u in draws)
        assert outcome.row["simulated_time"] == pytest.approx(max(longest, 3.0))
        assert outcome.row["simulated_time_waiting"] == pytest.approx(longest + 3.0)
        times.append(outcome.row["simulated_time_waiting"] - 3.0)
    # the longer of two exponential delays with mean 5 is 7.5 on average, its standard error 5.6 / sqrt(40)
    assert abs(np.mean(times) - 7.5) < 3 * 0.9


def test_without_a_delay_there_is_no_simulated_time() -> None:
    task = two_numbers()
    algorithm = built("mu_splitfed", task)
    (outcome,) = played(algorithm, task, local_call(task, algorithm.actions), 1)
    assert not any("simulated" in name for name in outcome.row)

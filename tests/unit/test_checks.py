# SPDX-License-Identifier: Apache-2.0
"""What both sides check of each other, and what the check of the probes costs."""

import numpy as np
import pytest

from hofl.algorithms import ALGORITHMS
from hofl.core import estimators
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.protocol import aggregate, learner
from hofl.protocol.aggregate import Training
from hofl.protocol.base import LARGEST, Entry, Memory, Replies, RoundVoid, shown, usable
from hofl.protocol.probing import Probing, Shared, zo_signal
from hofl.protocol.split import Split
from hofl.protocol.two_sided import slopes
from hofl.runtime.local import local_call
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task

Q = 2
ALWAYS, EARLY = [3 * Q] * 5, [3 * Q] * 3 + [2 * Q] * 2


@pytest.mark.parametrize(
    ("name", "steps", "passes"),
    [
        *((name, 1, [2 * Q] * 3 + [Q] * 2) for name in ("ho_fl", "ho_sfl", "heron_sfl")),
        *((name, 1, [2 * Q] * 3 + [Q] * 2) for name in ("decomfl", "hiso", "fedzo")),
        *((name, 2, ALWAYS) for name in ("ho_fl", "heron_sfl")),
        *((name, 2, EARLY) for name in ("decomfl", "hiso", "fedzo")),
    ],
)
def test_mirrored_probes_are_paid_in_a_first_step_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, name: str, steps: int, passes: list[int]
) -> None:
    """Perturbed passes of five rounds of one client; without the mirrored ones there is no signal to tell."""
    count, displaced = [0], estimators._displaced

    def counted(*args: object) -> object:
        count[0] += 1
        return displaced(*args)

    monkeypatch.setattr(estimators, "_displaced", counted)
    task, sgd = synthetic_task(Partition(clients=1), seed=1, rows=40, width=6), Optimizer("sgd", 1e-3)
    training = Training(3, steps, 4, sgd, (40,), run="checks")
    probing = Probing("forward", Q, 1e-2, "gaussian", sgd)
    given = {"layout": task.model.layout, "boundaries": (2,), "training": training, "probing": probing}
    algorithm = ALGORITHMS[name].build(**given, preferred=None, split=Split(task), shared=Shared())
    state, call, found = algorithm.init(task.model.read()), local_call(task, algorithm.actions), []
    for _ in passes:
        count[0] = 0
        outcome = algorithm.round(state, [0], call)
        state = outcome.state
        found.append(count[0])
        assert (outcome.row["zo_signal"] is None) == (count[0] == steps * Q)
    assert found == passes


def test_a_claim_beyond_the_range_of_a_double_is_no_signal_and_no_warning() -> None:
    claims = [np.array([1e308, 1e308, 1e308])] * 2
    assert not (zo_signal(claims, "forward") or 0) > 0


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([], True),
        ([-LARGEST, 0.0], True),
        ([1.1 * LARGEST], False),
        ([0.0, -3e38], False),
        ([np.nan, 1.0], False),
        ([1.0, -np.inf], False),
    ],
)
def test_what_a_run_that_learns_never_has_is_of_no_use(values: list[float], fits: bool) -> None:
    found = np.array(values, dtype=np.float32)
    assert usable(found) is fits
    if fits:
        assert aggregate.require_usable(found) is found
    else:
        with pytest.raises(RecordError, match=r"not finite, or beyond 1e\+12"):
            aggregate.require_usable(found)


def test_losses_far_apart_make_no_scalar() -> None:
    """Of a server's two losses of what one client sent (HOSL, ZO-SFL, MU-SplitFed)."""
    assert slopes(np.float32([[3.0], [1.0]]), 0.5) == [2.0]
    with pytest.raises(RecordError, match="scalar"):
        slopes(np.float32([[1e20], [1.0]]), 0.5)


def test_a_mean_that_overflows_is_no_warning() -> None:
    """The loop refuses the state that it makes."""
    state = aggregate.initial_state(Training(1, 1, 1, Optimizer("sgd", 1.0), (1,)), np.float32([3e38]))
    entry = Entry(0, Record({}, {"weight": 1.0, "position": 0, "steps": 1}), Record())
    moved = aggregate.advance(state, [(entry, np.float32([3e38]))])
    assert np.isinf(moved.arrays["weights/vector"]).all()
    sent = entry._replace(reply=Record({"weights/delta": np.float32([3e38])}))
    assert np.isinf(learner.averaged(np.float32([3e38]), [sent])).all()


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ho_fl", "decomfl", "fedzo", "mezo", "ho_sfl", "hosl"])
def test_a_client_with_another_layout_refuses(name: str) -> None:
    """Of as many trainables, say, in another order: their deltas would be added to the wrong numbers."""
    task, sgd = synthetic_task(Partition(clients=1), seed=1, rows=40, width=6), Optimizer("sgd", 1e-3)
    training, probing = Training(3, 1, 4, sgd, (40,)), Probing("central", 1, 1e-2, "gaussian", sgd)
    given = {"layout": task.model.layout, "boundaries": (2,), "training": training, "probing": probing}
    algorithm = ALGORITHMS[name].build(
        **given, preferred=None, split=Split(task), shared=Shared(), proximal=0.1
    )
    first, seen = next(iter(algorithm.actions)), list[Record]()

    def call(action, requests, deadline):
        seen.extend(requests.values())
        return Replies({}, {0: "gone"})

    with pytest.raises(RoundVoid):
        algorithm.round(algorithm.init(task.model.read()), [0], call)
    (asked,) = seen
    algorithm.actions[first](task, asked, Memory())
    for layout in ({"layout": "other"}, {"layout": None}):
        with pytest.raises(ClientError, match="another layout"):
            algorithm.actions[first](task, Record(asked.arrays, asked.values | layout), Memory())


@pytest.mark.parametrize(
    ("said", "line"),
    [("r", "r"), (None, "None"), (3, "3"), ([1], "a list"), ("a\nb\ud800", "a?b?"), ("x" * 999, "x" * 40)],
)
def test_what_a_client_said_fits_a_line(said: object, line: str) -> None:
    assert shown(said) == line

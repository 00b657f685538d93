# SPDX-License-Identifier: Apache-2.0
import json
import math

import numpy as np
import pytest
import torch

from hofl.tasks.metrics import Sums, majority_class


def _constant(targets: list[int], answer: int, classes: int = 2) -> Sums:
    logits = torch.zeros(len(targets), classes)
    logits[:, answer] = 1.0
    return Sums.from_logits(logits, torch.tensor(targets))


def test_a_constant_predictor_is_shown_for_what_it_is() -> None:
    """C26."""
    row = _constant([0] * 67 + [1] * 33, 0).to_row()
    assert (row["accuracy"], row["majority_rate"], row["balanced_accuracy"], row["n"]) == (
        0.67,
        0.67,
        0.5,
        100,
    )
    assert row["confusion"] == [[67, 0], [33, 0]]


def test_losses_are_pooled_by_example_and_never_by_batch() -> None:
    """C41."""
    one = Sums(2.0, np.array([[1, 0], [0, 0]]))
    nine = Sums(9.0, np.array([[4, 0], [2, 3]]))
    assert (one + nine).loss == pytest.approx(1.1, abs=1e-12)
    assert (one.loss + nine.loss) / 2 == 1.5  # what a mean of means would have said


@pytest.mark.parametrize("sizes", [[30], [1] * 30, [7, 23], [29, 1]])
def test_any_division_into_batches_gives_the_same_sums(sizes: list[int]) -> None:
    rng = np.random.Generator(np.random.Philox(1))
    logits, targets = torch.from_numpy(rng.normal(size=(30, 3))), torch.from_numpy(rng.integers(0, 3, 30))
    parts = zip(logits.split(sizes), targets.split(sizes), strict=True)
    joined = sum((Sums.from_logits(x, y) for x, y in parts), Sums.zero(3))
    whole = Sums.from_logits(logits, targets)
    assert np.array_equal(joined.confusion, whole.confusion)
    assert joined.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), rel=1e-14)
    assert whole.loss_sum == pytest.approx(joined.loss_sum, rel=1e-14)


def test_the_order_of_examples_changes_no_bit_of_a_batch() -> None:
    rng = np.random.Generator(np.random.Philox(2))
    logits, targets = (
        torch.from_numpy(rng.normal(size=(999, 3)) * 40),
        torch.from_numpy(rng.integers(0, 3, 999)),
    )
    order = torch.from_numpy(rng.permutation(999))
    assert (
        Sums.from_logits(logits, targets).loss_sum == Sums.from_logits(logits[order], targets[order]).loss_sum
    )


def test_no_examples_is_none_and_not_a_number_nowhere() -> None:
    empty = Sums.zero(3)
    assert empty.to_row() == {
        "n": 0,
        "loss": None,
        "accuracy": None,
        "balanced_accuracy": None,
        "majority_rate": None,
        "confusion": [[0] * 3] * 3,
    }
    assert (empty + _constant([1, 1], 1, 3)).accuracy == 1.0


def test_balanced_accuracy_leaves_out_classes_without_examples() -> None:
    assert _constant([2, 2], 2, 5).balanced_accuracy == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stays_visible_but_out_of_json(bad: float) -> None:
    sums = Sums.from_logits(torch.tensor([[bad, 0.0], [1.0, 0.0]]), torch.tensor([1, 0]))
    assert not math.isfinite(sums.loss_sum)
    row = json.loads(json.dumps(sums.to_row(), allow_nan=False))
    assert row["loss"] is None and row["n"] == 2


def test_low_precision_logits_are_scored_in_double() -> None:
    logits = torch.tensor([[8.0, -8.0]] * 1000)
    exact = math.log1p(math.exp(-16.0))
    assert Sums.from_logits(logits.bfloat16(), torch.zeros(1000, dtype=torch.int64)).loss == pytest.approx(
        exact, rel=1e-9
    )


def test_majority_class() -> None:
    assert majority_class(np.array([0, 1, 1]), ["no", "yes"]) == {"label": "yes", "rate": 2 / 3}

# SPDX-License-Identifier: Apache-2.0
"""Estimators against autograd and closed forms, on surrogates small enough to check by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hofl.core.directions import Directions, gaussian
from hofl.core.estimators import ESTIMATORS, agreement, signal
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.replay import Step, hex_digest, replay_

KEY = Key.of(5, "directions", 0, 0)
EXACT = ("tangent", "sketch")


class FunctionSurrogate:
    """``outputs`` is any torch function of v; float64 inside, so that differences are clean."""

    def __init__(self, anchor: np.ndarray, function: Callable[[Tensor], Tensor]) -> None:
        self.anchor = anchor.astype(np.float32)
        self.live = self.anchor.copy()
        self.function, self.calls = function, 0

    def write(self, values: np.ndarray, start: int) -> None:
        self.live[start : start + len(values)] = values

    def outputs(self) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            return self.function(torch.from_numpy(self.live.astype(np.float64)))

    def _at_anchor(self) -> Tensor:
        return torch.from_numpy(self.anchor.astype(np.float64))

    def tangents(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [torch.func.jvp(self.function, (self._at_anchor(),), (u.double(),)) for u in directions]
        return pairs[0][0], torch.stack([t for _, t in pairs])

    def recorded(self) -> tuple[Tensor, Callable[[Tensor], np.ndarray]]:
        z, pull = torch.func.vjp(self.function, self._at_anchor())
        return z, lambda feedback: pull(feedback)[0].numpy().astype(np.float32)


class ForwardOnly:
    """A device without autograd: a NumPy model that can only run forward (C64)."""

    def __init__(self, size: int) -> None:
        self.anchor = gaussian(KEY.fold(1), 0, size)
        self.live = self.anchor.copy()

    def write(self, values: np.ndarray, start: int) -> None:
        self.live[start : start + len(values)] = values

    def outputs(self) -> Tensor:
        return torch.from_numpy(np.atleast_1d(0.5 * (self.live.astype(np.float64) ** 2).sum()))

    def tangents(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    recorded = tangents  # type: ignore[assignment]


def network(v: Tensor) -> Tensor:
    """v [30] -> z [4]: two small tanh layers."""
    hidden = torch.tanh(v[:18].reshape(6, 3) @ torch.tensor([1.0, -0.5, 2.0], dtype=v.dtype))
    return torch.tanh(v[18:].reshape(2, 6) @ hidden).repeat(2) * torch.tensor(
        [1.0, 2.0, 3.0, 4.0], dtype=v.dtype
    )


FEEDBACK = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64)


def derivative(surrogate: FunctionSurrogate, u: np.ndarray) -> float:
    v = torch.from_numpy(surrogate.anchor.astype(np.float64)).requires_grad_()
    (g,) = torch.autograd.grad(surrogate.function(v), v, FEEDBACK)
    return float(g.numpy() @ u.astype(np.float64))


@pytest.mark.parametrize("family", ["gaussian", "rademacher", "hadamard"])
@pytest.mark.parametrize(
    ("name", "tolerance"), [("forward", 2e-2), ("central", 1e-3), ("tangent", 1e-5), ("sketch", 1e-5)]
)
def test_scalars_are_directional_derivatives(name: str, tolerance: float, family: str) -> None:
    surrogate = FunctionSurrogate(0.5 * gaussian(KEY, 0, 30), network)
    directions = Directions(KEY.fold(2), family, 4, 30)
    before = hex_digest(surrogate.live)
    z, scalars = ESTIMATORS[name](surrogate, directions, 1e-3, False)
    values = scalars(FEEDBACK).values
    expected = np.array([derivative(surrogate, directions.block(j, 0, 30)) for j in range(4)])
    assert torch.equal(z, surrogate.outputs())
    np.testing.assert_allclose(values, expected, atol=tolerance * np.abs(expected).max())
    assert hex_digest(surrogate.live) == before  # restored, to the bit


def test_forward_difference_by_hand() -> None:
    """L = |v|^2 / 2 at (1, 2, 3): s = <v, u> + radius |u|^2 / 2, central exactly <v, u> (C14)."""
    u = Directions(KEY, "gaussian", 1, 3)
    d = u.block(0, 0, 3).astype(np.float64)
    surrogate = FunctionSurrogate(np.array([1.0, 2.0, 3.0]), lambda v: 0.5 * (v * v).sum().reshape(1))
    one = torch.ones(1, dtype=torch.float64)
    ahead = ESTIMATORS["forward"](surrogate, u, 0.5, False)[1](one).values[0]
    centre = ESTIMATORS["central"](surrogate, u, 0.5, False)[1](one).values[0]
    assert ahead == pytest.approx(d @ [1, 2, 3] + 0.25 * (d @ d), rel=1e-6)
    assert centre == pytest.approx(d @ [1, 2, 3], rel=1e-6)


@pytest.mark.parametrize(("name", "passes"), [("forward", 3), ("central", 5), ("none", 1)])
def test_number_of_passes(name: str, passes: int) -> None:
    surrogate = FunctionSurrogate(gaussian(KEY, 0, 30), network)
    ESTIMATORS[name](surrogate, Directions(KEY, "gaussian", 2, 30), 1e-3, False)[1](FEEDBACK)
    assert surrogate.calls == passes


@pytest.mark.parametrize("name", ["forward", "central", *EXACT])
def test_zero_direction_gives_exactly_zero(name: str) -> None:
    class Zero(Directions):
        def block(self, probe: int, start: int, stop: int) -> np.ndarray:
            return np.zeros(stop - start, dtype=np.float32)

    surrogate = FunctionSurrogate(gaussian(KEY, 0, 30), network)
    for trial in range(25):
        _, scalars = ESTIMATORS[name](surrogate, Zero(KEY.fold(trial), "gaussian", 4, 30), 1e-3, True)
        assert scalars(FEEDBACK).values.tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_thousand_probes_move_nothing(dtype: torch.dtype) -> None:
    """Undoing by subtraction drifts by 12% of the weights in bf16; restoring from the anchor by 0 (C06)."""
    surrogate = FunctionSurrogate(0.02 * gaussian(KEY, 0, 30), lambda v: network(v).to(dtype))
    before = hex_digest(surrogate.live)
    for trial in range(250):
        ESTIMATORS["forward"](surrogate, Directions(KEY.fold(trial), "gaussian", 4, 30), 1e-3, False)[1](
            FEEDBACK
        )
    assert hex_digest(surrogate.live) == before


def test_anchor_is_restored_when_a_pass_fails() -> None:
    surrogate = FunctionSurrogate(gaussian(KEY, 0, 30), network)
    _, scalars = ESTIMATORS["forward"](surrogate, Directions(KEY, "gaussian", 2, 30), 1e-3, False)
    surrogate.function = lambda v: 1 / 0
    before = hex_digest(surrogate.live)
    with pytest.raises(ZeroDivisionError):
        scalars(FEEDBACK)
    assert hex_digest(surrogate.live) == before


def test_scalars_are_linear_over_micro_batches() -> None:
    """With the feedback of the total loss, s is the sum of the micro-batches' s (SYSTEMS 7.7)."""
    surrogate = FunctionSurrogate(gaussian(KEY, 0, 30), network)
    directions = Directions(KEY, "gaussian", 3, 30)
    whole = ESTIMATORS["forward"](surrogate, directions, 1e-3, False)[1](FEEDBACK).values
    parts = []
    for rows in ([0, 1], [2, 3]):
        part = FunctionSurrogate(surrogate.anchor, lambda v, rows=rows: network(v)[rows])
        parts.append(ESTIMATORS["forward"](part, directions, 1e-3, False)[1](FEEDBACK[rows]).values)
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-6)


@pytest.mark.parametrize("name", ["forward", "tangent", "sketch"])
def test_estimate_is_unbiased(name: str) -> None:
    surrogate = FunctionSurrogate(0.5 * gaussian(KEY, 0, 30), network)
    gradient = np.array([derivative(surrogate, e) for e in np.eye(30)])
    total, draws = np.zeros(30), 400
    for i in range(draws):
        directions = Directions(KEY.fold(i), "gaussian", 2, 30)
        values = ESTIMATORS[name](surrogate, directions, 1e-3, False)[1](FEEDBACK).values
        total += directions.combination(values.astype(np.float32))(0, 30)
    expected_error = math.sqrt(31 / 2 / draws) * np.linalg.norm(gradient)
    assert np.linalg.norm(total / draws - gradient) < 2 * expected_error


def test_smoothing_bias_of_a_cubic() -> None:
    """L = sum v^3 / 6: the smoothed gradient is off by exactly radius^2 / 2 a coordinate (SYSTEMS 4.3)."""
    v, radius, total, draws = np.array([0.5, -1.0, 2.0]), 0.5, 0.0, 4000
    surrogate = FunctionSurrogate(v, lambda w: (w**3).sum().reshape(1) / 6)
    for i in range(draws):
        u = Directions(KEY.fold(i), "gaussian", 1, 3).block(0, 0, 3).astype(np.float64)
        total = total + (surrogate.anchor + radius * u) ** 2 / 2  # gradient at the displaced point
    np.testing.assert_allclose(total / draws - v**2 / 2, radius**2 / 2, atol=0.06)


def test_signal_is_one_on_a_smooth_surrogate_and_falls_with_rounding() -> None:
    smooth = FunctionSurrogate(0.5 * gaussian(KEY, 0, 30), network)
    coarse = FunctionSurrogate(
        0.5 * gaussian(KEY, 0, 30), lambda v: network(v) + 0.03 * torch.sin(1e7 * v.sum())
    )
    levels = {}
    for label, surrogate in (("smooth", smooth), ("coarse", coarse)):
        sums = np.zeros(3)
        for i in range(40):
            _, scalars = ESTIMATORS["forward"](
                surrogate, Directions(KEY.fold(i), "gaussian", 2, 30), 1e-4, True
            )
            sums += agreement(scalars(FEEDBACK))
        levels[label] = signal(sums)
    assert levels["smooth"] > 0.99 and levels["coarse"] < 0.5
    assert signal(np.zeros(3)) == 0.0


def test_central_checks_itself_for_free_and_exact_estimators_have_nothing_to_check() -> None:
    surrogate = FunctionSurrogate(gaussian(KEY, 0, 30), network)
    directions = Directions(KEY, "gaussian", 2, 30)
    assert ESTIMATORS["central"](surrogate, directions, 1e-3, False)[1](FEEDBACK).halves is not None
    for name in EXACT:
        assert ESTIMATORS[name](surrogate, directions, 1e-3, True)[1](FEEDBACK).halves is None
    assert ESTIMATORS["none"](surrogate, directions, 1e-3, True)[1](FEEDBACK).values.size == 0


def test_a_forward_only_numpy_model_learns() -> None:
    """200 steps of q=8 probes take the loss of a quadratic down by 90% without autograd anywhere (C64)."""
    model, optimizer, one = ForwardOnly(20), Optimizer("sgd", 0.05), torch.ones(1, dtype=torch.float64)
    start = float(model.outputs())
    with torch.no_grad():
        for step in range(200):
            directions = Directions(KEY.fold(step), "gaussian", 8, 20)
            _, scalars = ESTIMATORS["forward"](model, directions, 1e-3, False)
            s = scalars(one).values.astype(np.float32)
            assert not torch.is_grad_enabled()
            replay_(model.live, [Step(directions, s)], optimizer)
            model.anchor = model.live.copy()
    assert float(model.outputs()) < 0.1 * start

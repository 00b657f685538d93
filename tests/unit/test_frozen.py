# SPDX-License-Identifier: Apache-2.0
"""The hash of frozen weights: every bit of them counts, nothing that is trained or computed does."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from families import adapted
from hofl.models import frozen
from hofl.models.frozen import frozen_sha256
from hofl.models.load import load
from hofl.models.tiny import FAMILIES


def first(module: nn.Module, trained: bool) -> nn.Parameter:
    return next(p for p in module.parameters() if p.requires_grad == trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_bit_of_a_frozen_weight_counts(family: str) -> None:
    module = adapted(family, layers=2, head=2 if family == "bert" else None)
    before = frozen_sha256(module)
    weight = first(module, trained=False).data.view(torch.int32).reshape(-1)
    weight[-1] ^= 1
    assert frozen_sha256(module) != before
    weight[-1] ^= 1
    assert frozen_sha256(module) == before
    first(module, trained=True).data += 1
    assert frozen_sha256(module) == before


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("tiny:gpt2", dtype="bfloat16").module.requires_grad_(False)
    whole = frozen_sha256(module)
    monkeypatch.setattr(frozen, "_PIECE", 7)
    assert frozen_sha256(module) == whole
    assert frozen_sha256(module.float()) != whole


def layer(change: Callable[[nn.Module], object]) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False))
    module.register_buffer("mean", torch.zeros(()))
    module.register_buffer("computed", torch.zeros(2), persistent=False)
    change(module)
    return module


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda m: None, True),
        (lambda m: m.computed.add_(1), True),
        (lambda m: m.mean.add_(1), False),
        (
            lambda m: setattr(m, "weight", nn.Parameter(m.weight.data.reshape(3, 2), requires_grad=False)),
            False,
        ),
        (lambda m: m.weight.requires_grad_(True), False),
        (lambda m: m.register_buffer("none", torch.zeros(0)), False),
    ],
    ids=["nothing", "computed", "buffer", "shape", "trained", "empty"],
)
def test_what_counts(change: Callable[[nn.Module], object], same: bool) -> None:
    assert (frozen_sha256(layer(change)) == frozen_sha256(layer(lambda m: None))) == same

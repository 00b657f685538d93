# SPDX-License-Identifier: Apache-2.0
"""Finding the blocks of models nobody listed."""

import pytest
import torch
from torch import Tensor, nn

from families import NAMES, case
from hofl.errors import ModelError
from hofl.models.blocks import find_blocks
from hofl.models.boundary import cut


class Net(nn.Module):
    """Blocks of two classes in ``net.stages``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Module()
        self.net.stages = nn.ModuleList([nn.Linear(3, 3), nn.Bilinear(3, 3, 3), nn.Linear(3, 3)])

    def forward(self, input: Tensor) -> Tensor:
        first, second, third = self.net.stages
        out = first(input)
        return third(out if out is None else second(out, out))


class Twins(nn.Module):
    """An encoder and a decoder of like size."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


def test_an_unknown_model_is_told_the_setting_to_add() -> None:
    """C29."""
    with pytest.raises(ModelError, match=r'net\.stages \(3\).*model\.blocks = "net\.stages"'):
        cut(Net())


def test_the_setting_makes_it_work() -> None:
    """C29."""
    model = cut(Net(), blocks="net.stages")
    model.self_test({"input": torch.ones(2, 3)})
    assert model.blocks == 3


def test_two_lists_of_like_size_are_ambiguous() -> None:
    with pytest.raises(ModelError, match=r'"left" and "right".*left \(3\), right \(2\)'):
        find_blocks(Twins())
    assert len(find_blocks(Twins(), "right")[1]) == 2


@pytest.mark.parametrize("path", ["nowhere", "net", "net.stages.0"])
def test_a_path_that_is_no_list(path: str) -> None:
    with pytest.raises(ModelError, match="is no list of blocks"):
        find_blocks(Net(), path)


def test_no_list_at_all() -> None:
    with pytest.raises(ModelError, match="lists found: none"):
        find_blocks(nn.Linear(2, 2))


def test_one_module_twice_is_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="twice"):
        cut(nn.Sequential(layer, nn.Tanh(), layer))


def test_blocks_that_do_not_follow_one_another_fail_the_self_test() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, input: Tensor) -> Tensor:
            return sum((expert(input) for expert in self.experts), torch.zeros(1))

    with pytest.raises(ModelError, match=r"differs from the whole by .*model\.blocks"):
        cut(Parallel()).self_test({"input": torch.ones(2, 3)})


@pytest.mark.parametrize("name", NAMES)
def test_families_are_found(name: str) -> None:
    assert case(name).model.blocks == 4

# SPDX-License-Identifier: Apache-2.0
"""Residual networks in the CIFAR form: one block list, a cut point after every element.

He, Zhang, Ren and Sun 2016 ("Deep residual learning for image recognition"): ``resnet18`` is their
four stages of two basic blocks, ``resnet8`` three stages of one (the depth ``6n + 2`` family of section
4.2 with n = 1). For small images: a 3x3 stem of stride 1 and no max-pool. Every element is stateless:
batch norm, where asked for, reads its running statistics and never moves them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hofl.core.directions import gaussian
from hofl.core.keys import Key
from hofl.errors import ConfigError

Norm = Literal["group", "batch", "batch-frozen"]

TOGETHER = 8
"""Channels of one group of a group norm; fewer where the channels are no multiple."""


@dataclass(frozen=True)
class Depth:
    """What tells one depth from another.

    Attributes:
        blocks: residual blocks in each stage; each stage after the first halves the side and doubles the
            channels.
        width: channels of the stem unless another number is asked for.
    """

    blocks: tuple[int, ...]
    width: int


RESNETS: dict[str, Depth] = {"resnet18": Depth((2, 2, 2, 2), 64), "resnet8": Depth((1, 1, 1), 16)}
"""Every depth by its name."""


class FixedBatchNorm(nn.BatchNorm2d):
    """Batch norm in eval mode for good: ``train()`` does not reach it."""

    def train(self, mode: bool = True) -> "FixedBatchNorm":
        """Stays in eval mode, whatever is asked."""
        super().train(False)
        return self


class Stem(nn.Module):
    """Convolution, norm, ReLU: images [batch, channels, side, side] -> [batch, width, side, side]."""

    def __init__(self, channels: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.conv = _conv(channels, width, 1)
        self.norm = _norm(width, norm)

    def forward(self, input: Tensor) -> Tensor:
        """The first features."""
        return torch.relu(self.norm(self.conv(input)))


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut; a 1x1 convolution is the shortcut where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, stride)
        self.norm1 = _norm(width, norm)
        self.conv2 = _conv(width, width, 1)
        self.norm2 = _norm(width, norm)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            skip = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(skip, _norm(width, norm))

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, side, side] -> [batch, width, side / stride, side / stride]."""
        branch = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(input)))))
        return torch.relu(branch + self.shortcut(input))


class Head(nn.Module):
    """Mean over the places, then a linear map: [batch, width, side, side] -> logits [batch, classes]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, input: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.linear(input.mean((2, 3)))
        return logits


def resnet(
    depth: str, *, classes: int, channels: int, key: Key, norm: Norm = "group", width: int = 0
) -> nn.Sequential:
    """The blocks ``[stem, residual blocks ..., head]``, float32, every parameter drawn by the key.

    Args:
        depth: a name in ``RESNETS``.
        classes: outputs.
        channels: of an image.
        key: of the start; the global generator is left alone.
        norm: ``group``; ``batch`` with running statistics that stay at mean 0 and variance 1, so that only
            its scale and shift do anything; ``batch-frozen`` with these frozen as well.
        width: channels of the stem, doubled by each later stage; 0 is the depth's own.

    Raises:
        ConfigError: an unknown depth.
    """
    if depth not in RESNETS:
        raise ConfigError(f"model.source = {depth!a}: allowed for images are {' and '.join(RESNETS)}")
    form, blocks = RESNETS[depth], sum(RESNETS[depth].blocks)
    width = width or form.width
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten below
        parts: list[nn.Module] = [Stem(channels, width, norm)]
        last = width
        for stage, count in enumerate(form.blocks):
            for place in range(count):
                stride = 2 if stage and not place else 1
                parts.append(Basic(last, last * stride, stride, norm))
                last *= stride
        network = nn.Sequential(*parts, Head(last, classes))
    _start(network, key, 1 / math.sqrt(blocks))
    return network.eval()


def _conv(channels: int, width: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)


def _norm(width: int, norm: Norm) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(width // math.gcd(width, TOGETHER), width)
    layer = FixedBatchNorm(width)
    return layer.requires_grad_(norm == "batch")


def _start(network: nn.Module, key: Key, branch: float) -> None:
    """He's Gaussian for convolutions, one over the root of the fan-in for the head, norms at 1 and 0.

    The last norm of each branch begins at ``branch``, so that where nothing normalises the variance grows
    by a factor of about e over all the blocks, and not by 2 a block.
    """
    for place, (name, parameter) in enumerate(network.named_parameters()):
        if parameter.ndim > 1:
            gain = 2.0 if parameter.ndim == 4 else 1.0
            drawn = gaussian(key.fold(place), 0, parameter.numel()).reshape(parameter.shape)
            spread = np.float32(math.sqrt(gain / parameter[0].numel()))
            parameter.data = torch.from_numpy(drawn * spread)
        elif name.endswith("weight"):
            parameter.data.fill_(branch if ".norm2." in name else 1.0)
        else:
            parameter.data.zero_()

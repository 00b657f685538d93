# SPDX-License-Identifier: Apache-2.0
"""The hash of what is not trained: a run goes on, and an adapter fits, only over the same weights."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_PIECE = 1 << 22
"""Numbers hashed at a time, so that weights on an accelerator are never copied whole."""


def frozen_sha256(module: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bits of every frozen parameter and saved buffer, in hexadecimal.

    Buffers that are computed and not saved are left out: their last bits are the platform's. The
    device has no say: the same weights have the same hash on each.
    """
    h = hashlib.sha256()
    for name, tensor in _frozen(module):
        h.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE):
            h.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return h.hexdigest()


def _frozen(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = module.state_dict(keep_vars=True).keys()
    yield from ((n, p) for n, p in module.named_parameters() if not p.requires_grad)
    yield from ((n, b) for n, b in module.named_buffers() if n in saved)

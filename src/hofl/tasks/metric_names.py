# SPDX-License-Identifier: Apache-2.0
"""What the metrics of a run are called, for those who only read what it wrote."""

from collections.abc import Mapping
from typing import Any

ACCURACY = "accuracy"
"""The metric of a row that names none."""
BESIDE: Mapping[str, tuple[str, str]] = {
    ACCURACY: ("balanced", "balanced_accuracy"),
    "f1": ("exact match", "exact_match"),
    "perplexity": ("loss", "loss"),
}
"""What is shown beside each metric: its heading, and its name in a row and in a summary."""
LOWER_IS_BETTER = frozenset({"perplexity"})
"""Metrics of which less is better."""


def metric_of(row: Mapping[str, Any]) -> str:
    """The metric that is the result, by the ``metrics`` of a row."""
    return str(row.get("metric", ACCURACY))


def beside(metric: str) -> tuple[str, str]:
    """What is shown beside a metric: (heading, name in a row)."""
    return BESIDE.get(metric, BESIDE[ACCURACY])

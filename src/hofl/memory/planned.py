# SPDX-License-Identifier: Apache-2.0
"""A plan that was written with ``hofl plan --json``, read again: what one participation needs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hofl.checks import TEXTS
from hofl.config import Config
from hofl.errors import ConfigError

_NEEDED = ("model", "blocks", "trainables", "batch", "rows")
_COLUMNS = ("order", "boundary", "estimator", "checkpointing", "peak_bytes")
_HOW = "write one with: hofl plan MODEL --json > plan.json"


def read_plan(path: Path) -> dict[str, Any]:
    """The plan in a file.

    Raises:
        ConfigError: it cannot be read, or is no plan.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror or error}; {_HOW}") from None
    except ValueError as error:
        raise ConfigError(f"--plan {path}: not JSON ({error}); {_HOW}") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    whole = isinstance(rows, list) and all(
        isinstance(row, dict) and {*_COLUMNS} <= row.keys() for row in rows
    )
    if not (whole and {*_NEEDED} <= found.keys()):
        raise ConfigError(f"--plan {path}: is no plan; {_HOW}")
    plan: dict[str, Any] = found
    return plan


def other_work(plan: dict[str, Any], config: Config) -> str:
    """What a plan is of and what a run has, in words, where they differ; else nothing."""
    length = plan.get("length") if config.task.name in TEXTS else None
    planned = (plan["batch"], length, plan.get("dtype", config.model.dtype))
    asked = (config.local.batch, length and config.task.length, config.model.dtype)
    if planned == asked:
        return ""
    said = [
        f"{batch}{f' x {tokens}' if tokens else ''} in {dtype}" for batch, tokens, dtype in (planned, asked)
    ]
    return (
        f"the plan is of batches of {said[0]}, the run has {said[1]}: plan that with hofl plan CONFIG --json"
    )


def peaks(plan: dict[str, Any], estimator: str | None, *, checkpointing: bool = False) -> dict[int, int]:
    """Bytes that one participation needs at each boundary, 0 being backpropagation through everything.

    Args:
        plan: of :func:`read_plan`.
        estimator: of the bottom; None for backpropagation alone.
        checkpointing: whether what is backpropagated is recomputed block by block.
    """
    return {
        int(row["boundary"]): int(row["peak_bytes"])
        for row in plan["rows"]
        if bool(row["checkpointing"]) == checkpointing
        and (row["order"] == "first_order" or (row["order"] == "hybrid" and row["estimator"] == estimator))
    }


def zeroth_order_peak(plan: dict[str, Any], estimator: str) -> int | None:
    """Bytes of a participation that probes the whole model, as DeComFL's; None where it is not planned."""
    rows = (row for row in plan["rows"] if row["order"] == "zeroth_order" and row["estimator"] == estimator)
    return next((int(row["peak_bytes"]) for row in rows), None)


def require_peaks(
    plan: dict[str, Any], cuts: Sequence[int], estimator: str | None, *, whole: bool, checkpointing: bool
) -> dict[int, int]:
    """Bytes at each of the boundaries that a run has.

    Args:
        plan: of :func:`read_plan`.
        cuts: the boundaries.
        estimator: that the run probes with; None if it does not.
        whole: whether the method probes the whole model, so that its boundary is none.
        checkpointing: of what is backpropagated.

    Raises:
        ConfigError: the plan has not got one of them.
    """
    known = peaks(plan, estimator, checkpointing=checkpointing)
    if whole:
        peak = zeroth_order_peak(plan, str(estimator))
        known = {} if peak is None else dict.fromkeys(cuts, peak)
    if missing := [cut for cut in cuts if cut not in known]:
        what = "zeroth order" if whole else f"boundary {missing[0]}"
        how = f" with {estimator}" if estimator else ""
        raise ConfigError(
            f"--plan: it has no row of {what}{how}{', checkpointed' * checkpointing}; "
            f"plan it with: hofl plan MODEL --json{f' --estimator {estimator}' if estimator else ''}"
        )
    return {cut: known[cut] for cut in cuts}

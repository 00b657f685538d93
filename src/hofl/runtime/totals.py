# SPDX-License-Identifier: Apache-2.0
"""What a run adds up to: kept in the checkpoint, so that a resumed run counts on."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hofl.errors import RecordError
from hofl.protocol.base import Outcome
from hofl.runtime.folder import Settings
from hofl.runtime.rows import Row, finite
from hofl.tasks.metric_names import ACCURACY, BESIDE, metric_of


@dataclass
class Totals:
    """Sums over the stored rounds.

    Attributes:
        examples: examples that clients took gradients or probes on.
        up: bytes from clients by category.
        down: bytes to clients by category.
        seconds: by phase.
        peak: the highest row's peak in bytes, None where unknown.
        client_peak: the largest client's peak in bytes over the rows that have one.
        failures: client failures, those of void attempts included.
        start_loss: of the evaluation before round 1, what later losses are held against.
        zero_shot: the metric before round 1.
        measured: the last evaluation, with its ``round``.
    """

    examples: int = 0
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak: int | None = None
    client_peak: int | None = None
    failures: int = 0
    start_loss: float | None = None
    zero_shot: float | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Any) -> "Totals":
        """The inverse of :meth:`to_values`.

        Raises:
            RecordError: a field is missing or unknown.
        """
        if not isinstance(values, dict) or values.keys() != {f.name for f in fields(cls)}:
            raise RecordError("checkpoint: its totals are not those of this hofl; start a new folder")
        return cls(**values)

    def add(self, row: Row) -> None:
        """Count a row in."""
        self.examples = row["examples_seen"]
        self.failures += len(row["failures"])
        for total, part in ((self.up, "bytes_up"), (self.down, "bytes_down"), (self.seconds, "seconds")):
            for name, amount in row[part].items():
                total[name] = total.get(name, 0) + amount
        if row["peak_bytes"] is not None:
            self.peak = max(self.peak or 0, row["peak_bytes"])
        if row["client_peak_bytes"] is not None:
            self.client_peak = max(self.client_peak or 0, row["client_peak_bytes"])
        if row["metrics"] is not None:
            self.measured = row["metrics"] | {"round": row["round"]}
        if row["round"] == 0:
            metrics = row["metrics"]
            self.zero_shot, self.start_loss = metrics[metric_of(metrics)], metrics["loss"]


def make_row(number: int, cohort: list[int], outcome: Outcome, seen: int, extra: Mapping[str, Any]) -> Row:
    """One object of ``rounds.jsonl``; numbers that are not finite become null.

    Args:
        number: the round.
        cohort: who was asked.
        outcome: its ``row`` gives ``boundaries, loss, examples, replay_ok, zo_signal`` and its own columns.
        seen: examples before this round.
        extra: bytes, seconds, metrics and the rest of the loop's columns.
    """
    own = dict(outcome.row)
    head = {
        "round": number,
        "cohort": cohort,
        "boundaries": own.pop("boundaries", []),
        "loss": own.pop("loss", None),
    }
    counts = {"examples_seen": seen + own.pop("examples", 0)}
    tail = {"replay_ok": own.pop("replay_ok", None), "zo_signal": own.pop("zo_signal", None)}
    row: Row = finite({**head, "metrics": None, **counts, **extra, **tail, **own})
    return row


def divergence(outcome: Outcome, start: float | None, factor: float, classes: int = 1) -> str | None:
    """Why a round counts as diverged by its loss, or None.

    The loss is held against ``start``, the evaluation before training and not the first round's
    loss: a learning rate far too high has blown that one up already. It is held against the loss
    of a guess among ``classes`` where that is more: a model may start with hardly any loss.
    """
    loss = outcome.row.get("loss")
    if loss is not None and not math.isfinite(loss):
        return f"its loss is {loss}"
    guess = math.log(classes)
    if loss is not None and start is not None and loss > factor * max(start, guess):
        held = f"the {start:.4g} before training" if start >= guess else f"the {guess:.4g} of a guess"
        return f"its loss {loss:.4g} is over {factor:g} times {held}"
    return None


def summary(
    settings: Settings, task: str, totals: Totals, round: int, sha: str, ending: Mapping[str, Any]
) -> Row:
    """``summary.json``.

    Args:
        settings: the run's.
        task: its name.
        totals: of all its rounds.
        round: the round of the final model.
        sha: of the final model.
        ending: ``status`` ("done", "diverged", "failed") and what goes with it. Unless it is
            done there is no metric: the last number of a lost run is not its result.
    """
    last = totals.measured
    done = ending["status"] == "done"
    metric = metric_of(last)
    own = ("balanced_accuracy", "loss") if metric == ACCURACY else ("loss", BESIDE[metric][1], "tokens")
    result = {name: last.get(name) if done else None for name in (metric, *own)}
    return {
        "algorithm": settings.algorithm,
        "model": settings.model,
        "task": task,
        "seed": settings.seed,
        "rounds": round,
        **ending,
        "metric": {"name": metric, "value": result[metric], "n": last.get("n", 0)},
        **{name: result[name] for name in own},
        "zero_shot": totals.zero_shot,
        "majority_class": last.get("majority_rate"),
        "examples_seen": totals.examples,
        "bytes_up": totals.up,
        "bytes_up_total": sum(totals.up.values()),
        "bytes_down": totals.down,
        "bytes_down_total": sum(totals.down.values()),
        "seconds": totals.seconds,
        "peak_bytes": totals.peak,
        "client_peak_bytes": totals.client_peak,
        "failures": totals.failures,
        "final_sha256": sha,
    }

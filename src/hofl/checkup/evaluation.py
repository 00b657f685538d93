# SPDX-License-Identifier: Apache-2.0
"""The zero-shot metric and what an evaluation takes: all of it where that is quick, else on a sample."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hofl.build_task import build_task
from hofl.config import Config
from hofl.errors import HoflError
from hofl.session import Session
from hofl.tasks.base import Task
from hofl.tasks.metric_names import metric_of

QUICK = 6.0
"""Seconds up to which an evaluation is run whole."""
SAMPLE = 16
"""Examples of a sample."""
LIMIT = 15.0
"""Seconds after which an evaluation is given up."""


class _Enough(Exception):
    """An evaluation has run for long enough."""


def evaluated(session: Session, quick: float = QUICK, limit: float = LIMIT) -> dict[str, Any]:
    """Evaluate the starting point.

    Args:
        session: of the run.
        quick: seconds up to which everything is evaluated; by the time of one batch.
        limit: seconds after which it is given up.

    Returns:
        ``n`` of the run's evaluations and ``one_example``, what one of them changes; ``metric``, ``value``,
        ``majority`` of all of them, ``sampled`` examples, and ``seconds`` of a whole evaluation, None each
        where it was not measured; ``why`` it was not, else empty.
    """
    n = int(session.task.facts["n_evaluation"])
    facts: dict[str, Any] = {"n": n, "one_example": 1 / max(1, n)}
    whole = n <= SAMPLE or forwards(session, n) <= quick
    task = session.task if whole else None
    found = _score(task, limit) if task else None
    if found is None and n > SAMPLE:
        try:
            task = build_task(sample_of(session.config))
        except HoflError as error:
            return facts | _nothing(f"a sample cannot be drawn: {error}")
        found = _score(task, limit)
    if found is None or task is None:
        return facts | _nothing(f"{min(n, SAMPLE)} examples take more than {limit:g} s")
    row, seconds = found
    metric = metric_of(row)
    sampled = int(row["n"])
    return {
        **facts,
        "metric": metric,
        "value": row.get(metric),
        "majority": (session.task.facts.get("majority_class") or {}).get("rate"),
        "sampled": sampled,
        "seconds": seconds * n / max(1, sampled),
        "why": "",
    }


def _nothing(why: str) -> dict[str, Any]:
    return dict.fromkeys(("metric", "value", "majority", "sampled", "seconds")) | {"why": why}


@torch.no_grad()
def forwards(session: Session, n: int) -> float:
    """Seconds that n forward passes would take in batches of an evaluation, from one of training rows."""
    task, size = session.seen, session.config.evaluation.batch
    client = max(session.able, key=lambda number: len(task.shards[number]))
    batch = task.batch(client, 0, min(size, n))
    begun = time.perf_counter()
    task.model.full(batch.inputs)
    return (time.perf_counter() - begun) * n / len(batch.targets)


def sample_of(config: Config) -> Config:
    """The run with few evaluation rows, and no more training rows than a task must have."""
    task: dict[str, Any] = {"evaluation_rows": SAMPLE}
    update: dict[str, Any] = {}
    if config.partition.kind not in ("files", "nodes"):
        task["train_rows"] = SAMPLE
        fields = {"kind": "iid", "clients": 1, "minimum": 1}
        update["partition"] = config.partition.model_copy(update=fields)
    return config.model_copy(update={**update, "task": config.task.model_copy(update=task)})


def _score(task: Task, limit: float) -> tuple[dict[str, Any], float] | None:
    """The row of an evaluation and its seconds; None where it takes longer than the limit."""
    begun = time.perf_counter()
    try:
        with _until(task, begun + limit):
            row = task.evaluate().to_row()
    except _Enough:
        return None
    return row, time.perf_counter() - begun


@contextmanager
def _until(task: Task, end: float) -> Iterator[None]:
    """Give up at the next pass of the model after ``end``, of ``time.perf_counter``."""

    def _look(*_: Any) -> None:
        if time.perf_counter() > end:
            raise _Enough

    handle = task.model.elements[0].register_forward_pre_hook(_look)
    try:
        yield
    finally:
        handle.remove()

# SPDX-License-Identifier: Apache-2.0
"""The session that a run would begin with, and the self-test of its model's cut."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hofl.algorithms import ALGORITHMS
from hofl.build import pooled
from hofl.build_task import build_task, with_sizes
from hofl.config import Config
from hofl.errors import ModelError
from hofl.models.selftest import halves, self_test
from hofl.session import LOCAL, Session, prepare
from hofl.tasks.base import Batch, Task

STAND_IN = 4
"""Batches that each client is taken to have where its data is elsewhere."""
_PROOF = 2
"""Examples of the batch on which the cut is tested."""


@dataclass(frozen=True)
class Begun:
    """What there is to look at.

    Attributes:
        session: of the run; None where the model's cut fails its test.
        task: as the method sees it.
        cuts: a row for each boundary tested: ``boundary`` (None: the test that every run makes), ``ok``, and
            ``why`` where it is not.
        assumed: what was taken for granted, in words.
    """

    session: Session | None
    task: Task
    cuts: list[dict[str, Any]]
    assumed: list[str]

    @property
    def good(self) -> bool:
        """Whether every test passed."""
        return all(row["ok"] for row in self.cuts)


def begin(config: Config) -> Begun:
    """Load data and model as ``hofl run`` does and test the cut at each boundary that somebody has.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    task, assumed = build_task(config), list[str]()
    if config.partition.kind == "nodes":
        task = with_sizes(task, [STAND_IN * config.local.batch] * len(task.clients))
        assumed.append("the training data is at the nodes: evaluation rows stand in for it, for every client")
    declared = None
    if config.cohort.assign == "declared":
        declared = _spread(task, ALGORITHMS[config.algorithm].split)
        named = ", ".join(map(str, sorted(set(declared))))
        assumed.append(f"nodes declare their boundaries when they join: taken to be {named}, a third each")
    seen = pooled(config, task)
    client = next(number for number, shard in enumerate(seen.shards) if len(shard))
    batch = seen.batch(client, 0, _PROOF)
    cuts = [_tested(None, partial(self_test, task.model, batch.inputs))]
    if not cuts[0]["ok"]:
        return Begun(None, seen, cuts, assumed)
    engine = LOCAL._replace(says=LOCAL.says + " (looked at, not run)")  # another one may lack the data
    session = prepare(config, engine, task, declared)
    cuts += [_tested(b, partial(cut_test, seen, batch, b)) for b in session.cuts if b]
    return Begun(session, session.seen, cuts, assumed + list(_first_rounds(session)))


def _first_rounds(session: Session) -> Iterator[str]:
    """Where later rounds are not like the first."""
    if len(session.segments) > 1:
        since = ", ".join(str(segment.first) for segment in session.segments[1:])
        yield f"budgets change from round {since} on: a round's cost is that of the first rounds"
    if session.config.cohort.schedule != "constant":
        yield "the preference moves over the rounds: a round's cost is that of the first rounds"


def _spread(task: Task, split: bool) -> list[int]:
    """Boundaries in the place of those that nodes would declare."""
    blocks = task.model.blocks
    cuts = [max(1, blocks // 2)] * 3 if split else [max(1, blocks * k // 4) for k in (1, 2, 3)]
    return [cuts[number % 3] for number in range(len(task.clients))]


def _tested(boundary: int | None, test: Callable[[], None]) -> dict[str, Any]:
    """A row of :class:`Begun`."""
    try:
        test()
    except ModelError as error:
        return {"boundary": boundary, "ok": False, "why": str(error)}
    return {"boundary": boundary, "ok": True, "why": ""}


def cut_test(task: Task, batch: Batch, boundary: int) -> None:
    """Bottom then top must equal the whole bit for bit, and the run's own loss must reach z and the top.

    Args:
        task: its model and its loss.
        batch: a small one.
        boundary: above 0.

    Raises:
        ModelError: says what differs.
    """
    model = task.model
    z, gap = halves(model, batch.inputs, boundary)
    if gap:
        raise ModelError(f"bottom then top differs from the whole by {gap:.3g}")
    model.first_order(batch.inputs, boundary, z, task.loss_on(batch))

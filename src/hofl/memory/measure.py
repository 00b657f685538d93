# SPDX-License-Identifier: Apache-2.0
"""One complete participation in a process of its own, and what it was seen to need.

``python -m hofl.memory.measure`` reads a request as JSON from standard input and answers with one line of it.
"""

import json
import sys
from typing import Any

from hofl.build import training_of
from hofl.config import Config, parse
from hofl.errors import HoflError, RunFailed
from hofl.runtime.local import local_call
from hofl.runtime.memory import peak_bytes, reset_peak
from hofl.runtime.meter import Meter
from hofl.session import Session, prepare

REFUSED = 2
"""Exit status where the configuration is at fault."""


def measured(config: Config, boundary: int) -> dict[str, Any]:
    """Run one participation of the client with the most data, all its local steps and its reply.

    Args:
        config: of a run in one process.
        boundary: that every client gets, where the method has one.

    Returns:
        ``tracked_bytes`` (the model and the storages alive at most, or the CUDA allocator's), ``rss_bytes``
        (the process's peak, None where it is not known), ``idle_bytes`` (its peak before), ``device``, and
        the largest ``batch`` and ``length`` (None without tokens) with whether rows were ``padded``, and
        ``scored`` as a :class:`~hofl.memory.subject.Workload` has it.

    Raises:
        RunFailed: the participation failed.
    """
    session = prepare(_at(config, boundary))
    client = max(session.able, key=lambda i: len(session.seen.shards[i]))
    model, meter = session.task.model, Meter()
    state = session.algorithm.init(model.read())
    idle = peak_bytes(model.device)
    reset_peak(model.device)
    meter.memory.on = True
    outcome = session.algorithm.round(
        state, [client], local_call(session.seen, session.algorithm.actions, meter)
    )
    peak = peak_bytes(model.device)
    if outcome.failures:
        raise RunFailed(f"the participation failed: {outcome.failures[client]}")
    found = {"tracked_bytes": meter.memory.largest(client), "rss_bytes": peak, "idle_bytes": idle}
    return {**found, "device": model.device.type, **_shape(session, client)}


def _at(config: Config, boundary: int) -> Config:
    """The run with every client at one boundary, one client a round and no quorum."""
    cohort = config.cohort.model_copy(update={"boundaries": (boundary,), "assign": "tiers", "size": 1})
    given = config.cohort.boundaries
    return config.model_copy(update={"cohort": cohort if given else config.cohort, "quorum": 1})


def _shape(session: Session, client: int) -> dict[str, Any]:
    """The batches that the participation saw."""
    config = session.config
    steps = training_of(config, session.seen).steps_of(client)
    seen = [session.seen.batch(client, step, config.local.batch) for step in range(steps)]
    batches = [batch.inputs for batch in seen]
    scored = max(batch.targets.shape[1] if batch.targets.ndim == 2 else 0 for batch in seen)
    masks = [b["attention_mask"] for b in batches if "attention_mask" in b]
    rows = max(len(next(iter(b.values()))) for b in batches)
    length = max((mask.shape[1] for mask in masks), default=None)
    padded = any(bool((mask == 0).any()) for mask in masks)
    return {"batch": rows, "length": length, "scored": scored, "padded": padded}


def main() -> int:
    """Answer one request; the exit status says whose fault a failure is."""
    asked = json.loads(sys.stdin.read())
    try:
        found = measured(parse(asked["config"], asked["name"]), asked["boundary"])
    except (HoflError, RunFailed) as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED if isinstance(error, HoflError) else 1
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What a measured schedule of the preference sees of a round.

Sums are kept in the state and made of plans and deltas alone, taken in client order. So a resumed run goes
on with the same numbers, a replay finds them in the ledger, and the order of arrival does not matter.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.protocol import aggregate
from hofl.protocol.base import Entry, Vector
from hofl.theory.schedules import Measured, Observation, Participation

Preferred = Callable[[int, int], bool]
"""``(t, i)`` -> whether the policy of round t, counted from 0, prefers client i."""
MEASURED = "measured"
"""The value of a state that has the sums; a run whose schedule measures nothing has none."""


def initial_state(training: aggregate.Training, measuring: bool, vector: Vector) -> Record:
    """Round 0, see :func:`hofl.protocol.aggregate.initial_state`; ``measuring`` adds the sums of nothing."""
    state = aggregate.initial_state(training, vector)
    return _with(state, Measured()) if measuring else state


def measured_in(state: Record | None) -> Measured:
    """The sums in a state; those of nothing where it has none."""
    values = state.values.get(MEASURED) if state else None
    return Measured.from_values(values) if values else Measured()


def _with(state: Record, measured: Measured) -> Record:
    return Record(state.arrays, {**state.values, MEASURED: measured.to_values()})


def advance(layout: Layout, state: Record, parts: Iterable[tuple[Entry, Vector]]) -> Record:
    """The next state, see :func:`hofl.protocol.aggregate.advance`; what the state measures goes on.

    Args:
        layout: gives the bottom of a boundary.
        state: the current one.
        parts: accepted entries with their deltas float32 [d], in client order; consumed one by one.
    """
    if MEASURED not in state.values:
        return aggregate.advance(state, parts)
    seen = Observation()

    def watched() -> Iterator[tuple[Entry, Vector]]:
        """The same parts, each seen as it passes."""
        for entry, delta in parts:
            seen.add(_participation(layout, entry.plan.values, delta))
            yield entry, delta

    moved = aggregate.advance(state, watched())
    return _with(moved, seen.after(measured_in(state)))


def _participation(layout: Layout, plan: dict[str, Any], delta: Vector) -> Participation:
    probes = plan["probes"]
    return Participation(
        preferred=plan["preferred"],
        bottom=layout.bottom_size(plan["boundary"]) if probes else 0,
        probes=probes,
        steps=plan["steps"],
        update=delta,
        family=plan["directions"],
    )

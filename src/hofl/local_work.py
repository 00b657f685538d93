# SPDX-License-Identifier: Apache-2.0
"""Local steps that the clients of a session take, and what a participation of so many moves."""

from dataclasses import replace
from typing import TYPE_CHECKING

from hofl.build import steps_of, training_of
from hofl.theory.traffic import Sizes

if TYPE_CHECKING:
    from hofl.session import Session


def steps_taken(session: "Session") -> list[int]:
    """Of each client that can be drawn, in the order of ``session.able``."""
    if session.config.local.epochs is None:
        return [steps_of(session.config)] * len(session.able)
    training = training_of(session.config, session.seen)
    return [training.steps_of(client) for client in session.able]


def steps_at(session: "Session", boundary: int) -> list[int]:
    """Ascending, of the clients that have a boundary in some segment; one number where all are alike."""
    if session.config.local.epochs is None:
        return [steps_of(session.config)]
    training = training_of(session.config, session.seen)
    held = {c for s in session.segments for c in s.able if s.boundaries[c] == boundary}
    return sorted(training.steps_of(client) for client in held) or [1]  # of nobody who has data


def sizes_at(session: "Session", boundary: int, steps: int | None = None) -> Sizes:
    """What a participation of so many steps moves, unset: of the client there that takes the most."""
    return replace(session.sizes[boundary], steps=steps or steps_at(session, boundary)[-1])

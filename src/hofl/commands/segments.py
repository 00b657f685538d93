# SPDX-License-Identifier: Apache-2.0
"""Which rounds of a run a command speaks of, where budgets change and boundaries follow."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hofl.commands.output import say
from hofl.errors import ConfigError

if TYPE_CHECKING:
    from hofl.session import Session

HELP = "Speak of the segment that has this round, where budgets change."


@dataclass(frozen=True)
class Span:
    """A segment of a run.

    Attributes:
        segment: its number, from 1.
        segments: of how many that the run reaches.
        first_round, last_round: of it.
    """

    segment: int
    segments: int
    first_round: int
    last_round: int

    @property
    def rounds(self) -> int:
        """How many it has."""
        return self.last_round - self.first_round + 1

    def to_json(self) -> dict[str, int]:
        """As JSON values."""
        return asdict(self)


def spans(session: "Session") -> list[Span]:
    """The segments of a run in order; changes after its last round are none of it."""
    rounds = session.config.rounds
    firsts = [segment.first for segment in session.segments if segment.first <= max(1, rounds)]
    ends = [*(first - 1 for first in firsts[1:]), rounds]
    pairs = enumerate(zip(firsts, ends, strict=True), start=1)
    return [Span(number, len(firsts), first, end) for number, (first, end) in pairs]


def alone(session: "Session", round_number: int) -> "tuple[Session, Span]":
    """The session as if the segment of a round were the whole run, and that segment.

    Raises:
        ConfigError: the run has no such round.
    """
    rounds = session.config.rounds
    if not 1 <= round_number <= max(1, rounds):
        raise ConfigError(f"--round {round_number}: must be in 1..{rounds}, the rounds of this configuration")
    span = next(span for span in reversed(spans(session)) if span.first_round <= round_number)
    return session.alone(round_number), span


def say_segment(found: dict[str, Any]) -> None:
    """A line where a run has several segments; ``found`` has what :meth:`Span.to_json` gives."""
    if found["segments"] > 1:
        say(
            f"segment {found['segment']} of {found['segments']}: rounds {found['first_round']} to "
            f"{found['last_round']}; others have other boundaries, see --round"
        )

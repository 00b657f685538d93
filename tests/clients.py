# SPDX-License-Identifier: Apache-2.0
"""In-process clients whose memory a test can look into."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.protocol.base import Action, Algorithm, Memory, Outcome, Replies
from hofl.tasks.base import Task


class Clients:
    """A call as the in-process runtime's: messages cross as bytes, each client has a memory.

    Attributes:
        memories: by client number.
        asked: every (action, client, request) so far, as the client read it.
    """

    def __init__(self, task: Task, actions: Mapping[str, Action]) -> None:
        self.task, self.actions = task, actions
        self.memories: defaultdict[int, Memory] = defaultdict(Memory)
        self.asked: list[tuple[str, int, Record]] = []

    def __call__(self, action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = Replies({}, {})
        for client in sorted(requests):
            request = Record.from_bytes(requests[client].to_bytes())
            self.asked.append((action, client, request))
            try:
                reply = self.actions[action](self.task, request, self.memories[client])
            except (ClientError, RecordError) as error:
                replies.failures[client] = str(error)
                continue
            replies.records[client] = Record.from_bytes(reply.to_bytes())
        return replies

    def requests(self, client: int) -> list[Record]:
        """What this client was sent, in order."""
        return [request for _, asked, request in self.asked if asked == client]


def play(
    algorithm: Algorithm, state: Record, call: Clients, cohorts: Sequence[Sequence[int]]
) -> Iterator[Outcome]:
    """One round a cohort."""
    for cohort in cohorts:
        outcome = algorithm.round(state, cohort, call)
        yield outcome
        state = outcome.state


def last(algorithm: Algorithm, state: Record, call: Clients, cohorts: Sequence[Sequence[int]]) -> Record:
    """The state after these rounds, each without a failure."""
    for outcome in play(algorithm, state, call, cohorts):
        assert not outcome.failures
        state = outcome.state
    return state

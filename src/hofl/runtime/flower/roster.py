# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a run: what each client said when it joined, kept in the run folder as ``fleet.json``.

A client is who its key says it is; its data is the same as when it first joined, or it is not let in again.
Numbers come from our own client ids: Flower's node ids change when a node without a key starts anew.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hofl.config import Config
from hofl.errors import ConfigError, RecordError
from hofl.runtime import files
from hofl.runtime.flower.join import Joined, Prints, numbered, require_same
from hofl.runtime.flower.wire import Envelope
from hofl.tasks.base import Task

FLEET = "fleet.json"
"""In the run folder: what is known of each client."""


def capped(sizes: Sequence[int]) -> list[int]:
    """Sizes of which none weighs more than ``1 / sqrt(n)`` of all: nobody captures a mean by what it says.

    >>> capped([100, 100, 100, 10**12])
    [100, 100, 100, 300]
    """
    total, share = sum(sizes), 1.0 / math.sqrt(max(1, len(sizes)))
    most = max(sizes, default=0)
    if len(sizes) < 2 or most <= share * total:
        return list(sizes)
    room = int(share / (1.0 - share) * (total - most))
    return [min(size, max(1, room)) for size in sizes]


@dataclass
class Roster:
    """The clients of a run.

    Attributes:
        config: the run's.
        task: the server's.
        prints: what every client must have the same.
        keys: public key of each client that has one; empty where nodes need none.
        joined: by client number, what it said when it first joined.
        dealt: examples of each client as the run counts them, fixed when it begins.
        where: the run folder, once it exists.
    """

    config: Config
    task: Task
    prints: Prints
    keys: Mapping[str, bytes]
    joined: dict[int, Joined] = field(default_factory=dict)
    dealt: list[int] = field(default_factory=list)
    where: Path | None = None

    def owner(self, public: bytes) -> str | None:
        """The client that a key was made for, "" if for none; None where nodes need no keys."""
        if not self.keys:
            return None
        return next((client for client, key in self.keys.items() if key == public), "")

    def accept(self, public: bytes, envelope: Envelope) -> int:
        """A node's answer to the invitation -> the client's number.

        Args:
            public: the key with which Flower knows the node; empty where it has none.
            envelope: the answer.

        Raises:
            RecordError: why it is not let in.
        """
        said = Joined.of(envelope.record(limit=1 << 16))
        number = numbered(self.task.clients, said.client)
        if self.keys and self.keys.get(said.client) != public:
            raise RecordError(f"{said.client}: its key is not the one that was made for this client")
        try:
            require_same(self.prints, said.prints, said.client)
        except RecordError as error:
            raise RecordError(f"{said.client}: {str(error).removeprefix('refused: ')}") from None
        self._require_known(number, said)
        if number not in self.joined:
            self.joined[number] = said
            self.save()
        return number

    def _require_known(self, number: int, said: Joined) -> None:
        """Hold a client to what it said before, and to the data that the run's configuration deals it."""
        before, dealt = self.joined.get(number), len(self.task.shards[number])
        if before is not None:
            for name in ("examples", "data", "boundary", "memory"):
                was, now = getattr(before, name), getattr(said, name)
                if was != now:
                    raise RecordError(f"{said.client}: its {name} is {now}, it was {was} when this run began")
        elif self.config.cohort.assign == "declared" and said.boundary < 0 and not said.memory:
            raise RecordError(
                f"{said.client}: declares neither boundary nor memory; set one in [device] of its node file"
            )
        elif self.config.partition.kind != "nodes" and said.examples != dealt:
            raise RecordError(f"{said.client}: has {said.examples} examples, this run deals it {dealt}")

    def sizes(self) -> list[int]:
        """Examples of each client; 1 for one that joins later, where nothing follows from its number.

        Raises:
            ConfigError: it is needed: the mean is weighted by examples, or local steps follow from them.
        """
        if self.dealt:
            return self.dealt
        absent = [name for i, name in enumerate(self.task.clients) if i not in self.joined]
        weighted, paced = self.config.cohort.weighting == "examples", self.config.local.epochs is not None
        if absent and (weighted or paced):
            setting = "local.epochs" if paced else "cohort.weighting = 'examples'"
            raise ConfigError(
                f"{setting} needs every client's size and {absent[0]} has not joined: "
                "start it, or set fleet.minimum = 0"
            )
        told = [self.joined[i].examples if i in self.joined else 1 for i in range(len(self.task.clients))]
        return capped(told) if self.config.cohort.weighting == "examples" else told

    def declared(self) -> Sequence[int] | None:
        """The boundary that each client declared, -1 where its memory decides; None if the run does not ask.

        Raises:
            ConfigError: a client declares neither, or has not joined.
        """
        if self.config.cohort.assign != "declared":
            return None
        told = [self.joined[i].boundary if i in self.joined else -1 for i in range(len(self.task.clients))]
        silent = [
            i for i, (b, m) in enumerate(zip(told, self.memory() or (), strict=True)) if b < 0 and not m
        ]
        if silent:
            raise ConfigError(
                f"cohort.assign = 'declared', but {self.task.clients[silent[0]]} declares neither a boundary "
                "nor memory, or has not joined: set one in [device] of its node file"
            )
        return told

    def memory(self) -> Sequence[int] | None:
        """Bytes that each client may use, 0 for no limit; None where the run does not ask."""
        if self.config.cohort.assign != "declared":
            return None
        return [self.joined[i].memory if i in self.joined else 0 for i in range(len(self.task.clients))]

    def begin(self, where: Path) -> None:
        """The run folder is there: from now on what is known is stored in it."""
        if self.config.partition.kind == "nodes":
            self.dealt = self.sizes()
        self.where = where
        self.save()

    def save(self) -> None:
        """Store what is known, once there is a run folder."""
        if self.where is not None:
            known = {self.task.clients[i]: asdict(joined) for i, joined in sorted(self.joined.items())}
            data = json.dumps({"examples": self.dealt, "clients": known}, indent=2)
            files.replace(self.where / FLEET, data.encode() + b"\n")

    def load(self, where: Path) -> None:
        """Take up what an earlier process of the same run stored.

        Raises:
            RecordError: the file is damaged.
        """
        path = where / FLEET
        if not path.is_file() or path.is_symlink():
            return
        try:
            stored: dict[str, Any] = json.loads(path.read_bytes())
            self.dealt = [int(size) for size in stored["examples"]]
            numbers = {name: self.task.clients.index(name) for name in stored["clients"]}
            self.joined = {numbers[name]: Joined(**said) for name, said in stored["clients"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError(
                f"{path}: damaged ({error}); give the file back, or start a new folder"
            ) from None

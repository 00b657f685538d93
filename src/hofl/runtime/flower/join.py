# SPDX-License-Identifier: Apache-2.0
"""What server and client tell each other before the first round, and what each refuses.

Both must count the same trainables, draw the same directions and compute with the same frozen weights, or a
replay of a client's scalars means nothing. A client says how many examples it has and what it can afford;
its data is named by a hash that only it can make again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import numpy as np

from hofl.core.directions import RNG_ID, Directions, Family
from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol.base import shown
from hofl.runtime import prints
from hofl.tasks.base import Task
from hofl.tasks.files import CLIENT_ID

Prints = Mapping[str, str]
"""SHA-256 of what both ends of a run must have the same: ``layout``, ``model``, ``directions``."""

_WHAT: dict[str, str] = {
    "layout": "layout: other trainables, or in another order",
    "model": "frozen weights: another model, version or precision",
    "directions": "direction stream: another version of hofl, or a broken one",
}


def direction_print() -> str:
    """SHA-256 of the first numbers of every family of directions: equal wherever a replay is."""
    h = hashlib.sha256(RNG_ID.encode())
    for family in get_args(Family):
        directions = Directions(Key.of(0, "init", 4), family, 2, 1000)
        h.update(np.concatenate([directions.block(j, 0, 1000) for j in range(2)]).astype("<f4").tobytes())
    return h.hexdigest()


def prints_of(task: Task) -> dict[str, str]:
    """What both ends of a run must have the same."""
    found = prints.fingerprints(task)
    return {"layout": found["layout"], "model": found["model"], "directions": direction_print()}


@dataclass(frozen=True)
class Invitation:
    """What the server tells a client of the run.

    Attributes:
        run: the run's id.
        config: the resolved configuration as TOML.
        clients: the ids of all clients; a client's number is its place.
        labels: names of the classes.
        images: of a task on images, what the server fixed from its own: shape, mean and deviation.
        prints: :func:`prints_of` the server's task.
    """

    run: str
    config: str
    clients: tuple[str, ...]
    labels: tuple[str, ...]
    images: Mapping[str, Any]
    prints: Prints

    def record(self) -> Record:
        """As it travels."""
        return Record({}, asdict(self))

    @classmethod
    def of(cls, record: Record) -> "Invitation":
        """From a message.

        Raises:
            RecordError: it is no invitation.
        """
        v = record.values
        listed = all(
            isinstance(v.get(n), list) and all(isinstance(x, str) for x in v[n])
            for n in ("clients", "labels")
        )
        texts = all(isinstance(v.get(n), str) for n in ("run", "config"))
        if not (listed and texts and all(isinstance(v.get(n), dict) for n in ("images", "prints"))):
            raise RecordError("an invitation lacks its run, config, clients, labels, images or prints")
        return cls(v["run"], v["config"], tuple(v["clients"]), tuple(v["labels"]), v["images"], v["prints"])


@dataclass(frozen=True)
class Joined:
    """What a client says of itself.

    Attributes:
        client: its id.
        examples: in its shard.
        boundary: order boundary it declares, the fewest blocks that it must train by probes; -1 for any.
        memory: bytes it may use; 0 for no limit.
        resident: whether its process stays between two messages.
        data: hash of its shard, salted with a number that only this client has.
        prints: :func:`prints_of` its task.
    """

    client: str
    examples: int
    boundary: int
    memory: int
    resident: bool
    data: str
    prints: Prints

    def record(self) -> Record:
        """As it travels."""
        return Record({}, asdict(self))

    @classmethod
    def of(cls, record: Record) -> "Joined":
        """From a message, its types and ranges checked.

        Raises:
            RecordError: a value is missing or impossible.
        """
        values: dict[str, Any] = {field.name: record.values.get(field.name) for field in fields(cls)}
        kinds = (str, int, int, int, bool, str, dict)
        for (name, value), kind in zip(values.items(), kinds, strict=True):
            if type(value) is not kind:
                raise RecordError(f"a client says {name} = {shown(value)} when it joins")
        joined = cls(**values)
        sound = CLIENT_ID.fullmatch(joined.client) and len(joined.data) <= 64
        if not sound or not 0 <= joined.examples < 1 << 48 or joined.boundary < -1 or joined.memory < 0:
            raise RecordError(f"a client that calls itself {shown(joined.client)} says the impossible")
        return joined


def require_same(mine: Prints, theirs: Mapping[str, Any], whose: str) -> None:
    """Refuse to work with another model or other directions.

    Args:
        mine: :func:`prints_of` the task here.
        theirs: of the other end.
        whose: the other end, in words.

    Raises:
        RecordError: names the first that differs and both of its hashes' first digits.
    """
    for name, value in mine.items():
        found = theirs.get(name)
        if found != value:
            raise RecordError(
                f"refused: not the same is the {_WHAT[name]} (here {value[:12]}, {whose} {shown(found)[:12]})"
            )


def shard_print(task: Task, number: int, salt: bytes) -> str:
    """The hash that names a client's data: stable for it, and no help to who wants to confirm a guess.

    Args:
        task: the client's.
        number: its own.
        salt: a secret that it keeps.
    """
    h = hashlib.blake2b(key=salt[:64], digest_size=16)
    h.update(np.ascontiguousarray(task.shards[number]).tobytes())
    contents = task.facts.get("data_sha256")
    h.update(str(contents.get("train") if isinstance(contents, Mapping) else contents).encode())
    return h.hexdigest()


def numbered(clients: Sequence[str], client: str) -> int:
    """A client's number in a run.

    Raises:
        RecordError: the run does not list it.
    """
    if client not in clients:
        known = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
        raise RecordError(f"refused: this run has no client '{shown(client)}'; it has {known}")
    return clients.index(client)

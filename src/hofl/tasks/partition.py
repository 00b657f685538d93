# SPDX-License-Identifier: Apache-2.0
"""Who holds which example: pure functions of labels and a seed, the same on every machine.

Each returns one int64 array of example numbers per client. Only :func:`fixed_dirichlet` may hold an
example more than once, and only :func:`files` may leave a client empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError

Shards = list[NDArray[np.int64]]
Labels = NDArray[np.int64]

TRIES = 20
"""Draws of the Dirichlet law before the smallest clients are topped up instead."""


@dataclass(frozen=True)
class Partition:
    """The ``[partition]`` of a config; a kind ignores the settings it has no use for.

    Attributes:
        kind: one of ``KINDS``; ``files`` takes its clients from the files, see :func:`files`, and ``nodes``
            have their own data, see :mod:`hofl.tasks.nodes`.
        clients: N.
        alpha, minimum: of :func:`dirichlet`; alpha of :func:`fixed_dirichlet` too.
        size: examples a client, of :func:`fixed_dirichlet`.
        labels_per_client: of :func:`by_label`.
        names: of ``nodes``, the clients' ids.
    """

    kind: str = "iid"
    clients: int = 30
    alpha: float = 0.5
    minimum: int = 1
    size: int = 4000
    labels_per_client: int = 2
    names: tuple[str, ...] = ()

    def divide(self, labels: Labels, *, seed: int) -> Shards:
        """The shards for labels int64 [n].

        Raises:
            ConfigError: an unknown kind, ``files`` (needs files, not labels), or as the kind raises.
        """
        found = KINDS.get(self.kind)
        if found is None or found.divide is None:
            others = ", ".join(name for name, kind in KINDS.items() if kind.divide)
            raise ConfigError(
                f"partition.kind = {self.kind!a}: allowed are {others}, "
                "and files for a task whose train setting is a glob"
            )
        return found.divide(self, labels, seed)


def iid(labels: Labels, clients: int, *, seed: int) -> Shards:
    """Random shards whose sizes differ by at most one."""
    order = _key(seed, 0).permutation(len(labels))
    return check(_sorted(np.array_split(order, _positive("clients", clients))), len(labels))


def dirichlet(labels: Labels, clients: int, alpha: float, minimum: int = 1, *, seed: int) -> Shards:
    """Each class is dealt to the clients in proportions drawn from Dirichlet(alpha), every example once.

    The law is drawn up to ``TRIES`` times until every client has ``minimum`` examples; failing that, the
    last draw is repaired: the largest clients hand examples of their commonest class to the poorest.

    Raises:
        ConfigError: ``clients * minimum`` exceeds the examples, or alpha is not a positive number.
    """
    _positive("clients", clients)
    _positive("minimum", minimum)
    _check_alpha(alpha)
    if clients * minimum > len(labels):
        most = len(labels) // clients
        lower = f"lower minimum to {most} or " if most else ""
        raise ConfigError(
            f"partition.minimum = {minimum} for {clients} clients needs {clients * minimum} examples and "
            f"there are {len(labels)}: {lower}use fewer clients"
        )
    pools = _pools(labels, _key(seed, 1))
    law = _key(seed, 2).generator()
    for _ in range(TRIES):
        shares = law.dirichlet(np.full(clients, alpha), len(pools))  # [classes, clients]
        counts = np.stack([_round(share, len(pool)) for share, pool in zip(shares, pools, strict=True)], 1)
        if counts.sum(1).min() >= minimum:
            break
    return check(_deal(pools, _repaired(counts, minimum)), len(labels))


def by_label(labels: Labels, clients: int, labels_per_client: int, *, seed: int) -> Shards:
    """Each client holds exactly ``labels_per_client`` classes; a class is shared equally by its holders.

    Raises:
        ConfigError: more classes a client than there are, or a class that nobody would hold.
    """
    pools = _pools(labels, _key(seed, 3))
    classes = len(pools)
    _positive("clients", clients)
    if not 1 <= labels_per_client <= classes or clients * labels_per_client < classes:
        raise ConfigError(
            f"partition.labels_per_client = {labels_per_client} for {clients} clients and {classes} classes: "
            f"allowed is {-(-classes // clients)} to {classes}, so that each class has a holder"
        )
    seats = _key(seed, 4).permutation(clients)
    order = _key(seed, 5).permutation(classes)
    held = order[(np.arange(clients)[:, None] * labels_per_client + np.arange(labels_per_client)) % classes]
    counts = np.zeros((clients, classes), dtype=np.int64)
    for label, pool in enumerate(pools):
        holders = np.flatnonzero((held == label).any(1))
        counts[seats[holders], label] = [len(part) for part in np.array_split(pool, len(holders))]
    return check(_deal(pools, counts), len(labels))


def fixed_dirichlet(labels: Labels, clients: int, size: int, alpha: float, *, seed: int) -> Shards:
    """Exactly ``size`` examples a client, class proportions drawn per client from Dirichlet(alpha).

    Clients draw in a seeded order, without replacement, from class pools; an empty pool is refilled by
    drawing the whole class with replacement, so examples may repeat within and across clients. Counts
    are proportions rounded by largest remainder.
    """
    _positive("clients", clients)
    _positive("size", size)
    _check_alpha(alpha)
    pools = _pools(labels, _key(seed, 6))
    classes = [pool.copy() for pool in pools]
    shares = _key(seed, 7).generator().dirichlet(np.full(len(pools), alpha), clients)
    shards: Shards = [np.empty(0, dtype=np.int64)] * clients
    for client in _key(seed, 8).permutation(clients):
        parts = []
        for label, count in enumerate(_round(shares[client], size)):
            refill = _key(seed, 9, int(client), label)
            taken, pools[label] = _take(pools[label], classes[label], int(count), refill)
            parts.append(taken)
        shards[client] = np.sort(np.concatenate(parts))
    return check(shards, len(labels), repeats=True)


def files(sizes: Sequence[int]) -> Shards:
    """One client a file, in the order its rows were joined; an empty file is an idle client."""
    ends = np.cumsum(sizes, dtype=np.int64)
    shards = [np.arange(end - size, end, dtype=np.int64) for end, size in zip(ends, sizes, strict=True)]
    return check(shards, int(sum(sizes)), idle=True)


class Kind(NamedTuple):
    """A way to divide: what it does, in words, and its function; None where files decide, not labels."""

    says: str
    divide: Callable[[Partition, Labels, int], Shards] | None


UNLABELLED = ("iid", "files", "nodes")  # kinds that need no classes

KINDS: dict[str, Kind] = {
    "iid": Kind("random shards of equal size", lambda p, y, seed: iid(y, p.clients, seed=seed)),
    "dirichlet": Kind(
        "each class split by Dirichlet(alpha), at least minimum examples a client",
        lambda p, y, seed: dirichlet(y, p.clients, p.alpha, p.minimum, seed=seed),
    ),
    "by_label": Kind(
        "labels_per_client classes a client",
        lambda p, y, seed: by_label(y, p.clients, p.labels_per_client, seed=seed),
    ),
    "fixed_dirichlet": Kind(
        "size examples a client, class shares by Dirichlet(alpha)",
        lambda p, y, seed: fixed_dirichlet(y, p.clients, p.size, p.alpha, seed=seed),
    ),
    "files": Kind("one client a file of the glob in task.train", None),
    "nodes": Kind("each node of partition.names reads its own data, the server none: hofl server", None),
}
"""What ``partition.kind`` can be."""


def check(shards: Shards, n: int, *, repeats: bool = False, idle: bool = False) -> Shards:
    """The shards as given, once they are sound: in range, each example once, nobody empty.

    Args:
        shards: example numbers per client.
        n: how many examples there are; without ``repeats`` all of them must be held.
        repeats: an example may be held more than once, or by nobody.
        idle: a client may be empty.

    Raises:
        ConfigError: names the first client or the number of examples at fault.
    """
    empty = [client for client, shard in enumerate(shards) if not len(shard)]
    if empty and not idle:
        raise ConfigError(
            f"partition.clients = {len(shards)}: client {empty[0]} would hold no example ({len(empty)} such, "
            f"{n} examples): use fewer clients or more data"
        )
    held = np.concatenate(shards) if shards else np.empty(0, dtype=np.int64)
    if len(held) and not 0 <= held.min() <= held.max() < n:
        raise ConfigError(f"partition: example number {held.min()} or {held.max()} is outside 0..{n - 1}")
    times = np.bincount(held, minlength=n)
    if not repeats and (times != 1).any():
        raise ConfigError(
            f"partition: {(times > 1).sum()} examples are held twice and {(times == 0).sum()} by nobody: "
            "each must be held once"
        )
    return shards


def table(
    shards: Shards, labels: Labels, names: Sequence[str], clients: Sequence[str]
) -> list[dict[str, Any]]:
    """One row a client for the report: client, examples, count by class name, duplicates.

    ``duplicates`` counts the examples of this client that are held more than once, by it or by others.
    """
    times = np.bincount(np.concatenate(shards), minlength=len(labels))
    rows = []
    for client, shard in zip(clients, shards, strict=True):
        counts = np.bincount(labels[shard], minlength=len(names)).tolist()
        rows.append(
            {
                "client": client,
                "examples": len(shard),
                "classes": dict(zip(names, counts, strict=True)),
                "duplicates": int((times[shard] > 1).sum()),
            }
        )
    return rows


def _key(seed: int, *coordinates: int) -> Key:
    return Key.of(seed, "partition", *coordinates)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"partition.{name} = {value}: allowed is a whole number of 1 or more")
    return value


def _check_alpha(alpha: float) -> None:
    if not 1e-6 <= alpha <= 1e6:  # outside, NumPy's law degenerates; NaN fails the comparison too
        raise ConfigError(f"partition.alpha = {alpha}: allowed is 1e-6 to 1e6, small for unequal clients")


def _sorted(parts: Sequence[NDArray[np.int64]]) -> Shards:
    return [np.sort(part) for part in parts]


def _pools(labels: Labels, key: Key) -> Shards:
    """The example numbers of each class that occurs, in a seeded order."""
    if not len(labels):
        raise ConfigError("partition: there are no examples to divide")
    order = key.permutation(len(labels))
    return [order[labels[order] == label] for label in np.unique(labels)]


def _round(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers near ``shares * total`` that sum to total: largest remainder, ties to the lowest."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: total - counts.sum()]] += 1
    return counts


def _repaired(counts: NDArray[np.int64], minimum: int) -> NDArray[np.int64]:
    """Counts [clients, classes] with every row sum at least ``minimum``, column sums unchanged."""
    counts = counts.copy()
    sizes = counts.sum(1)
    while sizes.min() < minimum:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        label = int(counts[rich].argmax())
        moved = min(minimum - sizes[poor], sizes[rich] - minimum, counts[rich, label])
        counts[rich, label] -= moved
        counts[poor, label] += moved
        sizes[rich] -= moved
        sizes[poor] += moved
    return counts


def _deal(pools: Shards, counts: NDArray[np.int64]) -> Shards:
    """Hand out each class pool by the counts [clients, classes]."""
    parts = [np.split(pool, np.cumsum(counts[:, label])[:-1]) for label, pool in enumerate(pools)]
    return _sorted([np.concatenate(shares) for shares in zip(*parts, strict=True)])


def _take(
    pool: NDArray[np.int64], everyone: NDArray[np.int64], count: int, key: Key
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first ``count`` of a pool and what is left, refilled from the whole class as often as needed."""
    refills = 0
    while len(pool) < count:
        drawn = (key.fold(refills).uniforms(len(everyone)) * len(everyone)).astype(np.int64)
        pool = np.concatenate([pool, everyone[drawn]])
        refills += 1
    return pool[:count], pool[count:]

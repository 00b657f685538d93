# SPDX-License-Identifier: Apache-2.0
"""The rows that a task's settings name, with messages that begin with the setting at fault."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.tasks import files, partition
from hofl.tasks.files import Source, Table


@contextmanager
def about(setting: str, fields: Sequence[str] = (), label: str = "") -> Iterator[None]:
    """Begin what is said of a source, or of a column that it lacks, with the setting that names it.

    Raises:
        DataError, ConfigError: the one raised inside.
    """
    try:
        yield
    except files.MissingColumn as error:
        named = "task.text" if error.column in fields else "task.label" if error.column == label else setting
        raise DataError(f"{named}: {error}") from None
    except (DataError, ConfigError) as error:
        raise type(error)(f"{setting}: {error}") from None


def training(
    source: Source, fields: Sequence[str], label: str, divided: partition.Partition
) -> tuple[Table, list[int], tuple[str, ...]]:
    """All training rows, how many of them each file has, and the client ids if the files are the clients."""
    columns = [*fields, label]
    with about("task.train", fields, label):
        if divided.kind != "files":
            table = files.read_table(source, columns, fields)
            return table, [files.count(table)], ()
        tables = files.client_tables(source, columns, fields)
    joined = {name: [cell for table in tables.values() for cell in table[name]] for name in columns}
    return joined, [files.count(table) for table in tables.values()], tuple(tables)


def held_out(source: Source, fields: Sequence[str], label: str, seed: int, rows: int) -> Table:
    """The rows to score on; ``rows`` of them, drawn by the seed, or all for 0."""
    with about("task.evaluation", fields, label):
        table = files.read_table(source, [*fields, label], fields)
    key = Key.of(seed, "evaluation", 0)
    return files.taken(table, files.drawn(files.count(table), rows, key, "task.evaluation_rows"))


def dealt(
    divided: partition.Partition,
    labels: NDArray[np.int64],
    rows: Sequence[int],
    sizes: Sequence[int],
    clients: tuple[str, ...],
    seed: int,
) -> tuple[tuple[str, ...], partition.Shards]:
    """Client ids and shards of the rows that are used: of files where these are the clients, else by kind.

    Args:
        divided: how.
        labels: classes of the rows, int64 [rows].
        rows: their numbers, ascending, among all that were read.
        sizes: how many were read of each file.
        clients: ids of the files; none where the files are not the clients.
        seed: of the run.

    Raises:
        ConfigError: as the kind of partition raises.
    """
    if clients:
        owners = np.repeat(np.arange(len(sizes)), sizes)[list(rows)]
        return clients, partition.files(np.bincount(owners, minlength=len(sizes)).tolist())
    shards = divided.divide(labels, seed=seed)
    return tuple(f"client-{client}" for client in range(len(shards))), shards


def shared(train: Sequence[Sequence[str]], evaluation: Sequence[Sequence[str]]) -> int:
    """How many evaluation rows are also trained on, by the hash of their texts."""
    seen = {files.text_hash(*row) for row in train}
    return sum(files.text_hash(*row) in seen for row in evaluation)

# SPDX-License-Identifier: Apache-2.0
"""The rows that a task's settings name, with messages that begin with the setting at fault."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.tasks import files, partition
from hofl.tasks.files import Source, Table


@contextmanager
def about(setting: str, fields: Sequence[str], label: str) -> Iterator[None]:
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

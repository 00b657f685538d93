# SPDX-License-Identifier: Apache-2.0
"""The ledger: what every round's clients were asked and answered, one SQLite transaction a round.

With the initial state it is everything a replay needs. In mode ``scalars`` the replies' weights
(the top deltas) are left out: small, and good for reading; only methods that send none are replayed.
One process writes a ledger at a time; the lock dies with the process. The write-ahead log, synced at
every commit, costs one sync a round where a rollback journal costs three; whoever opens a killed run's
ledger merges it.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from hofl.core.directions import RNG_ID
from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol.base import Algorithm, Entry
from hofl.runtime import checkpoint
from hofl.runtime.files import storage
from hofl.runtime.rows import LOST, read_rows

FORMAT = "hofl-ledger-1"
MODES = ("full", "scalars")

_TABLES = """
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rounds(round INTEGER PRIMARY KEY, clients INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries(
    round INTEGER NOT NULL, place INTEGER NOT NULL, client INTEGER NOT NULL,
    plan BLOB NOT NULL, reply BLOB NOT NULL,
    PRIMARY KEY(round, place), UNIQUE(round, client));
"""


class Ledger:
    """An open ledger; see :func:`create` and :func:`read`. Close it when done."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        facts = dict(self._all("SELECT name, value FROM meta"))
        if facts.get("format") != FORMAT or facts.get("mode") not in MODES:
            raise RecordError(f"{path}: not a ledger of format {FORMAT}")
        if "algorithm" not in facts:
            raise RecordError(f"{path}: it does not name its algorithm: it is of another hofl")
        if facts.get("rng") != RNG_ID:
            raise RecordError(f"{path}: its directions are '{facts.get('rng')}', this hofl makes '{RNG_ID}'")
        self.mode: str = facts["mode"]
        self.algorithm: str = facts["algorithm"]

    def _all(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise RecordError(f"{self.path}: {error}") from error

    def copy(self, path: Path) -> None:
        """Write all that is committed to a new ledger at ``path``."""
        with closing(sqlite3.connect(path)) as other:
            self._connection.backup(other)

    @property
    def last(self) -> int:
        """The last round in it, 0 if none."""
        return self._all("SELECT coalesce(max(round), 0) FROM rounds")[0][0]  # type: ignore[no-any-return]

    def append(self, round: int, entries: Sequence[Entry]) -> None:
        """Add one round; all of it is on the device when this returns, or none of it.

        Raises:
            RecordError: the round is there already, or a client answers twice.
            sqlite3.Error: it cannot be written.
        """
        blobs = [(round, i, e.client, e.plan.to_bytes(), self._kept(e.reply)) for i, e in enumerate(entries)]
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.execute("INSERT INTO rounds VALUES (?, ?)", (round, len(blobs)))
            self._connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", blobs)
            self._connection.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            raise RecordError(f"{self.path}: round {round} or one of its clients is there twice") from error
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _kept(self, reply: Record) -> bytes:
        if self.mode == "full":
            return reply.to_bytes()
        arrays = {name: a for name, a in reply.arrays.items() if not name.startswith("weights/")}
        return Record(arrays, reply.values).to_bytes()

    def entries(self, round: int) -> tuple[Entry, ...]:
        """What was appended for a round, in the same order.

        Raises:
            RecordError: the round is not there, or not whole.
        """
        count = self._all("SELECT clients FROM rounds WHERE round = ?", round)
        if not count:
            raise RecordError(f"{self.path}: round {round} is not in it; it holds rounds 1..{self.last}")
        found = self._all("SELECT client, plan, reply FROM entries WHERE round = ? ORDER BY place", round)
        if len(found) != count[0][0]:
            raise RecordError(f"{self.path}: round {round} has {len(found)} of its {count[0][0]} entries")
        return tuple(Entry(c, Record.from_bytes(plan), Record.from_bytes(reply)) for c, plan, reply in found)

    def require(self, last: int) -> None:
        """Check that rounds ``1 .. last`` are there, each with all its entries.

        Raises:
            RecordError: one is not; the message names the first.
        """
        whole = "(SELECT count(*) FROM entries e WHERE e.round = r.round) = r.clients"
        found = {number for (number,) in self._all(f"SELECT round FROM rounds r WHERE {whole}")}
        if missing := next((number for number in range(1, last + 1) if number not in found), 0):
            raise RecordError(
                f"{self.path}: round {missing} is missing or not whole, the checkpoint is of round {last}; "
                f"{LOST}"
            )

    def truncate(self, last: int) -> None:
        """Drop every round after ``last``."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("DELETE FROM entries WHERE round > ?", (last,))
        self._connection.execute("DELETE FROM rounds WHERE round > ?", (last,))
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Release the file and its lock."""
        self._connection.close()


def create(path: Path, mode: str, algorithm: str) -> Ledger:
    """Open for writing, made if absent; mode and the algorithm's name are settled when it is made.

    Raises:
        RecordError: it is no ledger, or of another mode or algorithm.
        sqlite3.Error: it cannot be written, or another process has it.
    """
    _refuse_foreign(path)
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(f"BEGIN EXCLUSIVE;{_TABLES}COMMIT;")
        facts = {"format": FORMAT, "mode": mode, "algorithm": algorithm, "rng": RNG_ID}
        connection.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", facts.items())
        ledger = Ledger(path, connection)
        if ledger.mode != mode:
            raise RecordError(f'{path}: it was made with run.ledger = "{ledger.mode}", not "{mode}"')
        if ledger.algorithm != algorithm:
            raise RecordError(f'{path}: it was made with algorithm = "{ledger.algorithm}", not "{algorithm}"')
    except BaseException:
        connection.close()
        raise
    return ledger


def read(path: Path) -> Ledger:
    """Open an existing ledger to read it.

    Raises:
        RecordError: there is none, or it is no ledger.
        HoflError: a process is writing to it.
    """
    if not path.is_file():
        raise RecordError(f"{path}: no such ledger; give the folder of a run")
    _refuse_foreign(path)
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=1.0)
    try:
        with storage(path.parent, "the run is as it was: mend this, then replay again"):
            connection.execute("PRAGMA query_only=ON")
            connection.execute("SELECT 1 FROM sqlite_master").fetchall()
        return Ledger(path, connection)
    except BaseException:
        connection.close()
        raise


def _refuse_foreign(path: Path) -> None:
    """Raise RecordError for a link or a file that is neither empty nor a database."""
    if any(path.with_name(path.name + tail).is_symlink() for tail in ("", "-wal", "-shm", "-journal")):
        raise RecordError(f"{path}: links are not followed")
    if path.exists():
        with path.open("rb") as file:
            if file.read(16) not in (b"", b"SQLite format 3\0"):
                raise RecordError(f"{path}: not a ledger")


def _rebuilt(folder: Path, ledger: Ledger, number: int, state: Record, algorithm: Algorithm) -> Record:
    """The state after one round more; a ledger of scalars is enough where a method sends nothing else."""
    entries = ledger.entries(number)
    try:
        return algorithm.rebuild(state, entries)
    except RecordError as error:
        if ledger.mode == "full":
            raise
        raise RecordError(
            f'{folder}: run.ledger = "{ledger.mode}" left out weights that this method sends, so it cannot '
            f'be replayed ({error}); run again in a new folder with run.ledger = "full"'
        ) from error


def replay(folder: Path, round: int, algorithm: Algorithm) -> Record:
    """The state after ``round`` of a run, rebuilt from its initial state and its ledger alone.

    Every round's result is compared with the hash in its row, so the first that differs is named.

    Raises:
        RecordError: a file is missing or damaged, the round was not run, the ledger is not
            complete, or a rebuilt state is not the one the run had.
    """
    state, _ = checkpoint.load(folder / "initial.safetensors")
    hashes = {row["round"]: row.get("state_sha256") for row in read_rows(folder / "rounds.jsonl")}
    with closing(read(folder / "ledger.sqlite")) as ledger:
        for number in range(round + 1):
            if number:
                state = _rebuilt(folder, ledger, number, state, algorithm)
            if checkpoint.state_sha256(state) != hashes.get(number):
                raise RecordError(f"{folder}: the replay of round {number} is not the state in its row")
    return state

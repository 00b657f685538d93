# SPDX-License-Identifier: Apache-2.0
"""The loop: rounds, one row each, saved so that a kill at any point loses at most the current round.

A round is stored in the order ledger (one transaction), row (appended, synced), checkpoint
(replaced). The checkpoint decides: on resume, rows and ledger are cut back to its round.
Randomness is stateless, so the rerun of a lost round gives the same bits.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hofl.core.record import Record
from hofl.errors import DataError, RecordError, RunFailed
from hofl.protocol.base import Algorithm, Call, Outcome, RoundVoid
from hofl.runtime import checkpoint, files, folder, ledger, prints, totals
from hofl.runtime.files import storage
from hofl.runtime.folder import Settings
from hofl.runtime.memory import peak_bytes, reset_peak
from hofl.runtime.meter import Meter, metered
from hofl.runtime.rows import LOST, Row, append_row, kept_rows, read_rows
from hofl.tasks.base import Task
from hofl.tasks.files import CLIENT_ID

Draw = Callable[[int, int, Record], Sequence[int]]
"""``draw(round, attempt, state before the round)`` -> the cohort: distinct client numbers."""

Preference = Callable[[int, Record], float | None]
"""``(round, state before it)`` -> the preference that its cohort is drawn with; None where there is none."""

NON_FINITE = re.compile("non-finite|not finite")
"""What clients say of a loss that left the numbers: if all say so, the run has diverged."""

EARLY = 3
"""Rounds in which a weak ZO signal is worth a warning: later the run is spent already."""


class Parts(NamedTuple):
    """What a run is made of.

    Attributes:
        task: the clients, their data and the one model.
        algorithm: what a round is.
        call: the runtime's.
        meter: the one that runtime reports its blobs to.
        draw: the cohort of a round.
        warn: told of what is wrong but no reason to stop.
        preference: of the draw, for the rows.
    """

    task: Task
    algorithm: Algorithm
    call: Call
    meter: Meter
    draw: Draw
    warn: Callable[[str], None]
    preference: Preference = lambda number, state: None


def run(parts: Parts, where: Path, settings: Settings, *, resume: bool = False) -> Iterator[Row]:
    """Run or resume; yields each new row once it is stored, round 0 (zero shot) first.

    The checks are made at once, the rounds as the rows are asked for. After the last row,
    ``summary.json`` and ``final.safetensors`` are there and the model has the final trainables.
    An interrupt may come at any time: what is on disk can be resumed.

    Args:
        parts: task, algorithm and runtime.
        where: the run folder, new or empty unless ``resume``.
        settings: see there.
        resume: go on in a folder that has a run.

    Raises:
        ConfigError: the folder, or the configuration of a resumed run.
        RecordError: what is in the folder is damaged or of another run.
        HoflError: something cannot be written; what was saved stays.
        RunFailed: no quorum after all attempts, or the run diverged; a summary says so.
    """
    if bad := [c for c in parts.task.clients if not CLIENT_ID.fullmatch(c)]:
        raise DataError(f"client id {bad[0]!r} is not 1 to 64 of A-Z a-z 0-9 _ -; rename it")
    with storage(where, _MEND_RESUME if resume else _MEND_START):
        folder.open_folder(where, settings.config, resume)
        session = _Session(parts, where, settings)
    return session.rows()


_MEND_START = "no round was run: mend this, then run it again, with --resume if the folder has a config.toml"
_MEND_RESUME = "what was saved before is untouched: mend this, then resume again"
_MEND_ROUND = "what was saved before is untouched: mend this, then: hofl run --resume this folder"


class _Session:
    """One process's work in a run folder: the state after ``round``, and the totals up to it."""

    def __init__(self, parts: Parts, where: Path, settings: Settings) -> None:
        self.task, self.algorithm, _, self.meter, self.draw, self.warn, self.preference = parts
        self.call = metered(parts.call, parts.meter)
        self.meter.memory.on = True
        self.where, self.settings = where, settings
        self.device = self.task.model.device
        self.round, self.totals, self.saving = -1, totals.Totals(), 0.0
        self.warned = False
        self.state = self.algorithm.init(self.task.model.read())
        self._require_files()
        self.ledger = ledger.create(where / folder.LEDGER, settings.ledger, settings.algorithm)
        try:  # the ledger's lock is held from here on
            self._load()
            self._restore()
        except BaseException:
            self.ledger.close()
            raise

    def _require_files(self) -> None:
        """A run past its start has all its files; a new ledger in the place of a lost one would hide that."""
        there = {path.name for path in self.where.iterdir()}
        started = folder.CHECKPOINT in there
        if not started and any(row["round"] > 0 for row in read_rows(self.where / folder.ROWS)):
            raise RecordError(f"{self.where / folder.CHECKPOINT}: missing, but rounds were run; {LOST}")
        for name in (folder.LEDGER, folder.ROWS, folder.INITIAL, folder.MANIFEST) if started else ():
            if name not in there:
                raise RecordError(f"{self.where / name}: missing, but the run has a checkpoint; {LOST}")

    def _load(self) -> None:
        """Go to the checkpoint, if there is one."""
        saved = self.where / folder.CHECKPOINT
        if saved.exists() or saved.is_symlink():
            self.state, facts = checkpoint.load(saved, self.state)
            self.round, self.totals = int(facts["round"]), totals.Totals.from_values(facts["totals"])
        folder.require_rounds(self.settings.rounds, self.round)

    def _restore(self) -> None:
        """Check all that is there, and only then cut rows and ledger back and note the session."""
        found = prints.fingerprints(self.task)
        sessions = folder.session_of(self.where, found, self.device, self.round + 1, self.warn)
        rows = kept_rows(self.where / folder.ROWS, self.round)
        self.ledger.require(self.round)
        folder.write_manifest(self.where, self.settings, self.task, found, sessions)
        for name in (folder.SUMMARY, folder.FINAL):  # of a run that had ended: it goes on
            (self.where / name).unlink(missing_ok=True)
        files.replace(self.where / folder.ROWS, rows)
        self.ledger.truncate(max(self.round, 0))
        folder.write_config(self.where, self.settings.config)
        if self.round < 0:
            layout = {"layout": self.task.model.layout.to_json()}
            checkpoint.save(self.where / folder.INITIAL, self.state, layout)

    def rows(self) -> Iterator[Row]:
        """Every row still to come; then the summary."""
        try:
            while self.round < self.settings.rounds:
                yield self._first() if self.round < 0 else self._next()
            self._finish({"status": "done"})
        finally:
            self.ledger.close()

    def _first(self) -> Row:
        reset_peak(self.device)
        return self._store([], Outcome(self.state, (), {}), [], 0.0)

    def _next(self) -> Row:
        reset_peak(self.device)
        begun, number = time.perf_counter(), self.round + 1
        cohort, outcome, failures = self._attempt(number)
        busy = time.perf_counter() - begun
        classes = max(1, len(self.task.facts.get("labels", ())))
        why = totals.divergence(outcome, self.totals.start_loss, self.settings.divergence, classes)
        if why is None and not checkpoint.is_finite(outcome.state):
            why = "its state has non-finite values"
        if why is not None:
            self._diverge(cohort, outcome, failures, busy, why)
        row = self._store(cohort, outcome, failures, busy)
        self._mind_signal(row)
        return row

    def _attempt(self, number: int) -> tuple[list[int], Outcome, list[Row]]:
        """Try a round until enough clients return: (cohort, outcome, failures of all attempts)."""
        failures: list[Row] = []
        cohort: list[int] = []
        for attempt in range(self.settings.attempts):
            cohort = [int(client) for client in self.draw(number, attempt, self.state)]
            try:
                outcome = self.algorithm.round(self.state, cohort, self.call)
            except RoundVoid as void:
                failures += _listed(attempt, void.failures)
                continue
            finally:
                with storage(self.where, _MEND_ROUND):
                    self.meter.keep_traces(self.where / "failures.log", number)
            return cohort, outcome, failures + _listed(attempt, outcome.failures)
        self._fail(number, cohort, failures)

    def _store(self, cohort: list[int], outcome: Outcome, failures: list[Row], busy: float) -> Row:
        """Evaluate where it is due, then ledger, row, checkpoint, in that order.

        A row's ``seconds.save`` is this round's ledger and the checkpoint before it: its own
        checkpoint is written after the row.
        """
        number, begun = self.round + 1, time.perf_counter()
        metrics = self._evaluate(outcome.state) if self._is_due(number) else None
        evaluated = time.perf_counter()
        with storage(self.where, _MEND_ROUND):
            if number:
                self.ledger.append(number, outcome.entries)
            sha = checkpoint.state_sha256(outcome.state)
            saving = self.saving + time.perf_counter() - evaluated
            row = self._row(cohort, outcome, failures, (busy, evaluated - begun, saving))
            row |= {"metrics": metrics, "state_sha256": sha}
            begun = time.perf_counter()
            append_row(self.where / folder.ROWS, row)
            self.totals.add(row)
            facts = {"round": number, "totals": self.totals.to_values()}
            checkpoint.save(self.where / folder.CHECKPOINT, outcome.state, facts)
            self.saving = time.perf_counter() - begun
        self.state, self.round = outcome.state, number
        return row

    def _row(
        self, cohort: list[int], outcome: Outcome, failures: list[Row], spent: tuple[float, float, float]
    ) -> Row:
        busy, evaluate, save = spent
        up, down, clients = self.meter.take()
        seconds = {"clients": clients, "server": max(0.0, busy - clients), "evaluate": evaluate, "save": save}
        beta = self.preference(self.round + 1, self.state) if cohort else None
        columns = {"bytes_up": up, "bytes_down": down, "seconds": seconds, "failures": failures}
        columns |= {"preference": beta}
        client, set_back = self.meter.memory.take()
        peak = peak_bytes(self.device)
        columns |= {"peak_bytes": None if peak is None else max(peak, set_back), "client_peak_bytes": client}
        return totals.make_row(self.round + 1, cohort, outcome, self.totals.examples, columns)

    def _is_due(self, number: int) -> bool:
        return number % self.settings.evaluate_every == 0 or number == self.settings.rounds

    def _evaluate(self, state: Record) -> dict[str, Any]:
        self.task.model.write(checkpoint.vector_of(state))
        return self.task.evaluate().to_row()

    def _mind_signal(self, row: Row) -> None:
        signal = row["zo_signal"]
        if self.warned or signal is None or signal >= 0.5 or row["round"] > EARLY:
            return
        self.warned = True
        radius = "" if self.settings.radius is None else f"at radius {self.settings.radius:g} "
        self.warn(
            f"zo_signal {signal:.2f} in round {row['round']}: {radius}the finite differences are mostly "
            'rounding noise, so the bottom walks at random; set zo.estimator = "tangent" (exact) '
            "or a larger zo.radius"
        )

    def _diverge(
        self, cohort: list[int], outcome: Outcome, failures: list[Row], busy: float, why: str
    ) -> NoReturn:
        """End the run at the last checkpoint; the lost round has a row, for the eye, and no ledger entry."""
        row = self._row(cohort, outcome, failures, (busy, 0.0, self.saving))
        row |= {"diverged": why, "state_sha256": None}
        with storage(self.where, _MEND_ROUND):
            append_row(self.where / folder.ROWS, row)
        self.totals.add(row)
        self._end("diverged", row["round"], f"diverged: {why}")

    def _fail(self, number: int, cohort: list[int], failures: list[Row]) -> NoReturn:
        last = [f for f in failures if f["attempt"] == self.settings.attempts - 1]
        clients = ", ".join(str(f["client"]) for f in last)
        which = f"all of clients {clients}" if len(last) >= len(cohort) else f"clients {clients} of {cohort}"
        reason = last[0]["why"] if last else "the quorum was not reached"
        self.totals.failures += len(failures)
        status = "diverged" if last and all(NON_FINITE.search(f["why"]) for f in last) else "failed"
        self._end(status, number, f"{which} failed: {reason} (attempt {self.settings.attempts})")

    def _end(self, status: str, number: int, why: str) -> NoReturn:
        message = f"round {number}: {why}"
        ending = {"status": status, "error": message}
        self._finish(ending | ({"diverged_round": number} if status == "diverged" else {}))
        raise RunFailed(f"{message}; the model of round {self.round} is in {self.where / folder.FINAL}")

    def _finish(self, ending: dict[str, Any]) -> None:
        """Save the final model and the summary; a finished run's last round is always evaluated."""
        if ending["status"] == "done" and self.totals.measured.get("round") != self.round:
            self.totals.measured = self._evaluate(self.state) | {"round": self.round}
        self.task.model.write(checkpoint.vector_of(self.state))
        with storage(self.where, _MEND_ROUND):
            final = self.where / folder.FINAL
            sha = checkpoint.save_final(final, self.state, self.task.model.layout, self.round)
            ended = totals.summary(self.settings, self.task.name, self.totals, self.round, sha, ending)
            folder.write_json(self.where / folder.SUMMARY, ended)


def _listed(attempt: int, failures: dict[int, str]) -> list[Row]:
    return [{"attempt": attempt, "client": client, "why": why} for client, why in sorted(failures.items())]

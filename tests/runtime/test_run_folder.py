# SPDX-License-Identifier: Apache-2.0
"""What a run writes: rows, summary, manifest, ledger, and what it refuses."""

import dataclasses
import errno
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from hofl.core.record import Record
from hofl.errors import ConfigError, DataError, HoflError, RecordError
from hofl.runtime import checkpoint, files, ledger, prints
from hofl.runtime.loop import run
from hofl.runtime.rows import LINE_LIMIT, finite, kept_rows, read_rows

SPENT = {"clients", "server", "evaluate", "save"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("finished") / "run"
    tiny_run.finish(where)
    return where


def strict(path: Path) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_rows(finished: Path) -> None:
    rows = list(read_rows(finished / "rounds.jsonl"))
    assert [r["round"] for r in rows] == [0, 1, 2, 3, 4]
    assert [r["metrics"] is not None for r in rows] == [True, False, False, True, True]
    assert [r["examples_seen"] for r in rows] == [0, 30, 60, 90, 120]
    for row in rows[1:]:
        assert row["cohort"] == tiny_run.draw(row["round"], 0)
        assert row["boundaries"] == [[0, 1, 2][c % 3] for c in row["cohort"]]
        assert row["replay_ok"] and row["zo_signal"] == 1.0 and row["failures"] == []
        assert row["seconds"].keys() == SPENT and min(row["seconds"].values()) >= 0
        assert row["peak_bytes"] > 1 << 20 and len(row["state_sha256"]) == 64
        assert row["bytes_up"]["weights"] > 0 and row["bytes_down"]["headers"] > 0


def test_summary_is_of_the_final_model_and_adds_up(finished: Path) -> None:
    summary, rows = strict(finished / "summary.json"), list(read_rows(finished / "rounds.jsonl"))
    last = rows[-1]["metrics"]
    assert summary["metric"] == {"name": "accuracy", "value": last["accuracy"], "n": 40}
    assert (summary["loss"], summary["balanced_accuracy"]) == (last["loss"], last["balanced_accuracy"])
    assert summary["zero_shot"] == rows[0]["metrics"]["accuracy"]
    assert summary["majority_class"] == last["majority_rate"]
    assert (summary["status"], summary["rounds"], summary["examples_seen"]) == ("done", 4, 120)
    for way in ("bytes_up", "bytes_down"):
        assert (
            summary[f"{way}_total"] == sum(sum(r[way].values()) for r in rows) == sum(summary[way].values())
        )
    assert summary["peak_bytes"] == max(r["peak_bytes"] for r in rows)
    assert summary["seconds"]["clients"] == pytest.approx(sum(r["seconds"]["clients"] for r in rows))
    vector, layout = checkpoint.load_final(finished / "final.safetensors")
    assert summary["final_sha256"] == rows[-1]["state_sha256"] == checkpoint.hex_digest(vector)
    assert layout == tiny_run.tiny_task().model.layout


def test_manifest(finished: Path) -> None:
    manifest = strict(finished / "manifest.json")
    assert "no privacy is provided or measured" in manifest["mode"]
    assert manifest["forward"] == "eval mode, no dropout, in every pass"  # C07
    assert manifest["labels_at"] == "clients" and manifest["leaves_device"] == ["scalars", "top delta"]
    assert manifest["versions"].keys() >= {"python", "torch", "numpy", "transformers", "peft", "hofl"}
    task = tiny_run.tiny_task()
    assert manifest["fingerprints"] == prints.fingerprints(task)
    assert manifest["fingerprints"].keys() == {"layout", "data", "model"}
    assert manifest["facts"]["labels"] == ["cloud 0", "cloud 1", "cloud 2"]
    text = (finished / "manifest.json").read_text()
    assert str(Path.home()) + "/" not in text and os.uname().nodename not in text


def test_the_manifest_has_no_path_of_this_machine(tmp_path: Path) -> None:
    made = tiny_run.parts()
    model = {"source": f"{Path.home()}/models/m.gguf", "base": f"{tmp_path}/cache/gguf/1", "dtype": "float32"}
    facts = made.task.facts | {"model": model, "warnings": [f"see {Path.home()}/x"]}
    task = dataclasses.replace(made.task, facts=facts)
    list(run(made._replace(task=task), tmp_path / "run", tiny_run.settings(1, model=model["source"])))
    text = (tmp_path / "run" / "manifest.json").read_text()
    manifest = strict(tmp_path / "run" / "manifest.json")
    assert str(tmp_path) not in text and f"{Path.home()}/" not in text
    assert manifest["model"] == manifest["facts"]["model"]["source"] == "~/models/m.gguf"
    assert manifest["facts"]["warnings"] == ["see ~/x"] and "base" not in manifest["facts"]["model"]


def test_the_model_ends_with_the_final_trainables(tmp_path: Path) -> None:
    made = tiny_run.parts()
    list(run(made, tmp_path / "run", tiny_run.settings(2)))
    vector, _ = checkpoint.load_final(tmp_path / "run" / "final.safetensors")
    assert np.array_equal(made.task.model.read(), vector)


@pytest.mark.parametrize("name", ["ho_fl", "fedavg"])
@pytest.mark.parametrize("target", [0, 1, 3])
def test_replay_needs_no_model(tmp_path: Path, name: str, target: int) -> None:
    made = tiny_run.parts(name=name)
    rows = list(run(made, tmp_path / "run", tiny_run.settings(3)))
    state = ledger.replay(tmp_path / "run", target, made.algorithm)
    assert checkpoint.state_sha256(state) == rows[target]["state_sha256"]


def tamper(where: Path, statement: str) -> None:
    with closing(sqlite3.connect(where / "ledger.sqlite")) as connection:
        connection.execute(statement)
        connection.commit()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM rounds WHERE round = 2", "round 2 is not in it; it holds rounds 1..3"),
        ("DELETE FROM entries WHERE round = 2 AND place = 0", "round 2 has 2 of its 3 entries"),
        ("UPDATE entries SET reply = x'00' WHERE round = 2", "not a record"),
        ("DELETE FROM entries WHERE round = 9; ", "replay of round 4"),
        ("UPDATE meta SET value = 'mersenne' WHERE name = 'rng'", "its directions are 'mersenne'"),
        ("UPDATE meta SET value = 'x' WHERE name = 'format'", "not a ledger of format"),
        ("DELETE FROM meta WHERE name = 'algorithm'", "does not name its algorithm"),
    ],
)
def test_replay_refuses_what_is_damaged(tmp_path: Path, statement: str, message: str) -> None:
    tiny_run.finish(tmp_path / "run", 3)
    tamper(tmp_path / "run", statement)
    wanted = 4 if "round 4" in message else 3
    with pytest.raises(RecordError, match=message.replace("replay of round 4", "round 4 is not in it")):
        ledger.replay(tmp_path / "run", wanted, tiny_run.parts().algorithm)


def test_replay_names_the_first_round_that_differs(tmp_path: Path) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 3)
    with closing(ledger.create(where / "ledger.sqlite", "full", "ho_fl")) as book:
        entry = book.entries(2)[0]
    entry.reply.arrays["weights/delta"][0] += 1e-3
    with closing(sqlite3.connect(where / "ledger.sqlite")) as connection:
        connection.execute("UPDATE entries SET reply=? WHERE round=2 AND place=0", (entry.reply.to_bytes(),))
        connection.commit()
    with pytest.raises(RecordError, match="the replay of round 2 is not the state in its row"):
        ledger.replay(where, 3, tiny_run.parts().algorithm)


def test_scalars_ledger_is_small_and_says_that_it_cannot_be_replayed(tmp_path: Path, finished: Path) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, ledger="scalars")
    with (
        closing(ledger.read(where / "ledger.sqlite")) as small,
        closing(ledger.read(finished / "ledger.sqlite")) as full,
    ):
        for a, b in zip(small.entries(2), full.entries(2), strict=True):
            assert not any(name.startswith("weights/") for name in a.reply.arrays)
            assert a.reply.arrays.keys() == {n for n in b.reply.arrays if not n.startswith("weights/")}
            assert a.plan.to_bytes() == b.plan.to_bytes()
    with pytest.raises(RecordError, match=r'run again in a new folder with run\.ledger = "full"'):
        ledger.replay(where, 2, tiny_run.parts().algorithm)


def test_ledger_takes_a_round_once_and_whole(tmp_path: Path) -> None:
    entry = tiny_run.Entry(3, Record({}, {"a": 1}), Record({"scalars/s": np.ones(2, np.float32)}))
    with closing(ledger.create(tmp_path / "l", "full", "ho_fl")) as book:
        book.append(1, [entry, entry._replace(client=1)])
        for again in ((1, [entry]), (2, [entry, entry])):
            with pytest.raises(RecordError, match="there twice"):
                book.append(*again)
        book.append(2, [])
        assert book.last == 2 and book.entries(2) == ()
        assert [e.client for e in book.entries(1)] == [3, 1]
        book.truncate(1)
        assert book.last == 1


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    where = tmp_path / "run"
    running = run(tiny_run.parts(), where, tiny_run.settings())
    next(running)
    with pytest.raises(HoflError, match="another process is writing to this run"):
        run(tiny_run.parts(), where, tiny_run.settings(), resume=True)
    with pytest.raises(HoflError, match="another process is writing to this run"):
        ledger.read(where / "ledger.sqlite")
    assert [r["round"] for r in running] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lr": 0.1}, r"optimizer.lr = 0.1 was given, this run has 0.05; .*start a new folder"),
        ({"config": "seed = 5"}, r"algorithm = '\(absent\)' was given, this run has 'ho_fl'"),
        ({"ledger": "scalars"}, "run.ledger = 'scalars' was given, this run has 'full'"),
    ],
)
def test_resume_with_another_configuration(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    before = {p.name: p.read_bytes() for p in where.iterdir()}
    with pytest.raises(ConfigError, match=message):
        run(tiny_run.parts(), where, tiny_run.settings(2, **more), resume=True)
    assert {p.name: p.read_bytes() for p in where.iterdir()} == before


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        tiny_run.finish(tmp_path)
    with pytest.raises(ConfigError, match="nothing to resume"):
        tiny_run.finish(tmp_path / "none", resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["../x", "a/b", "..\\x", "", "x" * 65, "a\0b", "é"])
def test_client_ids_are_names(tmp_path: Path, name: str) -> None:
    made = tiny_run.parts()
    named = dataclasses.replace(made.task, clients=(name, *made.task.clients[1:]))
    with pytest.raises(DataError, match="client id"):
        run(made._replace(task=named), tmp_path / "run", tiny_run.settings())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("victim", ["checkpoint", "rounds.jsonl"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    where, write = tmp_path / "run", files.write_synced
    running = run(tiny_run.parts(), where, tiny_run.settings())
    for _ in range(3):
        next(running)
    good = (where / "checkpoint").read_bytes()

    def full(descriptor: int, data: bytes) -> None:
        if (data[:1] == b"{") == (victim == "rounds.jsonl"):
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data)

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(HoflError, match="No space left on device; what was saved before is") as failure:
        next(running)
    assert "\n" not in str(failure.value) and (where / "checkpoint").read_bytes() == good
    assert not list(where.glob("*.partial"))
    monkeypatch.setattr(files, "write_synced", write)
    tiny_run.finish(where, resume=True)
    straight = tmp_path / "straight"
    tiny_run.finish(straight)
    assert tiny_run.timeless(where) == tiny_run.timeless(straight)


@pytest.mark.parametrize(
    ("resume", "advice"),
    [(False, "no round was run: mend this, then run it again"), (True, "what was saved before is untouched")],
)
def test_a_full_disk_at_the_start_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool, advice: str
) -> None:
    if resume:
        tiny_run.finish(tmp_path / "run", 2)

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(HoflError, match=f"No space left on device; {advice}"):
        tiny_run.finish(tmp_path / "run", 3, resume=resume)
    monkeypatch.undo()
    assert len(tiny_run.finish(tmp_path / "run", 3, resume=resume)) == (1 if resume else 4)


def test_rows_are_strict_json() -> None:
    row = finite({"a": float("nan"), "b": [1.0, float("-inf")], "c": {"d": (2.0, "x")}, "e": True})
    assert row == {"a": None, "b": [1.0, None], "c": {"d": [2.0, "x"]}, "e": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"round": 0}\nnonsense\n', ":2: not JSON"),
        (b'{"round": 0}\n[1]\n', ":2: not a row"),
        (b'{"round": 0}\n{"round": 2}\n', "round 1 is missing"),
        (b"x" * (LINE_LIMIT + 2), ":1: a line of over"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "rounds.jsonl").write_bytes(text)
    with pytest.raises(RecordError, match=message):
        kept_rows(tmp_path / "rounds.jsonl", 2)

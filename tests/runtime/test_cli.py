# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import hofl
from hofl import read_run
from hofl.algorithms import ALGORITHMS, Method
from hofl.config import load

with warnings.catch_warnings():  # typer asks click for names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from hofl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs" / "synthetic"
HO_FL, FEDAVG = str(CONFIGS / "ho_fl.toml"), str(CONFIGS / "fedavg.toml")
SHORT = ["rounds=2", "evaluation.every=1"]


def hofl_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return int(left.value.code or 0)


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Four short runs: two seeds of ho_fl, its control, fedavg."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config, *more in (
        ("a1", HO_FL, "seed=1"),
        ("a2", HO_FL, "seed=2"),
        ("none", HO_FL, "seed=1", "zo.estimator=none"),
        ("fedavg", FEDAVG, "seed=1"),
    ):
        assert hofl_command("run", config, *SHORT, *more, "--out", str(folder / name)) == 0
    return folder


def text_files(folder: Path, source: str = "no/such", **changes: str) -> str:
    """A text configuration on tiny files; by default its model does not exist: data is read before it."""
    (folder / "good.csv").write_text("sentence,label\n" + "good,1\nbad,0\n" * 4)
    (folder / "bad.csv").write_text("sentence,label\ngood,1\nso so,neutral\n")
    (folder / "empty.csv").write_text("sentence,label\n")
    settings = {"train": "good.csv", "evaluation": "good.csv", "text": "sentence"} | changes
    lines = "\n".join(f'{k} = "{v}"' for k, v in settings.items())
    (folder / "text.toml").write_text(
        f'rounds = 1\n[model]\nsource = "{source}"\n[task]\n{lines}\n[partition]\nclients = 2\n'
        "[cohort]\nsize = 1\nboundaries = [1]\n"
    )
    return "text.toml"


def refused(capsys, at: Path, *arguments: str) -> str:
    """Exit 2, one line on standard error, no result on standard output, nothing written."""
    before = sorted(at.rglob("*"))
    assert hofl_command(*arguments) == 2
    said = capsys.readouterr()
    assert all(line.startswith("loading the data and model ") for line in said.out.splitlines())
    assert said.err.startswith("hofl: ") and said.err.count("\n") == 1
    assert sorted(at.rglob("*")) == before
    return said.err.removeprefix("hofl: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", HO_FL, "zo.probez=2"], "command line: zo.probez is unknown, did you mean zo.probes?"),
        (
            ["run", HO_FL, "cohort.size=13"],
            "command line: cohort.size = 13: must be at most partition.clients = 12",
        ),
        (["run", HO_FL, "cohort.preference=1"], "command line: cohort.preference = 1: must be in [0, 1)"),
        (["run", HO_FL, "zo.radius=0"], "command line: zo.radius = 0: must be > 0"),
        (
            ["run", HO_FL, "cohort.boundaries=[1, 5]"],
            "command line: cohort.boundaries = [1, 5]: 5 is outside 0..4, the blocks of this model",
        ),
        (
            ["run", HO_FL, "cohort.boundaries=[]"],
            "command line: cohort.boundaries is missing; name one number a tier, each in 0..4",
        ),
        (
            ["run", HO_FL, "zo.directions=hadamard", "zo.probes=257"],
            "command line: zo.probes = 257: hadamard has 256 directions for d = 144",
        ),
        (["run", "no.toml"], "no.toml: No such file or directory; give the path of a .toml configuration"),
        (["run"], "CONFIG is missing: give a .toml file, or --resume a run folder (see hofl run --help)"),
        (
            ["run", "--resume", "no"],
            "no: nothing to resume, it has no config.toml; start it without --resume",
        ),
        (
            ["run", HO_FL, "--out", "a", "--resume", "b"],
            "--out and --resume name two folders; give one of them",
        ),
        (["run", HO_FL, "--nope"], "No such option '--nope'. (see hofl run --help)"),
        (["frob"], "No such command 'frob'. (see hofl --help)"),
        (["list", "frobs"], "Invalid value for '[WHAT]:[algorithms|tasks|models|presets]'"),
        (["compare", "no"], "no is no run folder: it has no config.toml; give a folder written by hofl run"),
        (
            ["replay", "no", "--round", "1"],
            "no is no run folder: it has no config.toml; give a folder of hofl run",
        ),
        (["replay", "no", "--round", "-1"], "--round -1: must be >= 0"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(capsys, at, arguments, expected) -> None:
    assert refused(capsys, at, *arguments).startswith(expected)


def test_bad_toml_names_file_and_line(capsys, at) -> None:
    (at / "x.toml").write_text("seed = 1\nrounds = = 2\n")
    assert refused(capsys, at, "run", "x.toml") == "x.toml:2: Invalid value; the file is not valid TOML"


def test_boundary_in_a_file_is_named_with_its_line(capsys, at) -> None:
    (at / "x.toml").write_text('[task]\nname = "synthetic"\n[cohort]\nboundaries = [9]\n')
    expected = "x.toml:4: cohort.boundaries = [9]: 9 is outside 0..4, the blocks of this model"
    assert refused(capsys, at, "run", "x.toml") == expected


def test_control_characters_in_arguments_do_not_reach_the_terminal(capsys, at) -> None:
    assert "\x1b" not in refused(capsys, at, "run", "\x1b[2Jx.toml")


def test_existing_folder_is_refused(capsys, at) -> None:
    (at / "out").mkdir()
    (at / "out" / "mine.txt").write_text("keep")
    said = refused(capsys, at, "run", HO_FL, "--out", "out")
    assert said == "out exists and is not empty; give another --out, or --resume it"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": "empty.csv"}, ["text.toml:5: task.train: ", "empty.csv", "no rows"]),
        ({"train": "bad.csv"}, ["text.toml:5: task.train: label", "neutral", "negative, positive"]),
        ({"text": "sentences"}, ["text.toml:7: task.text: ", "'sentences'", "mean 'sentence'"]),
        ({"label": "labels"}, ["text.toml:8: task.label: ", "'labels'", "mean 'label'"]),
        ({"train": "no.csv"}, ["text.toml:5: task.train: 'no.csv'"]),
        ({"evaluation": "no.csv"}, ["text.toml:6: task.evaluation: 'no.csv'"]),
        ({}, ["text.toml:3: model.source", "no/such"]),
        ({"template": "sst2"}, ["text.toml:", "task.template", "sst2-v1"]),
    ],
)
def test_bad_data_is_one_line(capsys, at, changes, expected) -> None:
    said = refused(capsys, at, "run", text_files(at, **changes))
    assert all(part in said for part in expected), said


def test_a_model_without_forward_mode_rules_is_refused_before_anything_is_written(
    capsys, at, monkeypatch
) -> None:
    def lacks(*_, **__):
        raise NotImplementedError("forward AD is not there for this")

    monkeypatch.setattr("torch.func.jvp", lacks)
    said = refused(capsys, at, "run", HO_FL, "zo.estimator=tangent")
    assert said.startswith('command line: zo.estimator = "tangent" needs forward-mode rules')


def test_resume_with_another_configuration_is_refused(capsys, finished) -> None:
    capsys.readouterr()
    said = refused(capsys, finished, "run", "--resume", str(finished / "a1"), "optimizer.lr=0.5")
    assert "optimizer.lr = 0.5" in said and "0.01" in said


def test_cuda_without_a_device_says_why(capsys, at, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = refused(capsys, at, "run", HO_FL, "model.device=cuda")
    assert said.startswith("command line: model.device") and "CUDA_VISIBLE_DEVICES is ''" in said


def test_run_says_what_it_does_and_ends_with_the_model(capsys, at) -> None:
    assert hofl_command("run", HO_FL, *SHORT, "cohort.size=50%") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "warning:" not in out and "ledger:" not in out
    assert lines[0].startswith("mode: federated, in-process simulation")
    assert lines[1].startswith("device: c") and "4 blocks" in lines[2]
    assert lines[3].startswith("labels: at the clients; a client sends")
    assert "cohort: 6 of 12 clients" in out and "5 optimizer steps, 10 probes, up to 40 example visits" in out
    assert [line.split()[1] for line in lines if line.startswith("round ")] == ["0/2", "1/2", "2/2"]
    assert "majority class" in out and "balanced accuracy" in out and "\x1b" not in out
    final = Path(lines[-1].removeprefix("final model: "))
    assert final == Path("runs/synthetic-ho_fl-42/final.safetensors") and final.is_file()
    assert load(final.parent / "config.toml") == load(HO_FL, [*SHORT, "cohort.size=50%"])


def test_run_as_json_prints_the_summary_alone(capsys, at) -> None:
    assert hofl_command("run", text_files(at, "tiny:llama"), "local.steps=1", "--json", "--out", "j") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("folder") == "j" and printed.pop("final_model") == str(Path("j/final.safetensors"))
    assert printed == read_run("j").summary


def test_boundaries_show_the_bytes_of_the_formula(finished) -> None:
    from hofl.commands.describe import boundaries, sent
    from hofl.session import prepare
    from hofl.theory import communication

    def total(session, boundary):
        return [sum(sent(session, boundary)[way].values()) for way in ("up", "down")]

    session = prepare(load(HO_FL))
    assert total(session, 1) == [884 * 4 + 10 * 4 + 32 + 24, 1028 * 4 + 16]
    assert boundaries(session).rows[0][4:] == ("10", "3.5 KiB", "4.0 KiB")
    traffic = communication.ho_fl(1028, 144, 5, 0)
    assert total(prepare(load(HO_FL, ["zo.estimator=none"])), 1)[0] == traffic["up"]["weights"]
    assert total(prepare(load(FEDAVG)), 0) == [1028 * 4, 1028 * 4]


def test_many_scalars_for_a_small_bottom_and_a_large_ledger_are_said() -> None:
    from hofl.commands.describe import describe
    from hofl.session import prepare

    said = [
        line for line in describe(prepare(load(HO_FL, ["zo.probes=3", "rounds=20000"]))) if type(line) is str
    ]
    warned = [line for line in said if line.startswith("warning: the scalars then determine a large part")]
    assert len(warned) == 1 and "boundary 1 has 144 trainables and a participation sends 15" in warned[0]
    assert any(line.startswith("ledger: about ") and "20000 rounds" in line for line in said)
    quiet = load(HO_FL, ["rounds=20000", "run.ledger=scalars", "zo.estimator=none"])
    assert not any(str(line).startswith(("ledger:", "warning:")) for line in describe(prepare(quiet)))


def test_text_runs_and_replays(capsys, at) -> None:
    assert hofl_command("run", text_files(at, "tiny:llama"), "local.steps=1", "--out", "t") == 0
    out = capsys.readouterr().out
    assert out.startswith("loading the data and model tiny:llama ...\n") and "cohort: 1 of 2 clients" in out
    run = read_run("t")
    assert run.manifest["facts"]["model"]["source"] == "tiny:llama" and run.rows[1]["replay_ok"] is True
    assert hofl_command("replay", "t", "--round", "1") == 0


def test_export_is_verified(capsys, at) -> None:
    assert hofl_command("run", text_files(at, "tiny:llama"), "local.steps=1", "--out", "t") == 0
    assert hofl_command("export", "t", "--json") == 0
    found = json.loads(capsys.readouterr().out.partition("final.safetensors\n")[2])
    assert found["kind"] == "peft" and found["difference"] <= 1e-6
    assert (at / "t" / "adapter" / "adapter_config.json").is_file()
    assert hofl_command("export", "t", "--format", "merged") == 0
    assert "merged model: t/merged" in capsys.readouterr().out
    assert (at / "t" / "merged" / "model.safetensors").is_file()
    assert "not one of 'peft', 'merged'" in refused(capsys, at, "export", "t", "--format", "onnx")
    said = refused(capsys, at, "export", "t")
    assert said == "t/adapter exists and is not empty; give another --out"


def test_export_needs_a_hugging_face_model(capsys, finished) -> None:
    capsys.readouterr()
    assert "has no Hugging Face model to export" in refused(capsys, finished, "export", str(finished / "a1"))


def test_many_clients_are_condensed(capsys, at) -> None:
    assert hofl_command("run", FEDAVG, "rounds=1", "partition.clients=20", "partition.minimum=1") == 0
    out = capsys.readouterr().out
    assert "client-0" not in out and "median of 20" in out


def test_divergence_is_exit_1(capsys, at) -> None:
    assert (
        hofl_command("run", FEDAVG, "rounds=8", "optimizer.name=sgd", "optimizer.lr=1e30", "--out", "d") == 1
    )
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("hofl: round ")
    assert read_run("d").status.startswith(("diverged@r", "failed@r"))


def test_resume_extends_to_the_same_bits(capsys, finished, at) -> None:
    assert hofl_command("run", HO_FL, "rounds=1", "seed=1", "evaluation.every=1", "--out", "r") == 0
    assert hofl_command("run", "--resume", "r", "rounds=2") == 0
    ours, theirs = read_run("r").summary, read_run(finished / "a1").summary
    assert ours["final_sha256"] == theirs["final_sha256"] and ours["rounds"] == 2
    assert ours["bytes_up"] == theirs["bytes_up"]


def test_interrupt_saves_and_says_how_to_go_on(capsys, at, monkeypatch) -> None:
    import hofl.commands.run as command

    tell = command._tell

    def interrupted(row, *rest) -> None:
        tell(row, *rest)
        if row["round"] == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "_tell", interrupted)
    assert hofl_command("run", HO_FL, *SHORT, "--out", "i") == 130
    assert "resume with: hofl run --resume i" in capsys.readouterr().err
    monkeypatch.setattr(command, "_tell", tell)
    assert hofl_command("run", "--resume", "i") == 0
    assert [row["round"] for row in read_run("i").rows] == [0, 1, 2]


def test_client_failures_are_shown(capsys, at, monkeypatch) -> None:
    from hofl.tasks.base import Task

    batch = Task.batch

    def fails(self, client, position, size):
        if client == 3:
            raise ValueError("boom\x1b[2J")
        return batch(self, client, position, size)

    monkeypatch.setattr(Task, "batch", fails)
    assert hofl_command("run", FEDAVG, "rounds=1", "cohort.size=all", "--out", "f") == 0
    said = capsys.readouterr().err
    assert "round 1: client 3: ValueError: boom" in said and "test_cli.py:" in said and "\x1b" not in said


def test_compare(capsys, finished, at) -> None:
    folders = [str(finished / name) for name in ("a1", "a2", "none", "fedavg")]
    capsys.readouterr()
    assert hofl_command("compare", *folders, "--json", "--out", "c") == 0
    result = json.loads(capsys.readouterr().out)
    labels = [(g["label"], g["n"]) for g in result["groups"]]
    assert labels == [("ho_fl forward b=1,2,3", 2), ("ho_fl none b=1,2,3", 1), ("fedavg", 1)]
    assert result["groups"][0]["frozen_control"] == result["groups"][1]["mean"]
    assert all("not separable" in verdict for verdict in result["verdicts"])
    assert json.loads((at / "c" / "compare.json").read_text()) == result
    assert (at / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "| ho_fl forward b=1,2,3 | 2 |" in (at / "c" / "compare.md").read_text()
    assert hofl_command("compare", *folders, "--out", "c") == 0
    assert "200 evaluation examples, one is 0.0050" in capsys.readouterr().out


def test_compare_into_a_file_is_refused(capsys, finished, at) -> None:
    (at / "c").write_text("mine")
    capsys.readouterr()
    said = refused(capsys, at, "compare", str(finished / "a1"), "--out", "c")
    assert said == "--out c: File exists; name a folder that can be written"


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("rounds.jsonl", '{"metrics": null}\n', "rounds.jsonl:1: not a row"),
        ("summary.json", '{"metric": {"name": "accuracy", "value": null}}', "summary.json is damaged"),
    ],
)
def test_compare_of_a_damaged_run_is_one_line(capsys, finished, at, file, content, expected) -> None:
    shutil.copytree(finished / "a1", at / "d")
    (at / "d" / file).write_text(content)
    capsys.readouterr()
    assert expected in refused(capsys, at, "compare", "d")


def test_compare_refuses_other_data(capsys, finished, at) -> None:
    assert hofl_command("run", FEDAVG, "rounds=1", "task.evaluation_rows=50", "--out", "other") == 0
    capsys.readouterr()
    assert "differ in their [task]" in refused(capsys, at, "compare", "other", str(finished / "a1"))


def test_replay(capsys, finished) -> None:
    capsys.readouterr()
    assert hofl_command("replay", str(finished / "a1"), "--round", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state_sha256"] == read_run(finished / "a1").rows[2]["state_sha256"]
    assert found["state_sha256"] == read_run(finished / "a1").summary["final_sha256"]
    assert hofl_command("replay", str(finished / "fedavg"), "--round", "1") == 0
    assert "state sha256" in capsys.readouterr().out
    assert "rounds 1..2" in refused(capsys, finished, "replay", str(finished / "a1"), "--round", "9")


@pytest.mark.parametrize(
    ("what", "key", "names"),
    [
        ("algorithms", "", {"ho_fl", "fedavg"}),
        ("tasks", "partitions", {"iid", "dirichlet", "by_label", "fixed_dirichlet", "files"}),
        ("models", "sources", {"owner/name", "tiny:FAMILY"}),
        ("models", "models", {"OPT-125M", "ResNet-18"}),
    ],
)
def test_list(capsys, what, key, names) -> None:
    assert hofl_command("list", what, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    entries = printed[key] if key else printed
    assert names <= {next(iter(entry.values())) for entry in entries}
    assert hofl_command("list", what) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_list_algorithms_is_the_taxonomy(capsys) -> None:
    """Every row with every field as JSON; in a terminal the taxonomy's columns, and what the symbols are."""
    assert hofl_command("list", "algorithms", "--json") == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(listed) == set(ALGORITHMS) and len(listed) == 15
    for name, row in listed.items():
        assert set(row) == {*Method._fields, "hybrid"}
        assert row["hybrid"] == (ALGORITHMS[name].boundary != "none")
        assert all(row[key] for key in ("title", "paper", "uplink", "downlink", "rate", "leaves_device"))
        assert row["leaves_device"] == ", ".join(ALGORITHMS[name].leaves_device)
    assert hofl_command("list", "algorithms") == 0
    header, *rows = capsys.readouterr().out.splitlines()[1:]
    cells = [re.split(r" {2,}", line.strip()) for line in (header, *rows[: len(listed)])]
    assert cells[0] == [
        "name", "title", "paradigm", "boundary", "uploads a step", "local steps", "who backpropagates",
        "client memory", "up a round", "down a round",
    ]  # fmt: skip
    for shown in cells[1:]:
        row = ALGORITHMS[shown[0]]
        assert shown[1:] == [
            row.title, row.paradigm, row.boundary, row.uploads, row.local_steps, row.backpropagates,
            row.memory, row.uplink, row.downlink,
        ]  # fmt: skip
    note = " ".join(rows[len(listed) :])
    symbols = {s for m in ALGORITHMS.values() for s in re.findall(r"[A-Za-z_]+", m.uplink + " " + m.downlink)}
    assert symbols - {"ceil"} <= set(re.findall(r"[A-Za-z_]+", note))


def test_listed_families_are_those_of_the_models() -> None:
    from hofl.commands.listing import FAMILIES
    from hofl.models import tiny

    assert set(FAMILIES) == set(tiny.FAMILIES)


def test_defect_is_one_line(capsys, monkeypatch, at) -> None:
    monkeypatch.delenv("HOFL_TRACEBACK", raising=False)
    monkeypatch.setattr("hofl.commands.listing.print_json", lambda value: 1 / 0)
    assert hofl_command("list", "tasks", "--json") == 1
    said = capsys.readouterr().err
    assert said.startswith("hofl: unexpected ZeroDivisionError at test_cli.py:") and said.count("\n") == 1


def test_python_interface(at) -> None:
    summary = hofl.run(hofl.load_config(FEDAVG, "rounds=1"), "p")
    assert summary["rounds"] == 1 and hofl.read_run("p").summary == summary


def test_command_starts_fast_and_without_torch(at) -> None:
    code = "import sys, hofl.cli; print('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert (
        subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "False"
    )
    begun = time.perf_counter()
    shown = subprocess.run(
        [sys.executable, "-m", "hofl", "frob"], env=environment, capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stdout) == (2, "") and shown.stderr.startswith("hofl: No such command")
    assert time.perf_counter() - begun < 10  # a tenth of this on an idle machine; with torch it is not


def test_tiers_are_equal_and_know_no_label() -> None:
    from hofl.build import boundaries_of
    from hofl.core.layout import Layout

    layout = Layout.build([("w", (2,), block) for block in range(4)], 4)
    config = load(HO_FL, ["partition.clients=30"])
    dealt = boundaries_of(config, layout, 30)
    assert np.bincount(dealt).tolist() == [0, 10, 10, 10]
    assert dealt == boundaries_of(config, layout, 30)
    assert dealt != boundaries_of(load(HO_FL, ["seed=7"]), layout, 30)
    listed = load(HO_FL, ["partition.clients=4", "cohort.assign=listed", "cohort.boundaries=[4,0,1,1]"])
    assert boundaries_of(listed, layout, 4) == (4, 0, 1, 1)


def test_clients_without_data_are_never_drawn() -> None:
    """C39."""
    from hofl.build import build_draw, build_policy
    from hofl.core.layout import Layout

    layout = Layout.build([("w", (2,), block) for block in range(4)], 4)
    config, sizes = load(HO_FL, ["cohort.size=50%"]), [0, 3, 0, 5, 1, 2]
    policy = build_policy(config, layout, (1, 1, 2, 2, 3, 3), sizes)
    draw = build_draw(config, policy, sizes)
    drawn = [draw(t, 0) for t in range(20)]
    assert {len(c) for c in drawn} == {2} and {i for c in drawn for i in c} == {1, 3, 4, 5}
    assert drawn == [draw(t, 0) for t in range(20)]
    assert drawn != [draw(t, 1) for t in range(20)]  # a repeated round has a fresh cohort

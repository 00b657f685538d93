# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import tomli_w

from hofl import read_run
from hofl.errors import DataError, RecordError
from hofl.report import compare, tables
from hofl.report.plots import curve, plot
from hofl.report.rows import amount, cumulative


def write_run(folder, value, *, seed=1, status="done", n=400, finished=True, data="d", **config):
    folder.mkdir()
    settings = {"algorithm": "ho_fl", "seed": seed, "zo": {"estimator": "forward"}, "optimizer": {"lr": 0.1}}
    settings |= {"cohort": {"boundaries": [1, 2]}, "task": {"name": "synthetic"}} | config
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    (folder / "manifest.json").write_text(json.dumps({"fingerprints": {"data": data}}))
    rows = [{"round": 0, "metrics": {"accuracy": 0.5}, "bytes_up": {}, "examples_seen": 0}]
    for t in (1, 2):
        part = {"scalars": 2**19, "weights": 2**19}
        metrics = {"accuracy": value} if t == 2 else None
        rows.append({"round": t, "metrics": metrics, "bytes_up": part, "examples_seen": 10 * t})
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "metric": {"name": "accuracy", "value": value, "n": n},
        "zero_shot": 0.5,
        "majority_class": 0.51,
    }
    summary |= {"examples_seen": 20, "bytes_up": {"scalars": 2**21}, "bytes_down": {"weights": 3 * 2**20}}
    summary |= {"seconds": 3.0, "peak_bytes": 2**30, "final_sha256": "ab" * 32, "status": status}
    if status == "diverged":
        summary |= {"diverged_round": 2}
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary))
    return read_run(folder)


def seeds(tmp_path, name, values, **config):
    return [write_run(tmp_path / f"{name}{i}", v, seed=i, **config) for i, v in enumerate(values)]


FEDAVG = {"algorithm": "fedavg", "cohort": {"boundaries": []}}


def test_c15_mean_sd_and_no_winner(tmp_path) -> None:
    runs = seeds(tmp_path, "a", [0.50, 0.52, 0.91]) + seeds(tmp_path, "b", [0.60, 0.61, 0.62], **FEDAVG)
    groups = compare.group(runs)
    table = compare.summary_table(groups)
    assert [row[:3] for row in table.rows] == [
        ("ho_fl forward b=1,2", "3", "0.643 ± 0.231"),
        ("fedavg", "3", "0.610 ± 0.010"),
    ]
    assert compare.verdicts(groups) == [
        "ho_fl forward b=1,2 / fedavg: not separable: their mean ± SD intervals overlap"
    ]
    assert "400 evaluation examples, one is 0.0025" in table.title
    assert [row[1:3] for row in compare.seed_table(groups).rows[:3]] == [
        ("0", "0.500"),
        ("1", "0.520"),
        ("2", "0.910"),
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([0.90, 0.91], [0.60, 0.61], "ho_fl forward b=1,2 is ahead of fedavg by 0.300"),
        ([0.60, 0.61], [0.90, 0.91], "fedavg is ahead of ho_fl forward b=1,2 by 0.300"),
        ([0.9], [0.60, 0.61], "not separable: needs two seeds or more"),
        ([0.5, 0.5], [0.5, 0.5], "not separable: their mean"),
    ],
)
def test_verdicts(tmp_path, ours, theirs, expected) -> None:
    groups = compare.group(seeds(tmp_path, "a", ours) + seeds(tmp_path, "b", theirs, **FEDAVG))
    assert expected in compare.verdicts(groups)[0]


def test_c67_divergence_is_shown_instead_of_a_number(tmp_path) -> None:
    runs = seeds(tmp_path, "a", [0.9, 0.9]) + seeds(tmp_path, "b", [0.1], status="diverged", **FEDAVG)
    groups = compare.group(runs)
    assert compare.summary_table(groups).rows[1][2] == "– (diverged@r2)"
    assert compare.seed_table(groups).rows[2][2] == "diverged@r2"
    assert compare.verdicts(groups)[0].endswith("not separable: diverged@r2")
    assert compare.to_json(groups)["groups"][1]["values"] == []


def test_unfinished_run_is_named(tmp_path) -> None:
    groups = compare.group(
        [write_run(tmp_path / "a", 0.9, finished=False), write_run(tmp_path / "b", 0.8, seed=2)]
    )
    assert groups[0].values == [0.8]
    assert "(unfinished@r2)" in compare.summary_table(groups).rows[0][2]


def test_frozen_control_is_the_same_configuration_without_probes(tmp_path) -> None:
    frozen = {"zo": {"estimator": "none"}}
    runs = seeds(tmp_path, "a", [0.9, 0.8]) + seeds(tmp_path, "n", [0.7, 0.72], **frozen)
    runs += seeds(tmp_path, "o", [0.1], optimizer={"lr": 0.2}, **frozen)
    groups = compare.group(runs)
    assert [compare.control(g, groups) for g in groups] == [groups[1], None, None]
    assert compare.summary_table(groups).rows[0][6] == "0.710 ± 0.014"


@pytest.mark.parametrize(
    "zo",
    [
        {"estimator": "sketch", "directions": "hadamard", "probes": 64},
        {"estimator": "tangent", "optimizer": {"name": "sgd", "lr": 3.0}},
        {"estimator": "central", "radius": 0.1},
    ],
)
def test_frozen_control_is_found_whatever_is_set_for_the_probes(tmp_path, zo) -> None:
    arm = write_run(tmp_path / "a", 0.9, zo=zo)
    frozen = write_run(tmp_path / "n", 0.7, zo={"estimator": "none", "optimizer": {"lr": 0.1}})
    groups = compare.group([arm, frozen])
    assert [compare.control(g, groups) for g in groups] == [groups[1], None]


def test_a_method_without_a_bottom_has_no_control(tmp_path) -> None:
    settings = FEDAVG | {"zo": {"estimator": "none"}}
    runs = [write_run(tmp_path / "a", 0.9, **FEDAVG), write_run(tmp_path / "b", 0.9, **settings)]
    groups = compare.group(runs)
    assert [compare.control(g, groups) for g in groups] == [None, None]


def test_an_inherited_optimizer_is_no_difference(tmp_path) -> None:
    same, own = ({"estimator": "forward", "optimizer": {"lr": lr}} for lr in (0.1, 0.2))
    runs = [write_run(tmp_path / "a", 0.9), write_run(tmp_path / "b", 0.8, seed=2, zo=same)]
    groups = compare.group([*runs, write_run(tmp_path / "c", 0.7, zo=own)])
    assert [g.label for g in groups] == [
        "ho_fl forward b=1,2 zo.optimizer.lr=unset",
        "ho_fl forward b=1,2 zo.optimizer.lr=0.2",
    ]
    assert groups[0].values == [0.9, 0.8]


def test_labels_tell_groups_apart(tmp_path) -> None:
    runs = [write_run(tmp_path / "a", 0.9), write_run(tmp_path / "b", 0.9, optimizer={"lr": 0.2})]
    assert [g.label for g in compare.group(runs)] == [
        "ho_fl forward b=1,2 optimizer.lr=0.1",
        "ho_fl forward b=1,2 optimizer.lr=0.2",
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"data": "other"}, "data fingerprint"),
        ({"n": 7}, "evaluation set"),
        ({"task": {"name": "text"}}, "task"),
        ({"partition": {"kind": "iid"}}, "partition"),
    ],
)
def test_other_data_is_refused(tmp_path, change, what) -> None:
    settings = {"partition": {"kind": "by_label"}, **change}
    runs = [
        write_run(tmp_path / "a", 0.9, partition={"kind": "by_label"}),
        write_run(tmp_path / "b", 0.9, **settings),
    ]
    with pytest.raises(DataError, match=rf"differ in their \[?{what}"):
        compare.group(runs)


def test_a_run_given_twice_is_refused(tmp_path) -> None:
    run = write_run(tmp_path / "a", 0.9)
    with pytest.raises(DataError, match="given twice"):
        compare.group([run, run])
    with pytest.raises(DataError, match="at least one"):
        compare.group([])


def test_costs_are_totals_in_units(tmp_path) -> None:
    row = compare.summary_table(compare.group([write_run(tmp_path / "a", 0.9)])).rows[0]
    assert row[-6:] == ("20", "2.0 MiB", "3.0 MiB", "1.0 GiB", "3.00 s", "1 of 1 done")


def test_torn_last_line_is_left_out(tmp_path) -> None:
    write_run(tmp_path / "a", 0.9)
    (tmp_path / "a" / "rounds.jsonl").write_bytes(b'{"round": 1}\n{"round": 2')
    assert read_run(tmp_path / "a").rows == ({"round": 1},)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("rounds.jsonl", '{"round": 1\n{"round": 2}\n', RecordError, r"rounds\.jsonl:1: not JSON"),
        ("rounds.jsonl", '{"metrics": null}\n', RecordError, r"rounds\.jsonl:1: not a row"),
        ("summary.json", "[]", DataError, r"summary\.json is damaged: it is no JSON object"),
        ("summary.json", '{"status": "done"}', DataError, r"summary\.json is damaged: a finished run"),
        (
            "summary.json",
            '{"metric": {"name": "accuracy", "value": null, "n": 4}}',
            DataError,
            r"summary\.json is damaged: a finished run",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, error, message) -> None:
    write_run(tmp_path / "a", 0.9)
    (tmp_path / "a" / name).write_text(content)
    with pytest.raises(error, match=message) as caught:
        read_run(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_a_run_that_diverged_has_no_value(tmp_path) -> None:
    write_run(tmp_path / "a", None, status="diverged")
    assert read_run(tmp_path / "a").status == "diverged@r2"


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch) -> None:
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", denied)
    with pytest.raises(DataError, match=r"cannot be read [(]Permission denied[)]"):
        read_run(tmp_path)


def test_no_run_folder(tmp_path) -> None:
    with pytest.raises(DataError, match=r"is no run folder: it has no config\.toml"):
        read_run(tmp_path)
    (tmp_path / "config.toml").write_text("a =")
    with pytest.raises(DataError, match=r"config\.toml is damaged"):
        read_run(tmp_path)


def test_running_totals() -> None:
    assert cumulative([{"b": {"x": 1, "y": 2}}, {}, {"b": 4}], "b") == [3.0, 3.0, 7.0]
    assert (amount(None), amount("7"), amount({"a": {"b": 2.5}})) == (0.0, 0.0, 2.5)


@pytest.mark.parametrize(
    ("against", "x"), [("round", [0.0, 2.0]), ("examples_seen", [0.0, 20.0]), ("bytes_up", [0.0, 2.0])]
)
def test_curve(tmp_path, against, x) -> None:
    assert curve(write_run(tmp_path / "a", 0.9), against, "accuracy") == (x, [0.5, 0.9])


def test_plot_is_a_png(tmp_path) -> None:
    plot(compare.group(seeds(tmp_path, "a", [0.9, 0.8])), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "shown"),
    [("a\x1b[2Jb", "a[2Jb"), ("x\ny", "x y"), ("\u202eevil\x9b", "evil"), ("±–日本", "±–日本"), (3, "3")],
)
def test_t18_control_characters_are_stripped(given, shown) -> None:
    assert tables.clean(given) == shown


def test_markdown_escapes() -> None:
    table = tables.Table("t", ("a", "b"), (("<script>x</script>", "1|2\x1b"),))
    assert tables.to_markdown(table) == (
        "### t\n\n| a | b |\n|---|---:|\n| &lt;script&gt;x&lt;/script&gt; | 1\\|2 |\n"
    )


def test_rich_obeys_no_markup(capsys) -> None:
    from hofl.commands.output import print_table

    print_table(tables.Table("", ("a",), (("[bold red]x[/]\x1b[31m",),)))
    shown = capsys.readouterr().out
    assert "[bold red]x[/][31m" in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tables.size(0), "0 B"),
        (tables.size(1023), "1023 B"),
        (tables.size(1536), "1.5 KiB"),
        (tables.size(None), "–"),
        (tables.seconds(0.4), "0.40 s"),
        (tables.seconds(75), "75 s"),
        (tables.seconds(200), "3 min 20 s"),
        (tables.seconds(7500), "2 h 5 min"),
        (tables.seconds(None), "–"),
        (tables.spread(0.5, None), "0.500"),
    ],
)
def test_units(shown, expected) -> None:
    assert shown == expected

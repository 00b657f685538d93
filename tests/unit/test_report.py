# SPDX-License-Identifier: Apache-2.0
import io
import json

import pytest
import tomli_w
from rich.console import Console

from hofl import read_run
from hofl.errors import DataError, RecordError
from hofl.report import budgets, compare, groups, plots, recovery, tables
from hofl.report.rows import amount, cumulative, curve


def write_run(folder, value, *, seed=1, status="done", n=400, finished=True, data="d", **config):
    folder.mkdir()
    settings = {"algorithm": "ho_fl", "seed": seed, "zo": {"estimator": "forward"}, "optimizer": {"lr": 0.1}}
    settings |= {"cohort": {"boundaries": [1, 2]}, "task": {"name": "synthetic"}} | config
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    (folder / "manifest.json").write_text(json.dumps({"fingerprints": {"data": data}, "blocks": 4}))
    rows = [{"round": 0, "metrics": {"accuracy": 0.5}, "bytes_up": {}, "examples_seen": 0}]
    for t in (1, 2):
        part = {"scalars": 2**19, "weights": 2**19}
        metrics = {"accuracy": value} if t == 2 else None
        row = {"round": t, "metrics": metrics, "bytes_up": part, "bytes_down": {"weights": 2**20}}
        rows.append(row | {"examples_seen": 10 * t, "boundaries": settings["cohort"].get("boundaries")})
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "metric": {"name": "accuracy", "value": value, "n": n},
        "zero_shot": 0.5,
        "majority_class": 0.51,
    }
    summary |= {"examples_seen": 20, "bytes_up": {"scalars": 2**21}, "bytes_down": {"weights": 3 * 2**20}}
    summary |= {
        "seconds": 3.0,
        "peak_bytes": 2**30,
        "client_peak_bytes": 5 * 2**19 * seed,
        "final_sha256": "ab" * 32,
        "status": status,
    }
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
    found = groups.group(runs)
    table = compare.summary_table(found)
    assert [row[:3] for row in table.rows] == [
        ("ho_fl forward b=1,2", "3", "0.643 ± 0.231"),
        ("fedavg", "3", "0.610 ± 0.010"),
    ]
    assert compare.verdicts(found) == [
        "ho_fl forward b=1,2 / fedavg: not separable: their mean ± SD intervals overlap"
    ]
    assert "400 evaluation examples, one is 0.0025" in table.title
    assert [row[1:3] for row in compare.seed_table(found).rows[:3]] == [
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
    found = groups.group(seeds(tmp_path, "a", ours) + seeds(tmp_path, "b", theirs, **FEDAVG))
    assert expected in compare.verdicts(found)[0]


def test_a_verdict_says_where_the_examples_differ(tmp_path) -> None:
    ours = seeds(tmp_path, "a", [0.90, 0.91])
    theirs = [write_curve(tmp_path / f"b{i}", [(0, 0, 0.5), (4, 1, 0.6)], seed=i, **FEDAVG) for i in (0, 1)]
    for run in theirs:
        summary = json.loads((run.folder / "summary.json").read_text()) | {"examples_seen": 4000}
        (run.folder / "summary.json").write_text(json.dumps(summary))
    (line,) = compare.verdicts(groups.group([*ours, *(read_run(run.folder) for run in theirs)]))
    assert line.endswith("do not overlap; after 20 and 4,000 examples")


def test_many_verdicts_are_in_the_file_alone(tmp_path, capsys) -> None:
    from hofl.cli import main

    names = ("ho_sfl", "hosl", "heron_sfl", "splitlora", "zo_sfl", "decomfl", "hiso", "mezo")
    runs = [
        run
        for n in names
        for lr in (0.1, 0.2, 0.3)
        for run in seeds(tmp_path, f"{n}{lr}", [0.5, 0.6], algorithm=n, optimizer={"lr": lr})
    ]
    with pytest.raises(SystemExit) as ended:
        main(["compare", *(str(r.folder) for r in runs), "--out", str(tmp_path / "c")])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "23 pairs, 0 of them with a winner" in shown and "Every run" not in shown
    written = (tmp_path / "c" / "compare.md").read_text()
    assert written.count("\n- ") == 23 and "### Every run" in written  # each of 24 groups with the best


def test_of_many_groups_each_is_held_against_its_control_and_the_best(tmp_path) -> None:
    frozen, cuts = {"zo": {"estimator": "none"}}, [{"cohort": {"boundaries": [cut]}} for cut in (1, 2, 3, 4)]
    runs = [r for i, cut in enumerate(cuts) for r in seeds(tmp_path, f"h{i}", [0.7, 0.7 + i / 100], **cut)]
    runs += [r for i, cut in enumerate(cuts) for r in seeds(tmp_path, f"n{i}", [0.5, 0.5], **cut, **frozen)]
    found = compare.verdicts(groups.group(runs))
    assert len(found) == 7 + 3  # all with ho_fl forward b=4; the other three with their controls
    assert all("b=4" in line or line.count("b=1") != 1 for line in found)


def test_c67_divergence_is_shown_instead_of_a_number(tmp_path) -> None:
    runs = seeds(tmp_path, "a", [0.9, 0.9]) + seeds(tmp_path, "b", [0.1], status="diverged", **FEDAVG)
    found = groups.group(runs)
    assert compare.summary_table(found).rows[1][2] == "– (diverged@r2)"
    assert compare.seed_table(found).rows[2][2] == "diverged@r2"
    assert compare.verdicts(found)[0].endswith("not separable: diverged@r2")
    assert compare.to_json(found)["groups"][1]["values"] == []


def test_unfinished_run_is_named(tmp_path) -> None:
    found = groups.group(
        [write_run(tmp_path / "a", 0.9, finished=False), write_run(tmp_path / "b", 0.8, seed=2)]
    )
    assert found[0].values == [0.8]
    assert "(unfinished@r2)" in compare.summary_table(found).rows[0][2]


def test_frozen_control_is_the_same_configuration_without_probes(tmp_path) -> None:
    frozen = {"zo": {"estimator": "none"}}
    runs = seeds(tmp_path, "a", [0.9, 0.8]) + seeds(tmp_path, "n", [0.7, 0.72], **frozen)
    runs += seeds(tmp_path, "o", [0.1], optimizer={"lr": 0.2}, **frozen)
    found = groups.group(runs)
    assert [recovery.control(g, found) for g in found] == [found[1], None, None]
    assert compare.summary_table(found).rows[0][6] == "0.710 ± 0.014"


def test_bottom_recovery(tmp_path) -> None:
    """rho of the means over the seeds that all three have: (0.80 - 0.70) / (0.90 - 0.70)."""
    hybrid, frozen = seeds(tmp_path, "h", [0.81, 0.79, 0.1]), {"zo": {"estimator": "none"}}
    runs = hybrid + seeds(tmp_path, "n", [0.70, 0.70], **frozen)
    checkpointed = FEDAVG | {"model": {"checkpointing": True}, "zo": {"estimator": "tangent"}}
    runs += seeds(tmp_path, "f", [0.88, 0.92], **checkpointed)
    found = groups.group(runs)
    assert [recovery.recovery(g, found) for g in found] == [pytest.approx(0.5), None, None]
    table = compare.summary_table(found)
    assert [row[table.columns.index("recovered")] for row in table.rows] == ["0.50", "–", "–"]
    assert [g["bottom_recovery"] for g in compare.to_json(found)["groups"]] == [
        pytest.approx(0.5),
        None,
        None,
    ]


@pytest.mark.parametrize(
    "other", [FEDAVG | {"optimizer": {"lr": 0.2}}, FEDAVG | {"cohort": {"boundaries": [], "size": 9}}]
)
def test_no_recovery_beside_fedavg_on_other_work(tmp_path, other) -> None:
    runs = [write_run(tmp_path / "h", 0.8), write_run(tmp_path / "n", 0.7, zo={"estimator": "none"})]
    found = groups.group([*runs, write_run(tmp_path / "f", 0.9, **other)])
    assert [recovery.recovery(g, found) for g in found] == [None] * 3


def test_the_recovery_table_has_a_line_a_control(tmp_path) -> None:
    """By hand: (0.80 - 0.70) / (0.90 - 0.70), (0.75 - 0.70) / 0.20; at 3, of the shared seed, 0.3 / 0.28."""
    deep, sgd = {"cohort": {"boundaries": [3]}}, {"optimizer": {"name": "sgd", "lr": 1.0}}
    frozen, sketch = {"zo": {"estimator": "none"}}, {"estimator": "sketch", "probes": 64}
    runs = seeds(tmp_path, "h", [0.81, 0.79]) + seeds(tmp_path, "n", [0.70, 0.70], **frozen)
    runs += seeds(tmp_path, "s", [0.74, 0.76], zo=sketch) + seeds(tmp_path, "g", [0.7, 0.7], zo=sketch | sgd)
    runs += seeds(tmp_path, "f", [0.88, 0.92], **FEDAVG)
    runs += seeds(tmp_path, "m", [0.60, 0.60], **frozen, **deep) + seeds(
        tmp_path, "d", [0.9], zo=sketch, **deep
    )
    found = groups.group(runs)
    table = recovery.recovery_table(found)
    assert table is not None
    names = [name.replace("zo.optimizer.", "") for name in table.columns]
    assert names[:3] == ["runs of", "frozen control", "forward q=None"] and names[-1] == "fedavg"
    assert names[3:5] == ["sketch q=64 lr=0.1 name=unset", "sketch q=64 lr=1.0 name=sgd"]
    assert [row[0] for row in table.rows] == ["ho_fl b=1,2", "ho_fl b=3"]
    assert table.rows[0][1:4] == ("0.700 ± 0.000", "0.800 ± 0.014 (0.50)", "0.750 ± 0.014 (0.25)")
    assert table.rows[1] == ("ho_fl b=3", "0.600 ± 0.000", "–", "0.900 (1.07)", "–", "0.900 ± 0.028")
    assert recovery.plot_recovery(found, tmp_path / "r.png") and (tmp_path / "r.png").stat().st_size > 5000
    assert recovery.recovery_table(found[:1]) is None and not recovery.plot_recovery(
        found[:1], tmp_path / "x"
    )
    assert not (tmp_path / "x").exists()


def test_no_recovery_where_fedavg_is_not_ahead_of_the_control(tmp_path) -> None:
    runs = [write_run(tmp_path / "h", 0.8), write_run(tmp_path / "n", 0.9, zo={"estimator": "none"})]
    found = groups.group([*runs, write_run(tmp_path / "f", 0.9, **FEDAVG)])
    assert [recovery.recovery(g, found) for g in found] == [None] * 3


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
    found = groups.group([arm, frozen])
    assert [recovery.control(g, found) for g in found] == [found[1], None]


def test_a_method_without_a_bottom_has_no_control(tmp_path) -> None:
    settings = FEDAVG | {"zo": {"estimator": "none"}}
    runs = [write_run(tmp_path / "a", 0.9, **FEDAVG), write_run(tmp_path / "b", 0.9, **settings)]
    found = groups.group(runs)
    assert [recovery.control(g, found) for g in found] == [None, None]


def test_an_inherited_optimizer_is_no_difference(tmp_path) -> None:
    same, own = ({"estimator": "forward", "optimizer": {"lr": lr}} for lr in (0.1, 0.2))
    runs = [write_run(tmp_path / "a", 0.9), write_run(tmp_path / "b", 0.8, seed=2, zo=same)]
    found = groups.group([*runs, write_run(tmp_path / "c", 0.7, zo=own)])
    assert [g.label for g in found] == [
        "ho_fl forward b=1,2 zo.optimizer.lr=0.1",
        "ho_fl forward b=1,2 zo.optimizer.lr=0.2",
    ]
    assert found[0].values == [0.9, 0.8]


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"algorithm": "ho_sfl", "cohort": {"boundaries": [2]}}, "ho_sfl forward b=2"),
        (
            {"algorithm": "hosl", "zo": {"estimator": "central"}, "cohort": {"boundaries": [2]}},
            "hosl central b=2",
        ),
        ({"algorithm": "splitfed_v1", "cohort": {"boundaries": [2]}}, "splitfed_v1 b=2"),
        ({"algorithm": "zo_sfl", "cohort": {"boundaries": [2]}}, "zo_sfl b=2"),
        ({"algorithm": "decomfl", "cohort": {"boundaries": []}}, "decomfl"),
        ({"algorithm": "fedavg", "cohort": {}}, "fedavg"),
        ({"cohort": {"boundaries": [12, 3, 0, 3]}}, "ho_fl forward b=0,3,12"),
    ],
)
def test_a_label_is_short(tmp_path, config, label) -> None:
    assert groups.group([write_run(tmp_path / "a", 0.9, **config)])[0].label == label


@pytest.mark.parametrize("algorithm", ["ho_fl", "ho_sfl", "hosl", "heron_sfl"])
def test_every_method_that_probes_a_bottom_finds_its_control(tmp_path, algorithm) -> None:
    frozen = {"zo": {"estimator": "none"}}
    runs = [
        write_run(tmp_path / "a", 0.9, algorithm=algorithm),
        write_run(tmp_path / "o", 0.8, algorithm="splitlora", **frozen),
        write_run(tmp_path / "n", 0.7, algorithm=algorithm, **frozen),
    ]
    found = groups.group(runs)
    assert [recovery.control(g, found) for g in found] == [found[2], None, None]


@pytest.mark.parametrize("algorithm", ["splitfed_v1", "splitlora", "zo_sfl", "mu_splitfed"])
def test_a_method_that_does_not_has_none(tmp_path, algorithm) -> None:
    frozen = {"zo": {"estimator": "none"}}
    runs = [write_run(tmp_path / "a", 0.9, algorithm=algorithm)]
    found = groups.group([*runs, write_run(tmp_path / "n", 0.7, algorithm=algorithm, **frozen)])
    assert [recovery.control(g, found) for g in found] == [None, None]


def test_labels_tell_groups_apart(tmp_path) -> None:
    runs = [write_run(tmp_path / "a", 0.9), write_run(tmp_path / "b", 0.9, optimizer={"lr": 0.2})]
    assert [g.label for g in groups.group(runs)] == [
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
        groups.group(runs)


def test_a_run_given_twice_is_refused(tmp_path) -> None:
    run = write_run(tmp_path / "a", 0.9)
    with pytest.raises(DataError, match="given twice"):
        groups.group([run, run])
    with pytest.raises(DataError, match="at least one"):
        groups.group([])


def test_costs_are_totals_in_units(tmp_path) -> None:
    """20 examples at boundaries 1 and 2 of 4, q = 2: 3 bottom passes and 3 of the top, 3 forwards each."""
    run = write_run(tmp_path / "a", 0.9, zo={"estimator": "forward", "probes": 2})
    row = compare.summary_table(groups.group([run])).rows[0]
    assert row[-7:] == ("20", "2.0 MiB", "3.0 MiB", "2.5 MiB", "60", "3.00 s", "1 of 1 done")


def test_the_largest_client_of_any_seed_is_shown(tmp_path) -> None:
    found = groups.group([write_run(tmp_path / f"a{seed}", 0.9, seed=seed) for seed in (1, 3, 2)])
    assert compare.summary_table(found).rows[0][-4] == "7.5 MiB"
    assert compare.to_json(found)["groups"][0]["client_peak_bytes"] == 15 * 2**19


@pytest.mark.parametrize(
    ("config", "forwards"),
    [
        ({"zo": {"estimator": "forward", "probes": 5}}, 20 * (6 * 3 / 8 + 3 * 5 / 8)),
        ({"zo": {"estimator": "none"}}, 20 * (3 / 8 + 3 * 5 / 8)),
        ({"model": {"checkpointing": True}}, 20 * (3 * 3 / 8 + 4 * 5 / 8)),
        ({"algorithm": "splitfed_v1"}, 20 * 4 * 3 / 8),
        ({"algorithm": "fedavg", "cohort": {"boundaries": []}}, 60),
        (
            {"algorithm": "mezo", "cohort": {"boundaries": []}, "zo": {"estimator": "central", "probes": 2}},
            80,
        ),
        ({"algorithm": "someone_elses"}, None),
    ],
)
def test_client_forwards(tmp_path, config, forwards) -> None:
    """Boundaries 1 and 2 of 4 blocks: a mean share of 3/8."""
    zo = {"zo": {"estimator": "forward", "probes": 2}}
    assert budgets.client_forwards(write_run(tmp_path / "a", 0.9, **(zo | config))) == forwards


def test_a_folder_that_does_not_say_its_blocks_has_forwards_only_where_none_matter(tmp_path) -> None:
    runs = [write_run(tmp_path / "a", 0.9), write_run(tmp_path / "b", 0.9, **FEDAVG)]
    for run in runs:
        (run.folder / "manifest.json").write_text("{}")
    found = [budgets.client_forwards(read_run(run.folder)) for run in runs]
    assert found == [None, 60]


def write_curve(folder, points, **config):
    """A run with the measured rows ``(examples, bytes, accuracy or None)``."""
    run = write_run(folder, points[-1][2], **config)
    rows, sent = [], 0
    for number, (examples, total, accuracy) in enumerate(points):
        metrics = None if accuracy is None else {"accuracy": accuracy}
        row = {"round": number, "metrics": metrics, "examples_seen": examples}
        rows.append(row | {"bytes_up": {"weights": total - sent}, "bytes_down": {}})
        sent = total
    (run.folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(run.folder)


def test_equal_budgets(tmp_path) -> None:
    """40 examples and 2 KiB are what all have spent; a measurement above either does not count."""
    ours = [(0, 0, 0.5), (20, 1024, 0.6), (40, 2048, None), (60, 3072, 0.8), (80, 4096, 0.9)]
    theirs = [(0, 0, 0.5), (40, 4096, 0.7)]
    cheap = [(0, 0, 0.5), (50, 1024, 0.55), (100, 2048, 0.65)]
    central = [(0, 0, 0.5), (30, 0, 0.52), (60, 0, 0.53)]
    other = {"cohort": {"boundaries": []}}
    found = groups.group(
        [
            write_curve(tmp_path / "a1", ours, seed=1),
            write_curve(tmp_path / "a2", [(x, b, a and a + 0.02) for x, b, a in ours], seed=2),
            write_curve(tmp_path / "b", theirs, **FEDAVG),
            write_curve(tmp_path / "c", cheap, algorithm="decomfl", **other),
            write_curve(tmp_path / "d", central, algorithm="mezo", **other),
            write_curve(
                tmp_path / "e", [(0, 0, 0.5), (1, 1, 0.5)], status="diverged", algorithm="hiso", **other
            ),
        ]
    )
    assert [budgets.ladder(found, against) for against in ("examples_seen", "bytes_total")] == [[40], [2048]]
    table = budgets.budget_table(found)
    assert table.columns[1:] == ("within 40 examples", "measured at", "within 2.0 KiB", "measured at")
    assert [row[1:] for row in table.rows] == [
        ("0.610 ± 0.014", "20", "0.610 ± 0.014", "1.0 KiB"),
        ("0.700", "40", "0.500", "0 B"),
        ("0.500", "0", "0.650", "2.0 KiB"),
        ("0.520", "30", "0.530", "0 B"),
        ("–", "–", "–", "–"),
    ]
    (equal,) = compare.to_json(found)["equal_budgets"]["bytes_total"]
    assert equal["budget"] == 2048
    assert equal["groups"]["decomfl"] == {"values": [0.65], "spent": [2048.0]}


def test_budgets_of_other_orders_follow(tmp_path) -> None:
    ends = (("decomfl", 7), ("hiso", 70), ("fedavg", 71), ("fedzo", 700), ("fedprox", 711))
    runs = [
        write_curve(tmp_path / name, [(0, 0, 0.5), (10, end, 0.7)], algorithm=name, cohort={})
        for name, end in ends
    ]
    found = groups.group(runs)
    assert budgets.ladder(found, "bytes_total") == [7, 71, 711]
    assert budgets.budget_table(found).rows[3][3::2] == ("0.500", "0.500", "0.700")


def test_no_budget_without_a_finished_run(tmp_path) -> None:
    found = groups.group([write_run(tmp_path / "a", 0.9, finished=False)])
    assert budgets.budget_table(found).rows == (("ho_fl forward b=1,2",),)
    assert budgets.budget_values(found) == {"examples_seen": [], "bytes_total": []}
    assert len(compare.tables(found)) == 2


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
    ("against", "x"),
    [("examples_seen", 20.0), ("bytes_up", 2.0**21), ("bytes_down", 2.0**21), ("bytes_total", 2.0**22)],
)
def test_curve(tmp_path, against, x) -> None:
    assert curve(write_run(tmp_path / "a", 0.9), against, "accuracy") == ([0.0, x], [0.5, 0.9])


def test_the_mean_curve_ends_with_the_shortest() -> None:
    assert plots.average([([0, 2, 4], [1, 2, 3]), ([0, 4], [3, 4])]) == ([0, 3], [2, 3])
    assert plots.average([]) == ([], [])


def test_fifteen_groups_look_different() -> None:
    looks = [plots.look(place) for place in range(28)]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 28
    assert len({(look["color"], look["marker"]) for look in looks[:15]}) == 15


def test_ends_far_apart_get_a_logarithmic_axis(tmp_path) -> None:
    near = [write_curve(tmp_path / f"n{i}", [(0, 0, 0.5), (9, 10, 0.6), (10, end, 0.7)], seed=i)
            for i, end in enumerate((20, 400))]  # fmt: skip
    assert plots.logarithmic(groups.group(near), "bytes_total") is False
    far = write_curve(tmp_path / "f", [(0, 0, 0.5), (9, 10, 0.6), (10, 401, 0.7)], seed=2)
    assert plots.logarithmic(groups.group([*near, far]), "bytes_total") is True
    assert plots.logarithmic(groups.group([*near, far]), "examples_seen") is False


@pytest.mark.parametrize("far", [1, 1000])
def test_plot_is_a_png(tmp_path, far) -> None:
    runs = seeds(tmp_path, "a", [0.9, 0.8])
    runs.append(write_curve(tmp_path / "b", [(0, 0, 0.5), (20 * far, 2**22 * far, 0.7)], **FEDAVG))
    runs.append(write_run(tmp_path / "c", 0.6, finished=False, algorithm="decomfl"))
    plots.plot(groups.group(runs), tmp_path / "p.png")
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


WIDE = tables.Table(
    "all",
    ("runs of", "n", "frozen control", "status"),
    (
        ("ho_fl forward b=1,2 optimizer.lr=0.1", "3", "0.710 ± 0.014", "3 of 3 done"),
        ("fedavg", "2", "–", "–"),
    ),
)


def printed(width):
    screen = Console(width=width, color_system=None, file=io.StringIO())
    for part in tables.fit(WIDE, width):
        screen.print(tables.to_rich(part))
    return screen.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_nothing_is_dropped_at_any_width(width) -> None:
    shown = printed(width)
    assert max(len(line) for line in shown.splitlines()) <= width
    for text in ("3", "0.710 ± 0.014", "3 of 3 done", "status", "frozen", "optimizer.lr"):
        assert text in shown


def test_a_narrow_screen_gets_several_tables_with_the_first_column_each() -> None:
    assert len(tables.fit(WIDE, 200)) == 1 and tables.fit(WIDE, 200)[0] is WIDE
    parts = tables.fit(WIDE, 40)
    assert [part.columns[0] for part in parts] == ["runs of"] * len(parts) and len(parts) == 2
    assert [part.title for part in parts] == ["all", ""]
    assert [c for part in parts for c in part.columns[1:]] == list(WIDE.columns[1:])


def test_text_wraps_before_a_table_is_divided() -> None:
    text = tables.Table("", ("name", "what"), (("a", "several words " * 10),), frozenset({0, 1}))
    (part,) = tables.fit(text, 50)
    assert part.widths == (4, 44)


def test_rich_obeys_no_markup(capsys) -> None:
    from hofl.commands.output import print_table

    print_table(tables.Table("", ("a",), (("[bold red]x[/]\x1b[31m",),)))
    shown = capsys.readouterr().out
    assert "[bold red]x[/][31m" in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tables.count(12800.4), "12,800"),
        (tables.count(None), "–"),
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

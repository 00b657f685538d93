# SPDX-License-Identifier: Apache-2.0
"""Which boundary fits which budget, what is planned for each method, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hofl.algorithms import ALGORITHMS
from hofl.budgets import Segment, at, fitted, settle, stated
from hofl.build import OUT, boundaries_of, deal
from hofl.config import Config, dump, load, parse
from hofl.core.sampling import uniform
from hofl.errors import ConfigError, ModelError
from hofl.needs import Needs, dry_run, plan_needs
from hofl.session import Session, prepare

CONFIGS = Path(__file__).parents[2] / "configs"
HO_FL = CONFIGS / "synthetic" / "ho_fl.toml"
BUDGETS = CONFIGS / "synthetic" / "budgets.toml"
NEEDS = Needs({0: 1000, 1: 800, 2: 600, 3: 400}, 100, 1.0)
CLIENTS = tuple(f"client-{n}" for n in range(12))


def with_budgets(*budgets: str, path: Path = HO_FL, more: tuple[str, ...] = ()) -> Config:
    listed = ", ".join(f'"{size}"' for size in budgets)
    own = ["cohort.boundaries=[]"] if "boundaries" in path.read_text() else []
    return load(path, [*own, "cohort.assign=budgets", f"cohort.budgets=[{listed}]", *more])


def test_the_smallest_boundary_that_fits() -> None:
    assert fitted(NEEDS, (1000, 999, 800, 400, 399), (OUT,) * 5) == (0, 1, 1, 3, OUT)


def test_who_has_no_budget_keeps_its_boundary() -> None:
    assert fitted(NEEDS, (0, 700, 0), (1, OUT, 0)) == (1, 2, 0)


def test_one_boundary_for_all_is_the_smallest_that_fits_all_who_can_take_part() -> None:
    assert fitted(NEEDS, (1000, 700, 100), (OUT,) * 3, shared=True) == (2, 2, OUT)


def test_the_margin_counts() -> None:
    needs = replace(NEEDS, margin=1.1)
    assert [needs.of(b) for b in needs.planned] == [1100, 880, 660, 440]
    assert fitted(needs, (1000, 440, 439), (OUT,) * 3) == (1, 3, OUT)


def test_a_client_over_its_budget_moves_one_boundary_on() -> None:
    """A plan at half of what is true: 1000 seems to fit 500."""
    took = {0: 990, 1: 790, 2: 590, 3: 390}
    tried: list[int] = []

    def dry(boundary: int) -> int:
        tried.append(boundary)
        return took[boundary]

    needs = replace(NEEDS, margin=0.5)
    found = settle(needs, [(1, (990, 800, 500, 600))], (OUT,) * 4, dry=dry)
    assert found.planned == ((0, 0, 0, 0),)
    assert found.cuts == ((0, 1, 3, 2),)
    assert tried == [0, 1, 2, 3]  # each once, however many clients
    assert found.moved(CLIENTS[:4])["client-1"] == (0, 1, "a dry run took 990 B, more than its 800 B")
    assert settle(needs, [(1, (990, 800, 500, 600))], (OUT,) * 4).cuts == ((0, 0, 0, 0),)


def test_who_is_over_everywhere_is_left_out() -> None:
    found = settle(replace(NEEDS, margin=0.1), [(1, (300,)), (5, (990,))], (OUT,), dry=lambda b: 900 - b)
    assert found.planned == ((0,), (0,)) and found.cuts == ((OUT,), (0,))
    assert found.left_out(("a",)) == {
        "a": "300 B is not enough: boundary 3 needs 897 B (897 bytes) at least",
    }
    assert not found.left_out(("a",), 1)


def test_tiers_are_dealt_as_those_of_boundaries() -> None:
    config = with_budgets("4kB", "3kB", "2kB")
    (segment,) = stated(config, CLIENTS)
    assert segment == (1, deal(config.seed, (4000, 3000, 2000), 12))
    tiers = load(HO_FL, ["cohort.boundaries=[4, 3, 2]"])
    layout = prepare(tiers).task.model.layout
    assert [1000 * b for b in boundaries_of(tiers, layout, 12)] == list(segment[1])


def test_as_many_budgets_as_clients_are_theirs_in_order() -> None:
    sizes = [f"{n + 1}kB" for n in range(12)]
    assert stated(with_budgets(*sizes), CLIENTS) == ((1, tuple(1000 * (n + 1) for n in range(12))),)


def test_changes_make_segments_in_order() -> None:
    more = ('cohort.budget_changes=[[9, "client-3", "7kB"], [5, 1, "6kB"], [9, 0, "5kB"]]',)
    found = dict(stated(with_budgets("4kB", "3kB", more=more), CLIENTS))
    tier = deal(42, (0, 1), 12)
    assert list(found) == [1, 5, 9]
    assert found[1] == tuple((4000, 3000)[t] for t in tier)
    assert found[5] == tuple((4000, 6000)[t] for t in tier)
    last = [(5000, 6000)[t] for t in tier]
    # of one round, in the order written: tier 0 comes after client-3, which is of tier 0 or not
    last[3] = 5000 if tier[3] == 0 else 7000
    assert found[9] == tuple(last)


def test_the_segment_of_a_round() -> None:
    made = [Segment(first, (), [], uniform(1, 1)) for first in (1, 5, 9)]
    assert [at(made, t).first for t in (0, 1, 4, 5, 8, 9, 1000)] == [1, 1, 1, 5, 5, 9, 9]


@pytest.fixture(scope="module")
def session() -> Session:
    return prepare(load(HO_FL))


@pytest.fixture(scope="module")
def needs(session: Session) -> Needs:
    return plan_needs(session.config, session.seen, 1.1)


def test_each_boundary_has_its_budget(needs: Needs) -> None:
    """What is needed to the byte, and one byte less."""
    assert list(needs.planned) == [0, 1, 2, 3, 4]
    needed = [needs.of(b) for b in needs.planned]
    assert needed == sorted(needed, reverse=True) == [math.ceil(1.1 * p) for p in needs.planned.values()]
    exact = prepare(with_budgets(*(f"{n}B" for n in needed), *["1GiB"] * 7))
    assert exact.boundaries == (0, 1, 2, 3, 4, *[0] * 7)
    short = prepare(with_budgets(*(f"{n - 1}B" for n in needed), *["1GiB"] * 7))
    assert short.boundaries == (1, 2, 3, 4, OUT, *[0] * 7)


def test_a_wider_margin_moves_boundaries_up(needs: Needs) -> None:
    sizes = [f"{needs.of(b)}B" for b in (0, 1, 2)]
    assert set(prepare(with_budgets(*sizes)).boundaries) == {0, 1, 2}
    wide = prepare(with_budgets(*sizes, more=("cohort.margin=1.105",)))
    assert set(wide.boundaries) == {1, 2, 3}


def test_a_dry_run_changes_nothing_and_counts_as_a_run_does(session: Session, tmp_path: Path) -> None:
    before = session.task.model.read()
    took = {b: dry_run(session.config, session.seen, b) for b in range(5)}
    assert (session.task.model.read() == before).all()
    assert list(took.values()) == sorted(took.values(), reverse=True)
    rows = [r for r in session.rows(tmp_path / "run", resume=False, warn=print) if r["round"]]
    largest = max(rows[0]["boundaries"], key=lambda b: took[b])
    assert rows[0]["client_peak_bytes"] == took[largest]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_method_has_needs(name: str) -> None:
    """What it needs fits; a byte is refused with the number it takes."""
    path = CONFIGS / "synthetic" / f"{name}.toml"
    if not path.exists():
        pytest.skip("no synthetic configuration")
    made = prepare(with_budgets("1MiB", path=path))
    least = {"each": 0, "none": 0, "one": 1}[ALGORITHMS[name].boundary]
    assert set(made.boundaries) == {least} and made.assigned is not None
    found = made.assigned.needs
    assert found.planned[least] > 0 and found.measured[least] > 0
    needed = min(map(found.of, found.planned))
    with pytest.raises(ConfigError, match=r"^cohort.budgets: no client can take part: .*needs .*\d+ bytes"):
        prepare(with_budgets(f"{needed // 4}B", path=path))


def test_a_split_client_holds_the_bottom_alone() -> None:
    """It needs more with a larger boundary, and the smallest budget decides for all."""
    path = CONFIGS / "synthetic" / "splitfed_v1.toml"
    session = prepare(with_budgets("1MiB", path=path))
    assert session.assigned is not None
    peaks = list(session.assigned.needs.planned.values())
    assert peaks == sorted(peaks)
    needed = session.assigned.needs.of(1)
    some = prepare(with_budgets("1MiB", f"{needed}B", f"{needed - 1}B", path=path))
    assert set(some.boundaries) == {1, OUT} and some.boundaries.count(OUT) == 4


TEXT = """
[model]
source = "tiny:{family}"
[task]
train = "{data}"
evaluation = "{data}"
[partition]
clients = 3
[cohort]
size = 2
assign = "budgets"
budgets = ["1GiB"]
"""


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", ()),
        ("llama", ("model.dtype=bfloat16", "model.checkpointing=true", "zo.estimator=tangent")),
        ("llama", ("task.template=head-v1",)),
        ("bert", ("task.template=head-v1",)),
        ("gpt2", ("model.train=full", 'cohort.budgets=["2GiB"]', "algorithm=fedavg")),
    ],
)
def test_the_plan_is_about_the_model_of_the_run(family: str, more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("sentence,label\n" + "good film,1\nbad film,0\n" * 20)
    text = TEXT.format(family=family, data=tmp_path / "d.csv")
    made = prepare(parse(text, "x", more))
    assert set(made.boundaries) == {0} and made.assigned is not None
    found = made.assigned.needs
    assert found.planned[0] > found.measured[0] > found.backbone >= 0


def test_below_the_backbone_and_another_model(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("sentence,label\n" + "good film,1\nbad film,0\n" * 20)
    text = TEXT.format(family="llama", data=tmp_path / "d.csv")
    made = prepare(parse(text, "x"))
    needs = plan_needs(made.config, made.seen, 1.1)
    with pytest.raises(ModelError, match="no plan for this model"):
        plan_needs(parse(text, "x", ["model.lora.rank=3"]), made.seen, 1.1)
    least, short = min(map(needs.of, needs.planned)), needs.backbone - 1
    with pytest.raises(ConfigError, match=rf"less than the backbone's own .*boundary 4 .*\({least} bytes\)"):
        prepare(parse(text, "x", [f'cohort.budgets=["{short}B"]']))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ['cohort.budgets=["2XB"]'],
            'cohort.budgets = ["2XB"]: must be a size above 0 such as 12GiB or 512MB',
        ),
        (['cohort.budgets=["-2GiB"]'], 'cohort.budgets = ["-2GiB"]: must be a size above 0 such as'),
        (['cohort.budgets=["0GiB"]'], "must be a size above 0"),
        (['cohort.budgets=[""]'], "must be a size above 0"),
        (["cohort.budgets=[2]"], "cohort.budgets = [2]: must be a string in quotes"),
        (["cohort.budgets=[]"], "cohort.budgets = []: is missing; name a size a tier"),
        (["cohort.boundaries=[1]"], "cohort.boundaries = [1]: must be absent: assign is 'budgets'"),
        (["cohort.margin=0.9"], "cohort.margin = 0.9: must be >= 1"),
        (["cohort.assign=tiers"], ": must be absent unless assign is 'budgets'"),
        (['cohort.budget_changes=[[1, 0, "1GiB"]]'], "must be changes such as [40, 0,"),
        (["cohort.budget_changes=[[3, 0]]"], "must be changes such as [40, 0,"),
        (['cohort.budget_changes=[[3, true, "1GiB"]]'], "must be changes such as [40, 0,"),
        (['cohort.budget_changes=[[3, -1, "1GiB"]]'], "must be changes such as [40, 0,"),
        (['cohort.budget_changes=[[3, 0, "1XB"]]'], "must be a size above 0 such as"),
        (["cohort.budget_changes=3"], "must be changes such as [40, 0,"),
        (['cohort.budget_changes=[[3, 4, "1GiB"]]'], "must name places 0..3 of cohort.budgets"),
        (
            ["algorithm=ho_sfl"],
            ": must be absent: ho_sfl has one boundary for all clients",
        ),
    ],
)
def test_bad_settings(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BUDGETS, overrides)
    line = str(caught.value)
    assert expected in line and "\n" not in line


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ['cohort.budgets=["1MB"]', "cohort.budget_changes=[[3, 'client-99', '1GB']]"],
            'no client "client-99"',
        ),
        (
            ["cohort.size=10"],
            "cohort.size = 10: must be at most the 9 clients that have data and can run some",
        ),
        (
            ['cohort.budgets=["1kB"]', "cohort.budget_changes=[]"],
            "cohort.budgets: no client can take part: 1000 B",
        ),
        (
            ['cohort.budgets=["1MB"]', "cohort.budget_changes=[[7, 0, '2kB']]"],
            "cohort.budgets: no client can take part from round 7 on: 2.0 KiB is not enough",
        ),
        (
            ['cohort.budgets=["1MB", "1MB"]', "cohort.budget_changes=[[7, 0, '2kB']]", "cohort.size=7"],
            "must be at most the 6 clients that have data and can run some boundary from round 7 on",
        ),
        (
            ["cohort.budgets=[" + '"1MB", ' * 12 + '"1MB"]', "cohort.budget_changes=[]"],
            "13 sizes for 12 clients",
        ),
    ],
)
def test_what_only_the_model_or_the_clients_show(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(load(BUDGETS, overrides))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_configuration_is_written_as_it_is_read() -> None:
    config = load(BUDGETS)
    assert parse(dump(config), "x") == config
    assert config.cohort.budget_changes[2] == (21, "client-0", "41KiB")

# SPDX-License-Identifier: Apache-2.0
"""What is recommended for a budget, what a plan costs by formula, and sizes as people write them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hofl.errors import ConfigError, ModelError
from hofl.memory.configured import fleet, of_config
from hofl.memory.named import NAMED, find
from hofl.memory.orders import Costs, Order, to_json
from hofl.memory.plan import ALL, Plan, marked, peak_of, plan, recommend, require_backbone
from hofl.memory.subject import Workload, staged, subject_of
from hofl.memory.units import bytes_of, positive_bytes_of

WORK = Workload(batch=4, length=32)
ROW = Order("hybrid", 2, "forward", False, 100, 3.0, 100)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(subject_of("tiny:llama"), WORK)


def test_rows_are_in_order_of_exactness(found: Plan) -> None:
    labels = [row.label for row in found.rows]
    assert labels[:4] == [
        "first order",
        "first order, checkpointed",
        "hybrid, boundary 1, sketch",
        "hybrid, boundary 1, sketch, checkpointed",
    ]
    assert labels[4] == "hybrid, boundary 1, tangent" and labels[-1] == "zeroth order, forward"
    assert len(labels) == 2 + 4 * 4 * 2 + 3


def test_the_most_exact_order_that_fits_is_recommended(found: Plan) -> None:
    for row in found.rows:
        answer = recommend(found, row.peak_bytes, margin=1.0)
        fitting = [other for other in found.rows if other.peak_bytes <= row.peak_bytes]
        best = min(fitting, key=lambda other: other.exactness)
        assert answer["fits"] and answer["label"] == best.label
        assert answer["left_bytes"] == row.peak_bytes - best.peak_bytes


def test_the_margin_is_kept(found: Plan) -> None:
    peak = found.rows[0].peak_bytes
    assert recommend(found, int(peak * 1.1) + 1)["label"] == "first order"
    assert recommend(found, int(peak * 1.1) - 1)["label"] != "first order"


def test_the_smallest_boundary_of_each_estimator(found: Plan) -> None:
    row = next(r for r in found.rows if r.label == "hybrid, boundary 3, forward")
    budget = row.peak_bytes
    assert found.smallest_boundary(budget, "forward", False, margin=1.0) == 3
    assert found.smallest_boundary(budget, "forward", True, margin=1.0) == 0
    assert found.smallest_boundary(found.backbone, "forward", False) is None


def test_what_to_change_when_nothing_fits(found: Plan) -> None:
    least = found.least
    budget = found.backbone + (least.peak_bytes - found.backbone) * 9 // 10
    answer = recommend(found, budget, margin=1.0)
    assert not answer["fits"] and answer["needed_bytes"] == least.peak_bytes
    changes = {item["change"]: item for item in answer["change"]}
    assert set(changes) == {"batch", "length", "rank"} and changes["length"]["fits"]
    assert changes["batch"]["fits"] and changes["batch"]["to"] == 3  # of 4, for a tenth less
    assert changes["batch"]["peak_bytes"] <= budget < least.peak_bytes
    halved = replace(WORK, batch=changes["batch"]["to"])
    assert peak_of(found.subject, halved, least) == changes["batch"]["peak_bytes"]


def test_a_mask_is_advised_against() -> None:
    padded = plan(subject_of("tiny:llama"), replace(WORK, attention="mask"), ("forward",), (False,))
    answer = recommend(padded, padded.backbone + 1, margin=1.0)
    assert "attention" in {item["change"] for item in answer["change"]}


def test_a_budget_below_the_backbone_says_how_much_is_needed(found: Plan) -> None:
    with pytest.raises(ConfigError, match=r"the backbone of tiny:llama takes .* at least .* are needed"):
        require_backbone(found, found.backbone - 1)
    require_backbone(found, found.backbone)
    answer = recommend(found, found.backbone - 1)
    assert not answer["fits"] and answer["change"] == []
    assert answer["needed_bytes"] == math.ceil(found.least.peak_bytes * 1.1)


@pytest.mark.parametrize("estimators", [ALL, ("tangent", "central"), ("none", "forward"), ("sketch",)])
def test_it_is_refused_before_all_is_traced_and_in_the_same_words(estimators: tuple[str, ...]) -> None:
    whole = plan(subject_of("tiny:llama"), WORK, estimators)
    with pytest.raises(ConfigError) as late:
        require_backbone(whole, whole.backbone - 1)
    told: list[str] = []
    budgets = (1 << 30, whole.backbone - 1)
    with pytest.raises(ConfigError) as early:
        plan(subject_of("tiny:llama"), WORK, estimators, told=told.append, budgets=budgets)
    assert str(early.value) == str(late.value)
    assert estimators == ("sketch",) or not {"top", "first order"} & set(told)


def test_costs_are_those_of_the_theory(found: Plan) -> None:
    """d = 3584: q 32 -> 32 and v 32 -> 16 of rank 8 in four blocks; E q = 10 scalars."""
    rows = {row.label: row for row in found.rows}
    assert rows["first order"].uplink_bytes == 4 * 3584
    assert rows["hybrid, boundary 2, forward"].uplink_bytes == 2 * 3584 + 40 + 32 + 24
    assert rows["zeroth order, forward"].uplink_bytes == 40 + 24
    assert rows["first order, checkpointed"].forward_equivalents == 4.0
    assert rows["hybrid, boundary 2, central"].forward_equivalents == 2.5 + 1.5
    assert rows["hybrid, boundary 2, sketch, checkpointed"].forward_equivalents == 4.0


def test_the_parts_sum_to_the_peak_and_name_the_adapters(found: Plan) -> None:
    for row in found.rows:
        assert sum(row.parts.values()) == row.peak_bytes
        assert row.parts["trainables"] == 4 * 3584
    first = found.rows[0].parts
    assert first["state"] == 4 * 3584 * (2 + 1 + 2)  # received, trained, start; two moments


def test_a_row_is_off_the_frontier_if_a_more_exact_one_costs_no_more() -> None:
    dear = replace(ROW, estimator="central", peak_bytes=90)
    same = replace(ROW, boundary=3)
    less = replace(ROW, boundary=4, peak_bytes=50)
    assert [row.frontier for row in marked([ROW, same, less])] == [True, False, True]
    assert [row.frontier for row in marked([dear, ROW])] == [True, False]


def test_json_of_a_row_begins_as_promised(found: Plan) -> None:
    first = ["boundary", "estimator", "checkpointing", "peak_bytes", "forward_equivalents", "uplink_bytes"]
    assert list(to_json(found.rows[0]))[:6] == first
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["estimator"] is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 << 30), ("12 gib", 12 << 30), ("512MB", 512_000_000), ("1.5KiB", 1536), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == positive_bytes_of(text) == size


@pytest.mark.parametrize("text", ["12", "12 apples", "-3GiB", "0GiB", "GiB", "1e9B", "٣GiB", "", "12GiB/s"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size above 0"):
        positive_bytes_of(text)


def test_a_fleet(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[devices]\nphone = "4GiB"\nlaptop = { memory = "12 GiB", count = 3 }\n')
    assert fleet(file) == {"phone": "4GiB", "laptop": "12 GiB"}
    for text in (
        "",
        "devices = 3",
        "[devices]",
        "[devices]\nphone = 4",
        '[devices]\nphone = "-4GiB"',
        "[devices",
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"fleet\.toml"):
            fleet(file)


def test_d_of_the_named_shapes() -> None:
    """SYSTEMS 6.1, and the parameters that the models are named for, in float32 bytes / 4."""
    assert find("Qwen/qwen2.5-1.5b") is NAMED["Qwen2.5-1.5B"] and find("nobody") is None
    expected = {
        "Qwen2.5-1.5B": 1_089_536,
        "OPT-125M": 294_912,
        "SmolLM3-3B": 1_916_928,
        "SmolLM2-135M": 460_800,
    }
    expected |= {"Llama-3.1-8B": 3_407_872, "Llama-3.2-1B": 851_968, "Gemma-3-270M": 368_640}
    expected |= {"MiniLM-L6": 6 * 8 * 4 * 384 + 2 * 385}  # adapters and the classifier
    parameters = {"Qwen2.5-1.5B": 1.54e9, "OPT-125M": 125.2e6, "SmolLM3-3B": 3.08e9, "SmolLM2-135M": 134.5e6}
    parameters |= {
        "Llama-3.1-8B": 8.03e9,
        "Llama-3.2-1B": 1.236e9,
        "Gemma-3-270M": 268.1e6,
        "MiniLM-L6": 22.7e6,
    }
    expected["MiniLM-L6"], parameters["MiniLM-L6"] = 73_728 + 770, 22.7e6  # and a head for two classes
    for name in NAMED:
        with staged(subject_of(name), Workload(1, 8)) as stage:
            costs = Costs.of(stage, WORK)
        assert costs.trainables == expected[name], name
        frozen = (costs.resident - 4 * costs.trainables) / 2
        assert frozen == pytest.approx(parameters[name], rel=0.005), name


def test_a_folder_with_a_config_alone(tmp_path: Path) -> None:
    from hofl.models.tiny import tiny_config

    tiny_config("qwen2").save_pretrained(tmp_path)
    here = plan(subject_of(str(tmp_path)), WORK, ("forward",), (False,))
    assert [r.peak_bytes for r in here.rows] == [
        r.peak_bytes for r in plan(subject_of("tiny:qwen2"), WORK, ("forward",), (False,)).rows
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "resnet"}',
        '{"model_type": "vit"}',
        "{}",
        "[]",
        "no json",
        '{"model_type": "unheard-of"}',
    ],
)
def test_what_is_no_transformer(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught, staged(subject_of(str(tmp_path)), WORK):
        pass
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(ModelError, match=r"known shapes: Qwen2\.5-1\.5B"):
        subject_of("gpt-17")


def test_a_configuration_of_images_and_of_points() -> None:
    from hofl.config import load

    subject, work = of_config(load("configs/synthetic/ho_fl.toml"))
    found = plan(subject, work, ("forward",))
    assert found.work.batch == load("configs/synthetic/ho_fl.toml").local.batch
    assert found.rows[0].peak_bytes > found.rows[-1].peak_bytes > 0

# SPDX-License-Identifier: Apache-2.0
"""Every preset is planned, and runs two rounds on the small random twin of its model.

A sample here; all of them: ``pytest -m slow tests/unit/test_twins.py``, about ten minutes.
"""

import pytest

import hofl
import twins
from hofl import presets
from hofl.config import parse
from hofl.memory.configured import of_config
from hofl.memory.named import MODELS, known
from hofl.memory.plan import plan
from hofl.memory.subject import Workload, subject_of
from hofl.presets.toml import dumps

SAMPLE = (
    "papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75",
    "papers/ho_fl/qwen2.5-1.5b/ag_news-dir0.1/ho_fl-beta0.25-recommended",
    "papers/ho_fl/smollm3-3b/sciq/fedavg",
    "papers/ho_fl/opt-125m/boolq/decomfl",
    "papers/ho_sfl/gemma-3-270m/rte/ho_sfl",
    "papers/ho_sfl/resnet-18/cifar10-dir0.1/ho_sfl",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("twins")


pytestmark = pytest.mark.filterwarnings("ignore:zo_signal")  # of bfloat16 at the papers' radius, as it should


def two_rounds(name: str, folder, out) -> None:
    preset = presets.find(name)
    config = parse(dumps(preset.settings), name, twins.settings(preset, folder))
    summary = hofl.run(config, out)
    run = hofl.read_run(out)
    assert run.status == "done" and [row["round"] for row in run.rows] == [0, 1, 2]
    assert summary["metric"]["n"] == 10
    assert {b for row in run.rows[1:] for b in row["boundaries"] or ()} <= {0, *config.cohort.boundaries}
    initial, final = ((out / f"{which}.safetensors").read_bytes() for which in ("initial", "final"))
    assert initial != final


@pytest.mark.parametrize("name", SAMPLE)
def test_a_twin_runs_two_rounds(name, folder, tmp_path) -> None:
    two_rounds(name, folder, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in presets.presets() if name not in SAMPLE])
def test_every_twin_runs_two_rounds(name, folder, tmp_path) -> None:
    two_rounds(name, folder, tmp_path / "run")


def planned(name: str, folder) -> None:
    """Its memory from the real model's shapes: more blocks below the boundary need less."""
    preset = presets.find(name)
    more = twins.settings(preset, folder) if "cifar10" in name else ()
    config = parse(dumps(preset.settings), name, more)
    if config.task.name == "generation":  # it has no plan of its own: that of its model
        subject, work = subject_of(config.model.source), Workload(config.local.batch, config.task.length)
    else:
        subject, work = of_config(config)
    found = plan(subject, work, ("forward",), (False,))
    entry = MODELS[known(config.model.source) or ""]
    assert (found.costs.blocks, work.batch) == (entry.blocks, config.local.batch)
    peaks = {row.boundary: row.peak_bytes for row in found.rows if row.order == "hybrid"}
    first = next(row.peak_bytes for row in found.rows if row.order == "first_order")
    tiers = [first, *(peaks[boundary] for boundary in config.cohort.boundaries)]
    assert tiers == sorted(tiers, reverse=True) and len(set(tiers)) == len(tiers)
    if "opt-125m" in name:  # LoRA of rank 8 on two projections 768 -> 768 of 12 blocks
        assert found.costs.trainables == 12 * 2 * 8 * (768 + 768)


def test_a_preset_is_planned(folder) -> None:
    planned(SAMPLE[0], folder)


ONE_EACH = {
    (p.settings["model.source"], p.settings.get("task.length"), p.settings["algorithm"]): p.name
    for p in presets.presets().values()
    if p.settings["algorithm"] in ("ho_fl", "ho_sfl")
}
"""A plan depends on the model, the length and the boundaries alone."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_EACH.values())
def test_every_preset_is_planned(name, folder) -> None:
    planned(name, folder)

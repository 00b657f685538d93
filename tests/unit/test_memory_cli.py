# SPDX-License-Identifier: Apache-2.0
"""``hofl plan`` as a user meets it: JSON, tables, a picture, and one line for bad input."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from hofl.commands.plan import plan
from hofl.errors import HoflError

TINY = ["tiny:llama", "--batch", "2", "--length", "16", "--estimator", "forward"]


def hofl(*arguments: str) -> Any:
    """The command as the command line calls it."""
    app = typer.Typer(add_completion=False)
    app.command()(plan)
    return app(args=list(arguments), standalone_mode=False)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    hofl(*TINY, "--budget", "1GiB", "--budget", "200kB", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"] == 4 and found["attention"] == "causal" and found["batch"] == 2
    first = {
        "boundary": 0,
        "estimator": None,
        "checkpointing": False,
        "forward_equivalents": 3.0,
        "uplink_bytes": 14336,
    }
    assert first.items() <= found["rows"][0].items()
    assert {row["estimator"] for row in found["rows"]} == {None, "forward"}
    assert set(found["recommended"]) == {"1GiB", "200kB"}
    best = found["recommended"]["1GiB"]
    assert best["label"] == "first order" and best["left_bytes"] == 2**30 - best["peak_bytes"]
    assert not found["recommended"]["200kB"]["fits"]


def test_tables_say_the_attention_path_and_what_to_change(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[devices]\nphone = "200kB"\n')
    picture = tmp_path / "plan.png"
    hofl(*TINY, "--attention", "mask", "--devices", str(fleet), "--out", str(picture))
    told = capsys.readouterr().out
    assert "rows are padded, so attention is given a mask tensor" in told
    assert "first order, checkpointed" in told and "nothing fits" in told
    assert "phone: at least" in told and "attention causal needs" in told and "batch 1 needs" in told
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 10_000


def test_a_runs_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nsource = "tiny:opt"\nlora.rank = 4\n[task]\ntrain = "a.csv"\n'
        'evaluation = "b.csv"\nlength = 24\n'
        '[local]\nbatch = 3\nsteps = 2\n[zo]\nprobes = 7\n[optimizer]\nname = "sgd"\n'
    )
    hofl(str(file), "--estimator", "forward", "--json")
    found = json.loads(capsys.readouterr().out)
    said = {
        "batch": 3,
        "length": 24,
        "rank": 4,
        "probes": 7,
        "steps": 2,
        "attention": "mask",
        "dtype": "float32",
    }
    assert said.items() <= found.items()
    d = found["trainables"]
    assert found["rows"][0]["parts"]["state"] == 4 * d * 3  # no moments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "12 apples"], "--budget 12 apples: must be a size above 0"),
        (["--budget", "-3GiB"], "--budget -3GiB: must be a size above 0"),
        (["--budget", "20kB"], "the backbone of tiny:llama takes 104.4 KiB; at least"),
        (["--devices", "no.toml"], "no.toml"),
        (["--length", "4096"], "--length 4096: allowed is 1 to 128 tokens"),
        (["--out", "no/such/folder/plan.png"], "--out no/such/folder/plan.png"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(HoflError) as caught:
        hofl(*TINY, *arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_bad_models_and_options() -> None:
    with pytest.raises(HoflError, match="tiny:gpt-17"):
        hofl("tiny:gpt-17")
    with pytest.raises(HoflError, match=r"none\.toml"):
        hofl("none.toml")
    for wrong in (["--batch", "0"], ["--margin", "0.5"], ["--estimator", "best"], ["--dtype", "int4"]):
        with pytest.raises(click.exceptions.ClickException):
            hofl("tiny:llama", *wrong)

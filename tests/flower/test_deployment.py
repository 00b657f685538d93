# SPDX-License-Identifier: Apache-2.0
"""Real nodes, server and sockets give the very rows and final model of one process (TLS, nodes with keys)."""

import json
from pathlib import Path

import pytest
from conftest import SYNTHETIC
from fleet import Fleet, comparable

from hofl.config import load
from hofl.session import run_to_end

SMALL = (
    "rounds=3",
    "partition.kind=iid",
    "partition.clients=3",
    "cohort.size=2",
    "evaluation.every=1",
    "run.threads=1",
)


def same_as_alone(fleet: Fleet, name: str, apart: Path, together: Path, *settings: str) -> None:
    """Serve one configuration, run another in this process: all they tell must be the same."""
    server = fleet.serve(apart, name, *settings)
    summary = run_to_end(load(together, list(settings)), fleet.place / f"{name}-alone", False)
    server.finish()
    assert server.final == summary["final_sha256"]
    rows = (fleet.place / f"{name}-alone" / "rounds.jsonl").read_text().splitlines()
    assert comparable(server.rows) == comparable(map(json.loads, rows))
    assert len(rows) == 4 and not any(row["failures"] for row in server.rows)


@pytest.mark.parametrize("name", ["ho_fl", "ho_sfl", "fedavg"])
def test_a_deployment_gives_the_very_rows_of_one_process(fleet: Fleet, name: str) -> None:
    config = SYNTHETIC / f"{name}.toml"
    same_as_alone(fleet, name, config, config, *SMALL)

# SPDX-License-Identifier: Apache-2.0
"""Real nodes, server and sockets give the very rows and final model of one process (TLS, nodes with keys)."""

from pathlib import Path

import pytest
from fleet import SYNTHETIC, Alone, Fleet, comparable

SMALL = (
    "rounds=3",
    "partition.kind=iid",
    "partition.clients=3",
    "cohort.size=2",
    "evaluation.every=1",
    "run.threads=1",
)


def require_same(fleet: Fleet, alone: Alone, name: str, apart: Path, together: Path, *settings: str) -> None:
    """Serve one configuration, run another in this process: all they tell must be the same."""
    server = fleet.serve(apart, name, *settings)
    expected = alone(together, *settings)
    server.finish()
    assert server.final == expected.final
    assert comparable(server.rows) == comparable(expected.rows)
    assert len(server.rows) == 4 and not any(row["failures"] for row in server.rows)


@pytest.mark.parametrize("name", ["ho_fl", "ho_sfl", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_deployment_gives_the_very_rows_of_one_process(fleet: Fleet, alone: Alone, name: str) -> None:
    """C55: each node knows who it is from its own file; test_simulation.py has the same of a simulation."""
    config = SYNTHETIC / f"{name}.toml"
    require_same(fleet, alone, name, config, config, *SMALL)


def text_run(place: Path, partition: str, train: str) -> Path:
    """A configuration on texts with a tiny model, its training data here or at the nodes."""
    file = place / f"{partition.partition('kind = ')[2][1:6]}.toml"
    file.write_text(
        f'algorithm = "ho_fl"\nseed = 3\n[model]\nsource = "tiny:llama"\ndevice = "cpu"\n'
        f'[task]\ntemplate = "sst2-v1"\ntrain = "{train}"\nevaluation = "{place / "evaluation.csv"}"\n'
        f"length = 24\n[partition]\n{partition}\n[cohort]\nboundaries = [1]\n"
        f"[local]\nsteps = 2\nbatch = 4\n[optimizer]\nlr = 1e-2\n"
    )
    return file


def write_texts(file: Path, client: str, rows: int) -> None:
    """Texts of unequal lengths, whose file tells them apart."""
    moods = ("negative", "positive")
    lines = [f"{moods[i % 2]} {'very ' * (i % 5)}film of {client} {i},{moods[i % 2]}" for i in range(rows)]
    file.write_text("\n".join(["sentence,label", *lines]), encoding="utf-8")


def test_training_data_at_the_nodes_gives_what_one_process_with_it_all_does(
    fleet: Fleet, alone: Alone
) -> None:
    """C46: each node has its own file and nobody else's; the server has none."""
    place = fleet.place / "data"
    (place / "all").mkdir(parents=True)
    write_texts(place / "evaluation.csv", "nobody", 6)
    for name, rows in zip(fleet.names, (9, 7, 3), strict=True):
        write_texts(place / "all" / f"{name}.csv", name, rows)
        (fleet.place / f"{name}.csv").write_bytes((place / "all" / f"{name}.csv").read_bytes())
    apart = text_run(place, f'kind = "nodes"\nnames = {list(fleet.names)}', "")
    together = text_run(place, 'kind = "files"', str(place / "all" / "*.csv"))
    settings = ("rounds=3", "cohort.size=2", "evaluation.every=1", "run.threads=1")
    require_same(fleet, alone, "texts", apart, together, *settings)

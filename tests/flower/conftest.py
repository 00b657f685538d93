# SPDX-License-Identifier: Apache-2.0
"""One fleet of three resident nodes serves every run of these tests: starting it is what costs."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Alone, Fleet, Undisturbed

from hofl.config import load
from hofl.session import run_to_end

NAMES = ("client-0", "client-1", "client-2")


@pytest.fixture(scope="session")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The nodes, from the first test that needs them to the last."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), NAMES)
    try:
        for name in NAMES:
            fleet.start(name)
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def fleet(resident: Fleet) -> Iterator[Fleet]:
    """The nodes, all of them up; after the test no server is left."""
    for name, node in resident.nodes.items():
        if node.process.poll() is not None:
            resident.start(name)
    try:
        yield resident
    finally:
        resident.end_servers()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Runs a configuration in this process, each once."""

    @functools.cache
    def run(config: Path, *settings: str) -> Undisturbed:
        where = tmp_path_factory.mktemp("alone") / "run"
        final = run_to_end(load(config, list(settings)), where, False)["final_sha256"]
        return Undisturbed(
            final, [json.loads(line) for line in (where / "rounds.jsonl").read_text().splitlines()]
        )

    return run

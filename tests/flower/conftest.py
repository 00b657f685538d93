# SPDX-License-Identifier: Apache-2.0
"""One fleet of three resident nodes serves every run of the tests of deployments: starting it is what costs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet

NAMES = ("client-0", "client-1", "client-2")
SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"


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

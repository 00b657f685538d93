# SPDX-License-Identifier: Apache-2.0
"""One torch thread and no hub in every test: small models gain nothing from threads."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


FLEET = ("test_crashes.py", "test_deployment.py", "test_refusals.py")
"""Files that share one fleet of real processes, so that they must run in one process of a distributed run."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The fleet's tests go to one process, first; all others wherever there is room."""
    from xdist.scheduler import LoadScopeScheduling

    class OneFleet(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "fleet" if nodeid.partition("::")[0].endswith(FLEET) else nodeid

    return OneFleet(config, log)

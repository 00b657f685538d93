# SPDX-License-Identifier: Apache-2.0
"""Flower's simulation: the clients of a run as virtual nodes in Ray's processes on this machine.

Fixed cost is tens of seconds a run. What a method's clients keep between two messages lives in the process
that answered the first, and Flower moves nodes between processes: so only methods whose clients keep
nothing run in several processes at once.
"""

import logging
import os

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from hofl.algorithms import ALGORITHMS
from hofl.build import require_local_data
from hofl.build_task import build_task
from hofl.config import Config
from hofl.runtime.flower import clientapp, internal
from hofl.runtime.flower.serverapp import Order, attempt

FORGETFUL = ("ho_fl", "fedavg", "fedprox", "fedzo")
"""Methods whose clients keep nothing from one message to the next."""


def clients_of(config: Config) -> int:
    """How many clients a run has; where files decide, they are read."""
    if ALGORITHMS[config.algorithm].centralised:
        return 1
    return config.partition.clients if config.partition.kind != "files" else len(build_task(config).clients)


def simulate(order: Order) -> tuple[int, str]:
    """Run an order on Flower's simulation -> its exit code, and the line that says why it failed.

    Raises:
        HoflError: bad input, found before any process is started.
    """
    require_local_data(order.config)
    count, cores = clients_of(order.config), os.cpu_count() or 1
    each = 1 if order.config.algorithm in FORGETFUL else cores
    server, ended = ServerApp(), [(1, "Flower's simulation ended before the run did")]

    @server.main()
    def _main(grid: Grid, context: Context) -> None:
        ended[0] = attempt(lambda: order, grid)

    for name in ("flwr", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    backend: internal.Backend = {
        "init_args": {"num_cpus": cores},  # Ray counts fewer in a container, and would start nothing then
        "client_resources": {"num_cpus": each, "num_gpus": 0.0},
    }
    run_simulation(server, clientapp.app, count, backend_config=backend)
    return ended[0]

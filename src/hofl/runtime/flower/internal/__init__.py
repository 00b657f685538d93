# SPDX-License-Identifier: Apache-2.0
"""Everything of Flower that is not its public API, in one place; tests hold it to the installed version."""

from hofl.runtime.flower.internal.inbox import BROKEN, Inbox
from hofl.runtime.flower.internal.node import Connection, Ended, Refused, Unreachable
from hofl.runtime.flower.internal.server import (
    NODE_GONE,
    TRANSPORT,
    Backend,
    activations,
    enter,
    public_keys,
    run_superlink,
    simulated,
)

__all__ = [
    "BROKEN",
    "NODE_GONE",
    "TRANSPORT",
    "Backend",
    "Connection",
    "Ended",
    "Inbox",
    "Refused",
    "Unreachable",
    "activations",
    "enter",
    "public_keys",
    "run_superlink",
    "simulated",
]

# SPDX-License-Identifier: Apache-2.0
"""Everything of Flower that is not its public API, in one place; tests hold it to the installed version."""

from hofl.runtime.flower.internal.inbox import BROKEN, Inbox
from hofl.runtime.flower.internal.link import SERVER, run_superlink, who_pulls
from hofl.runtime.flower.internal.node import Connection, Ended, Refused, Unreachable
from hofl.runtime.flower.internal.server import (
    NODE_GONE,
    TRANSPORT,
    Backend,
    activations,
    enter,
    public_keys,
    push_whole,
    simulated,
)

__all__ = [
    "BROKEN",
    "NODE_GONE",
    "SERVER",
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
    "push_whole",
    "run_superlink",
    "simulated",
    "who_pulls",
]

# SPDX-License-Identifier: Apache-2.0
"""``python -m hofl.runtime.flower.link``: ``flower-superlink`` behind hofl's guard, with hofl's bell."""

from hofl.runtime.flower.bell import BELL, Patience
from hofl.runtime.flower.guard import Guard
from hofl.runtime.flower.internal import run_superlink

if __name__ == "__main__":
    run_superlink(BELL.ring, Guard, Patience)

# SPDX-License-Identifier: Apache-2.0
"""A preference that moves over the rounds, from a configuration to the cohorts drawn."""

from pathlib import Path

import numpy as np
import pytest

from hofl.config import load
from hofl.errors import ConfigError
from hofl.session import prepare

CONFIG = Path(__file__).parents[2] / "configs" / "synthetic" / "ho_fl.toml"


def frequencies(*settings: str) -> tuple[float, float]:
    """How often a preferred client is in a cohort in the first and in the last hundred rounds."""
    session = prepare(load(CONFIG, ["rounds=400", "cohort.preference=0.9", *settings]))
    preferred = {session.able[place] for place in session.policy.preferred}
    seats = np.array([len(preferred & set(session.draw(t, 0))) / len(preferred) for t in range(1, 401)])
    return float(seats[:100].mean()), float(seats[-100:].mean())


def test_a_constant_preference_stays() -> None:
    first, last = frequencies()
    assert first == pytest.approx(0.9 + 0.1 / 3, abs=0.04) and last == pytest.approx(first, abs=0.05)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_moves_the_preferred_clients_share(kind: str) -> None:
    """K = 4 of N = 12: a preferred client is in with probability beta + (1 - beta) / 3."""
    first, last = frequencies(f"cohort.schedule={kind}", "cohort.final=0.0")
    start, end = {"linear": (0.79, 0.11), "cosine": (0.86, 0.04)}[kind]
    assert first == pytest.approx(start + (1 - start) / 3, abs=0.06)
    assert last == pytest.approx(end + (1 - end) / 3, abs=0.08)


def test_a_schedule_is_for_methods_that_prefer() -> None:
    with pytest.raises(ConfigError, match="must be 'constant': fedavg prefers nobody"):
        load(CONFIG.with_name("fedavg.toml"), ["cohort.schedule=linear"])

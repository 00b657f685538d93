# SPDX-License-Identifier: Apache-2.0
"""A long run does not grow: what is past is on disk (CASES C60)."""

from pathlib import Path

import numpy as np
import pytest
import tiny_run

STATM = Path("/proc/self/statm")


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="the resident set is read from /proc")
def test_two_thousand_rounds_stay_flat(tmp_path: Path) -> None:
    resident = []
    for row in tiny_run.rows_of(tiny_run.counting(), tmp_path / "run", 2000, evaluate_every=500):
        if row["round"] > 1000:
            resident.append(int(STATM.read_text().split()[1]) * 4096)
    slope = np.polyfit(np.arange(len(resident)), resident, 1)[0]
    assert slope < 10_240, f"{slope:.0f} bytes a round"
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 2001

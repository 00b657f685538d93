# SPDX-License-Identifier: Apache-2.0
"""Two hours of a real fleet in fifteen to ninety minutes: 500 rounds whose nodes keep being killed.

    pytest -m slow tests/flower/test_soak.py -s      # 500 rounds: 4 nodes, server and keeper, TLS and keys

It is ``python benchmarks/soak.py 500``, whose tables it shows: every round must come, and the memory of the
server's processes and of the nodes' must stay flat within 5 % after the warm-up.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 500


@pytest.mark.slow
def test_five_hundred_rounds_with_a_node_killed_every_twenty(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    command = [sys.executable, str(program), str(ROUNDS), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert f"rounds done: {ROUNDS} of {ROUNDS}" in done.stdout
    assert done.stdout.count("growth") == 1 and "SuperLink" in done.stdout and "client-0" in done.stdout

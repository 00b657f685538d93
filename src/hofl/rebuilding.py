# SPDX-License-Identifier: Apache-2.0
"""A run's states again from its folder alone: no client, no data, no model."""

from contextlib import closing
from pathlib import Path
from typing import Any

from hofl.algorithms import ALGORITHMS
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.errors import ConfigError, RecordError
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm
from hofl.protocol.probing import Probing, Shared
from hofl.protocol.split import Split
from hofl.runtime import checkpoint, folder, ledger


def rebuild(where: Path, round_number: int) -> dict[str, Any]:
    """Rebuild the state after a round from a run's initial state and ledger alone.

    Returns:
        the round, the SHA-256 rebuilt and in the row (equal, or this raises), and the dimension d.

    Raises:
        ConfigError, RecordError: no such run or round, or the rebuilt state is not the one the run had.
    """
    if round_number < 0:
        raise ConfigError(f"--round {round_number}: must be >= 0")
    run_config(where)
    _, layout = checkpoint.load_final(where / folder.INITIAL)
    with closing(ledger.read(where / folder.LEDGER)) as book:
        name = book.algorithm
    state = ledger.replay(where, round_number, bare(name, layout))
    sha = checkpoint.state_sha256(state)
    return {"round": round_number, "state_sha256": sha, "equal": True, "dimension": layout.size}


def bare(name: str, layout: Layout) -> Algorithm:
    """An algorithm good for ``rebuild`` and ``actions`` alone, which read all they need in the plans.

    So today's configuration has no say: the settings here are nobody's.

    Raises:
        RecordError: no such algorithm.
    """
    if name not in ALGORITHMS:
        raise RecordError(
            f"algorithm = '{name}' in a ledger or message; this hofl has {', '.join(ALGORITHMS)}"
        )
    optimizer = Optimizer("sgd", 1.0)
    training = Training(seed=0, steps=1, batch=1, optimizer=optimizer, sizes=())
    return ALGORITHMS[name].build(
        layout=layout,
        boundaries=(),
        training=training,
        probing=Probing("none", 1, 1.0, "gaussian", optimizer),
        preferred=None,
        split=Split(),
        shared=Shared(),
        proximal=0.0,
    )


def run_config(where: Path) -> Path:
    """The configuration of a run folder.

    Raises:
        ConfigError: it is no run folder.
    """
    if not (where / folder.CONFIG).is_file():
        raise ConfigError(f"{where} is no run folder: it has no {folder.CONFIG}; give a folder of hofl run")
    return where / folder.CONFIG

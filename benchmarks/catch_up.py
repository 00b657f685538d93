# SPDX-License-Identifier: Apache-2.0
"""A client that was away: the catch-up of many rounds against the time to generate their directions.

``python benchmarks/catch_up.py`` measures 500 rounds, ``--rounds 10000`` as many as the budget is of:
the bottom of SmolLM2-135M's LoRA at half depth, d_c = 147,456, q = 2, SGD, one step a round. The catch-up is
the client's whole half: the message's rounds, replayed on a copy of what it holds, and the digest compared.
"""

import argparse

import numpy as np
from _timing import interleaved, report

from hofl.core.directions import Directions, blocks, gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.protocol import history
from hofl.protocol.base import Memory
from hofl.protocol.probing import SHARED, Probing, root_key

SIZE, PROBES, BUDGET = 147_456, 2, 1.5
PROBING = Probing("forward", PROBES, 1e-3, "gaussian", Optimizer("sgd", 1e-6))


def state_after(rounds: int) -> Record:
    """A server's after that many rounds; client 0 is new, client 1 has the start."""
    keys = np.stack([root_key(1, SHARED, t).array() for t in range(rounds)])
    scalars = gaussian(Key.of(1, "evaluation"), 0, rounds * PROBES).reshape(rounds, 1, PROBES)
    values = {"round": rounds, "recipes": [[0, history.recipe_of(PROBING, PROBING.optimizer)]]}
    arrays = {
        "cursors/synced": np.array([-1, 0]),
        "scalars/history": scalars,
        "seeds/history": keys,
        "weights/moments": np.zeros((0, SIZE), dtype=np.float32),
    }
    return Record(arrays, values)


def measure(rounds: int) -> float:
    """CPU time of the catch-up over that of its directions alone."""
    state, start = state_after(rounds), np.zeros(SIZE, dtype=np.float32)
    memory = Memory(
        Record({"weights/bottom": start, "weights/moments": np.zeros((0, SIZE), "f4")}, {"round": 0})
    )
    end, (recipe,) = start.copy(), state.values["recipes"]
    keys, scalars = state.arrays["seeds/history"], state.arrays["scalars/history"]
    history.replay_rounds_(end, (), 0, keys, scalars, [recipe])
    told = history.news(state, 1, end)
    request = Record(told.arrays, {"round": rounds, **told.values})

    def generate() -> None:
        for key in keys:
            directions = Directions(Key.from_array(key).fold(0), "gaussian", PROBES, SIZE)
            for begin, stop in blocks(SIZE):
                for probe in range(PROBES):
                    directions.block(probe, begin, stop)

    def catch_up() -> None:
        assert history.catch_up(memory, request, SIZE) is not None

    whole, alone = interleaved(catch_up, generate, repeats=3 if rounds > 2000 else 7)
    print(f"{rounds} rounds: {whole:.2f} s of processor time, directions alone {alone:.2f} s", flush=True)
    return whole / alone


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    rounds = parser.parse_args().rounds
    report(
        f"catch-up of {rounds} rounds, d_c = {SIZE:,}, q = {PROBES}, SGD / its directions",
        measure(rounds),
        BUDGET,
    )

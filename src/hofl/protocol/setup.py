# SPDX-License-Identifier: Apache-2.0
"""What a split method with probes is built with, in one place."""

from dataclasses import dataclass
from typing import Any

from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.protocol import aggregate
from hofl.protocol.probing import Probing
from hofl.protocol.split import Split, Top


@dataclass(frozen=True)
class Setup:
    """What a method is built with; ``boundaries`` are all the same cut."""

    layout: Layout
    boundaries: tuple[int, ...]
    training: aggregate.Training
    probing: Probing
    split: Split

    @property
    def d_c(self) -> int:
        """Trainables of the bottom."""
        return self.layout.bottom_size(self.boundaries[0])

    @property
    def top(self) -> Top:
        """The server's half of the model."""
        return self.split.top(self.boundaries[0], self.training.batch)

    def plan(self, state: Record, client: int, root: Key, clean: bool, **more: Any) -> Record:
        """What a client is asked: everything but the weights; ``clean``: also z at the bottom itself."""
        values = aggregate.plan_values(state, client, self.training) | self.probing.to_values()
        values |= {"boundary": self.boundaries[0], "layout": self.layout.fingerprint, "wire": self.split.wire}
        keys = {"seeds/root": root.array()} if values["probes"] else {}
        return Record(keys, {**values, "step": 0, "clean": clean, **more})

# SPDX-License-Identifier: Apache-2.0
"""What the manifest says of a task's data: counts and hashes, never an example."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hofl.tasks.metrics import majority_class


class Labelled(Protocol):
    """Examples of any kind, with their classes int64 [rows]."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The classes."""


Examples = TypeVar("Examples", bound=Labelled)


def data_facts(
    what: str,
    names: Sequence[str],
    train: Examples | None,
    evaluation: Examples | None,
    sha256: Callable[[Examples], str],
    shared: Callable[[Examples, Examples], int],
) -> dict[str, Any]:
    """Facts of data of which one part may be elsewhere; what is not here is None.

    Args:
        what: the examples are, in the plural.
        names: of the classes.
        train, evaluation: what is here.
        sha256: hash of a part.
        shared: (train, evaluation) -> how many of the latter are also trained on.
    """
    here = {name: part for name, part in (("train", train), ("evaluation", evaluation)) if part is not None}
    twice = shared(train, evaluation) if train is not None and evaluation is not None else None
    counts = {name: len(part.labels) for name, part in here.items()}
    flatters = (
        f"{twice} of {counts.get('evaluation')} evaluation {what} are also in the training data: the metric "
        "flatters; evaluate on other rows, or on split=rest of the same source"
    )
    return {
        "labels": list(names),
        "majority_class": majority_class(evaluation.labels, names) if evaluation is not None else None,
        "n_train": counts.get("train"),
        "n_evaluation": counts.get("evaluation"),
        f"shared_{what}": twice,
        "data_sha256": {name: sha256(part) for name, part in here.items()},
        "warnings": [flatters] if twice else [],
    }

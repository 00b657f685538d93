# SPDX-License-Identifier: Apache-2.0
"""Data sets of the hub, through its own library: the only reader that may open a socket."""

from collections.abc import Sequence
from typing import Any

from hofl.errors import ConfigError, DataError

_NAMESPACELESS = {"ag_news", "ai2_arc", "glue", "imdb", "super_glue", "trec"}


def load_rows(place: str, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of a hub data set that are wanted and there; scripts in a data set are never run.

    Args:
        place: ``hub:NAME[/CONFIG]:SPLIT``.
        wanted: names of columns.

    Raises:
        ConfigError: the place is malformed.
        DataError: the library is missing, or the data cannot be loaded.
    """
    _, name, split = [*place.split(":", 2), "", ""][:3]
    parts = name.split("/")
    if not split or not all(parts) or len(parts) > 3:
        raise ConfigError(f"{place!a}: allowed is hub:NAME[/CONFIG]:SPLIT, e.g. hub:glue/sst2:train")
    own = 1 if len(parts) == 1 or parts[0] in _NAMESPACELESS else 2
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{place}: hub data needs one more package: pip install 'hofl[hub]'") from None
    try:
        rows = load_dataset("/".join(parts[:own]), *parts[own:], split=split)
    except Exception as error:  # the library raises its own, the hub's and pyarrow's errors: one line for all
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DataError(
            f"{place}: cannot load from the hub ({reason}): use a local file when offline"
        ) from None
    return {name: list(rows[name]) for name in rows.column_names if name in wanted}

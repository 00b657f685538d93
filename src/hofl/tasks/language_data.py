# SPDX-License-Identifier: Apache-2.0
"""Plain text files, read and checked, before there is a tokenizer to cut them with."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from hofl.errors import DataError
from hofl.tasks import nodes, sources
from hofl.tasks.files import CLIENT_ID
from hofl.tasks.generation_data import require_even
from hofl.tasks.partition import Partition

LARGEST = 2**30
"""Bytes of the largest file."""


@dataclass(frozen=True)
class LanguageData:
    """Everything about the data that needs no model.

    Attributes:
        train, evaluation: whole files; where one of them is elsewhere, both are those that are here.
        names: stems of the training files.
        divided: how pieces of them are divided; of "files", each file is a client.
        seed: of the run.
        facts: for the manifest; no text.
        client: on a node, whose the training files are.
    """

    train: tuple[str, ...]
    evaluation: tuple[str, ...]
    names: tuple[str, ...]
    divided: Partition
    seed: int
    facts: dict[str, Any]
    client: str = ""


def read_files(train: str, evaluation: str, divided: Partition, *, seed: int) -> LanguageData:
    """Read and check the files.

    Args:
        train, evaluation: a ``.txt`` file in UTF-8, or a glob of some.
        divided: iid, or one client a file.
        seed: of the run.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault.
    """
    require_even(divided)
    learned, tested = _texts("task.train", train), _texts("task.evaluation", evaluation)
    bad = [name for name in learned if divided.kind == "files" and not CLIENT_ID.fullmatch(name)]
    if bad:
        raise DataError(
            f"task.train: file name {bad[0]!a} is no client id: allowed are 1 to 64 of A-Z a-z 0-9 _ -"
        )
    texts = (tuple(learned.values()), tuple(tested.values()))
    return LanguageData(*texts, tuple(learned), divided, seed, _facts(*texts))


def read_held_out(evaluation: str, divided: Partition, *, seed: int) -> LanguageData:
    """Like :func:`read_files` on the server, where the training data is at the nodes ``divided.names``.

    Raises:
        DataError: as there.
    """
    tested = tuple(_texts("task.evaluation", evaluation).values())
    facts = _facts(None, tested)
    facts["data_sha256"]["nodes"] = {}
    return LanguageData(tested, tested, (), divided, seed, facts)


def read_own(train: str, divided: Partition, client: str, *, seed: int) -> LanguageData:
    """Like :func:`read_files` on a node, which has the files of its client and no others.

    Raises:
        DataError, ConfigError: as there, and for a client that the run does not list.
    """
    nodes.number_of(divided.names, client)
    learned = _texts("task.train", train)
    texts = tuple(learned.values())
    return LanguageData(texts, texts, tuple(learned), divided, seed, _facts(texts, None), client)


def _texts(setting: str, place: str) -> dict[str, str]:
    """Whole files by stem, sorted."""
    texts: dict[str, str] = {}
    with sources.about(setting):
        for path in _expand(place):
            if path.stem in texts:
                raise DataError(f"{place}: two files are called {path.stem!a}: each name must be its own")
            texts[path.stem] = _read(path)
        if not any(text.strip() for text in texts.values()):
            raise DataError(f"{place}: no text in {len(texts)} files: give files with text")
    return texts


def _expand(place: str) -> list[Path]:
    """The files of a path or a glob, sorted by their names."""
    try:
        path = Path(place).expanduser()
        found = [path] if path.is_file() else [Path(name) for name in glob(str(path), recursive=True)]
        found = sorted((each for each in found if each.is_file()), key=lambda each: (each.stem, str(each)))
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, no home
        raise DataError(f"{place!a}: not a usable path ({error})") from None
    if not found:
        raise DataError(f"{place!a}: no such file: give the path of a .txt file, or a glob of some")
    other = [each for each in found if each.suffix.lower() != ".txt"]
    if other:
        raise DataError(f"{other[0]}: the language task reads plain text: allowed are files named .txt")
    return found


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path}: over {LARGEST >> 30} GiB: divide it into several files")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}): convert it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _facts(train: Sequence[str] | None, evaluation: Sequence[str] | None) -> dict[str, Any]:
    """What the manifest says of the files: hashes and counts, never a text."""
    here = {name: part for name, part in (("train", train), ("evaluation", evaluation)) if part is not None}
    twice = None if train is None or evaluation is None else len({*train} & {*evaluation} - {""})
    flatters = f"{twice} held-out files are also trained on: the perplexity flatters"
    return {
        "labels": [],
        "majority_class": None,
        "characters": {name: sum(map(len, part)) for name, part in here.items()},
        "shared_texts": twice,
        "data_sha256": {name: _sha256(part) for name, part in here.items()},
        "warnings": [flatters] if twice else [],
    }


def _sha256(texts: Sequence[str]) -> str:
    h = hashlib.sha256()
    for text in texts:
        raw = text.encode()
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids: cut to length in the text only, with the answer position last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.errors import ConfigError, ModelError
from hofl.tasks.templates import Template

Tokens = NDArray[np.int32]

CHARACTERS = 32
"""Characters a token that are looked at: what lies beyond ``CHARACTERS * length`` is cut unread."""
USUAL = 5
"""Characters a token of most texts."""
MUCH = 0.1
"""Share of cut texts above which a run says so."""
CHUNK = 2048
"""Texts the tokenizer is given at a time."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of each prompt, int32 [tokens], and how many prompts had to be cut."""

    ids: list[Tokens]
    truncated: int


def encode(tokenizer: Any, template: Template, rows: Sequence[Sequence[str]], length: int) -> Encoded:
    """Every row's prompt in at most ``length`` tokens.

    The tokens before a text (BOS, CLS) are the tokenizer's own; those after it (SEP) only for a trained
    head, for label words are scored right after the cue. Where a prompt is too long the end of its first
    field is cut, as little as fits; the cue stays whole.

    Raises:
        ConfigError: a prompt without its first field is too long already.
    """
    before, after = _specials(tokenizer)
    after = after if template.head else []
    room = length - len(before) - len(after)
    short = [[row[0][: CHARACTERS * length], *row[1:]] for row in rows]
    cut = {i for i, (row, full) in enumerate(zip(short, rows, strict=True)) if len(row[0]) < len(full[0])}
    ids = _ids(tokenizer, [template.prompt(row) for row in short])
    long = [i for i, each in enumerate(ids) if len(each) > room]
    for i, each in zip(long, _fitted(tokenizer, template, [short[i] for i in long], room), strict=True):
        ids[i] = each
    framed = [np.array([*before, *each, *after], dtype=np.int32) for each in ids]
    return Encoded(framed, len(cut.union(long)))


def cut_facts(
    facts: Mapping[str, Any], train: Encoded, evaluation: Encoded, what: str = "texts"
) -> dict[str, Any]:
    """How many texts were cut, and the data's warnings with one more where that is many.

    Args:
        facts: of the data; None stands for how many there are of a part that is elsewhere.
        train, evaluation: the parts.
        what: they are called.
    """
    warnings, cuts = list(facts["warnings"]), dict[str, int | None](train=None, evaluation=None)
    for name, words, encoded in (("train", "training", train), ("evaluation", "evaluation", evaluation)):
        if facts[f"n_{name}"] is None:
            continue
        cuts[name], share = encoded.truncated, encoded.truncated / max(1, len(encoded.ids))
        if share > MUCH:
            warnings.append(
                f"{share:.0%} of the {words} {what} are cut to task.length tokens: raise it if memory allows"
            )
    return {"truncated": cuts, "warnings": warnings}


def word_tokens(tokenizer: Any, template: Template) -> list[int]:
    """The token that follows the cue for each label word: one a word, all different.

    Raises:
        ModelError: names the words for which that is not so.
    """
    cue = template.prompt(["."] * len(template.slots))
    start, *full = _ids(tokenizer, [cue, *(cue + word for word in template.words)])
    ends = [ids[len(start) :] if ids[: len(start)] == start else [] for ids in full]
    bad = [
        word for word, end in zip(template.words, ends, strict=True) if len(end) != 1 or ends.count(end) > 1
    ]
    if bad:
        raise ModelError(
            f"template {template.id!a}: this model's tokenizer does not give each label word one token of "
            f"its own: {', '.join(map(ascii, bad))}; use another template or head-v1"
        )
    return [end[0] for end in ends]


def padded(ids: Sequence[Tokens], pad: int, left: bool) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [batch, longest]; pads on the left, so that answers align, or on the right."""
    longest = max(map(len, ids))
    tokens = np.full((len(ids), longest), pad, dtype=np.int64)
    mask = np.zeros((len(ids), longest), dtype=np.int64)
    for row, each in enumerate(ids):
        place = slice(longest - len(each), None) if left else slice(len(each))
        tokens[row, place] = each
        mask[row, place] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of whole texts, without special tokens."""
    chunks = [list(texts[start : start + CHUNK]) for start in range(0, len(texts), CHUNK)]
    return [ids for chunk in chunks for ids in tokenizer(chunk, add_special_tokens=False)["input_ids"]]


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens the tokenizer puts before and after a text."""
    plain, framed = (tokenizer(["a"], add_special_tokens=added)["input_ids"][0] for added in (False, True))
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return list(framed[:start]), list(framed[start + len(plain) :])
    return [], []


def _fitted(tokenizer: Any, template: Template, rows: list[list[str]], room: int) -> list[list[int]]:
    """Ids of prompts whose first field keeps as many characters as fit: bisection, all rows at once."""

    def ids(which: NDArray[np.int64], keep: NDArray[np.int64]) -> list[list[int]]:
        """Ids of some rows' prompts with that many characters of the first field."""
        cut = [[rows[i][0][:kept].rstrip(), *rows[i][1:]] for i, kept in zip(which, keep, strict=True)]
        return _ids(tokenizer, [template.prompt(row) for row in cut])

    low = np.zeros(len(rows), dtype=np.int64)
    high = np.array([len(row[0]) - 1 for row in rows], dtype=np.int64)
    best = ids(np.arange(len(rows)), low)
    if best and max(map(len, best)) > room:
        raise ConfigError(
            f"task.length: template {template.id!a} needs {max(map(len, best)) - room} tokens more than that "
            "before any of its text: raise task.length"
        )
    guess = USUAL * room  # the first try only: most texts have this many characters or fewer
    while len(active := np.flatnonzero(low < high)):
        middle = np.minimum((low[active] + high[active] + 1) // 2, np.maximum(guess, low[active] + 1))
        for i, keep, tried in zip(active, middle, ids(active, middle), strict=True):
            if len(tried) <= room:
                best[i], low[i] = tried, keep
            else:
                high[i] = keep - 1
        guess *= 2
    return best

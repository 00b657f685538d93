# SPDX-License-Identifier: Apache-2.0
"""Text classification: by label words after a prompt, or by a trained head.

Two steps, so that bad data fails before a model is loaded: :mod:`hofl.tasks.text_data` needs files only,
:func:`text_task` adds the cut model and its tokenizer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.errors import ConfigError, ModelError
from hofl.models.boundary import CutModel
from hofl.tasks.base import Batch, Keep, Task, cross_entropy
from hofl.tasks.fill import known_lengths, model_inputs, pad_id, stand_ins, text_lengths
from hofl.tasks.metrics import Sums
from hofl.tasks.predictions import classified
from hofl.tasks.text_data import Examples, TextData
from hofl.tasks.tokens import Encoded, cut_facts, encode, word_tokens


def text_task(data: TextData, model: CutModel, tokenizer: Any, *, length: int, batch: int = 32) -> Task:
    """The task of a cut model on the data; every text is tokenised once, here.

    Args:
        data: from :func:`hofl.tasks.text_data.read_text`, or what one half of it has.
        model: whose output is logits [batch, positions, vocabulary or label words], or [batch, classes]
            for a trained head.
        tokenizer: of the model.
        length: tokens of the longest prompt; longer ones are cut in the text and counted.
        batch: examples an evaluation batch.

    Raises:
        ConfigError: ``length`` is too short for the template or too long for the model.
        ModelError: the label words are not one token each.
    """
    words = [] if data.template.head else word_tokens(tokenizer, data.template)
    _check_length(model, length)
    train = encode(tokenizer, data.template, data.train.texts, length)
    alone = data.evaluation is data.train  # the others are elsewhere
    held_out = train if alone else encode(tokenizer, data.template, data.evaluation.texts, length)
    fill = model_inputs(model, tokenizer, left=bool(words))
    score = _scores(words, len(data.names))
    pad = pad_id(model, tokenizer)

    def collate(numbers: NDArray[np.int64], of: Encoded = train, labels: Examples = data.train) -> Batch:
        """Examples by number, of the training set unless another is named."""
        targets = torch.from_numpy(labels.labels[numbers]).to(model.device)
        return Batch(fill([of.ids[i] for i in numbers]), targets)

    def answers(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Logits and targets of held-out examples by number."""
        scored = collate(rows, held_out, data.evaluation)
        return score(model.full(scored.inputs)), scored.targets

    def evaluate(keep: Keep | None = None) -> Sums:
        """All held-out examples, in batches of like length."""
        order = np.argsort([len(ids) for ids in held_out.ids], kind="stable")
        return classified(answers, order, batch, data.names, keep)

    facts = {**data.facts, "label_tokens": words, "length": length, **cut_facts(data.facts, train, held_out)}
    return Task(
        "text",
        model,
        data.clients,
        data.shards,
        collate,
        lambda output, batch: cross_entropy(score(output), batch),
        evaluate,
        data.seed,
        facts,
        lengths=text_lengths,
        top_inputs=lambda lengths, z: fill(stand_ins(known_lengths(lengths, z), pad)),
    )


def _check_length(model: CutModel, length: int) -> None:
    longest = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    if length < 1 or (longest and length > longest):
        raise ConfigError(f"task.length = {length}: allowed is 1 to {longest or 'any'} tokens for this model")


def _scores(words: Sequence[int], classes: int) -> Callable[[Tensor], Tensor]:
    """Output -> logits [batch, classes]: of the label words at the answer position, or of the head."""

    def score(output: Tensor) -> Tensor:
        """Logits of the last position, then of the label words."""
        last = output[:, -1] if output.ndim == 3 else output
        if words and last.shape[1] != classes:  # a whole vocabulary, not a head restricted to the words
            last = last[:, list(words)]
        if last.shape[1] != classes:
            raise ModelError(
                f"the model's head has {last.shape[1]} outputs for {classes} classes: rebuild the head"
            )
        return last

    return score

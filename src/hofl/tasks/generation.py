# SPDX-License-Identifier: Apache-2.0
"""Answers as text: trained token by token after a prompt, generated greedily, scored as SQuAD v1.1 is.

Two steps, as for classification: :mod:`hofl.tasks.generation_data` needs files only,
:func:`generation_task` adds the cut model and its tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hofl.errors import ModelError
from hofl.models.boundary import CutModel
from hofl.tasks import squad
from hofl.tasks.base import Batch, Keep, Task, aligned, token_cross_entropy
from hofl.tasks.fill import known_lengths, model_inputs, pad_id, stand_ins, text_lengths
from hofl.tasks.generation_data import QuestionData, Questions
from hofl.tasks.generation_greedy import first_lines, greedy, stop_tokens
from hofl.tasks.generation_tokens import (
    check_length,
    ends,
    row_losses,
    tallied,
    vocabulary,
)
from hofl.tasks.metrics import Tally
from hofl.tasks.templates import Template
from hofl.tasks.tokens import Encoded, Tokens, cut_facts, encode


def generation_task(
    data: QuestionData, model: CutModel, tokenizer: Any, *, length: int, new_tokens: int = 64, batch: int = 32
) -> Task:
    """The task of a cut model on questions; every text is tokenised once, here.

    It is trained on the first answer of each row and the token that ends a text: the loss is the mean over
    these tokens of a batch, and only their logits are asked for. All answers count at evaluation.

    Args:
        data: from :mod:`hofl.tasks.generation_data`.
        model: whose output is logits [batch, positions, vocabulary].
        tokenizer: of the model.
        length: tokens of the longest prompt; longer ones are cut in their first field and counted.
        new_tokens: tokens of the longest answer, generated or trained on.
        batch: examples an evaluation batch.

    Raises:
        ConfigError: ``length`` is too short for the template, or with ``new_tokens`` too long for the model.
        ModelError: the tokenizer has no token that ends a text.
    """
    check_length(model, length, new_tokens)
    stops, pad = _stops(tokenizer), pad_id(model, tokenizer)
    train, tested = _encoded(tokenizer, data, length, new_tokens)
    fill = model_inputs(model, tokenizer, left=True)

    def collate(numbers: NDArray[np.int64], of: "_Encoded" = train) -> Batch:
        """Examples by number, of the training set unless another is named."""
        pairs = [(of.prompts.ids[i], of.answers[i]) for i in numbers]
        inputs = fill([np.concatenate([prompt, answer[:-1]]) for prompt, answer in pairs])
        return aligned(inputs, torch.from_numpy(ends([answer for _, answer in pairs])).to(model.device))

    def answered(numbers: NDArray[np.int64]) -> tuple[list[dict[str, Any]], list[float]]:
        """Held-out questions by number: what is generated, and the summed loss of the first answer."""
        losses = row_losses(model, collate(numbers, tested))
        prompts = fill([tested.prompts.ids[i] for i in numbers])
        found = greedy(model, prompts, new_tokens=new_tokens, stops=stops, pad=pad)
        counts, rows = [len(tested.answers[i]) for i in numbers], numbers.tolist()
        right, texts = [data.evaluation.answers[i] for i in rows], first_lines(tokenizer, found)
        return list(map(_row, rows, right, texts, losses, counts)), losses

    def evaluate(keep: Keep | None = None) -> Tally:
        """All held-out questions, in batches of like length."""
        order = np.argsort([len(ids) for ids in tested.prompts.ids], kind="stable")
        return tallied(answered, order, batch, keep, "f1", tuple(_SCORES))

    facts = {**data.facts, "vocabulary": vocabulary(model), "length": length + new_tokens - 1}
    facts |= cut_facts(data.facts, train.prompts, tested.prompts, "prompts")
    return Task(
        "generation",
        model,
        data.clients,
        data.shards,
        collate,
        token_cross_entropy,
        evaluate,
        data.seed,
        facts,
        lengths=text_lengths,
        top_inputs=lambda lengths, z: fill(stand_ins(known_lengths(lengths, z), pad)),
    )


@dataclass(frozen=True)
class _Encoded:
    """Prompts, and answers each with the token that ends a text, int32 [tokens]."""

    prompts: Encoded
    answers: list[Tokens]


def _encoded(tokenizer: Any, data: QuestionData, length: int, new_tokens: int) -> tuple[_Encoded, _Encoded]:
    """Training and held-out questions: the same twice where the others are elsewhere."""
    train = _part(tokenizer, data.template, data.train, length, new_tokens)
    alone = data.evaluation is data.train
    return train, train if alone else _part(tokenizer, data.template, data.evaluation, length, new_tokens)


def _part(tokenizer: Any, template: Template, of: Questions, length: int, new_tokens: int) -> _Encoded:
    prompts = encode(tokenizer, template, of.texts, length)
    cue = template.pattern.rsplit("\n", 1)[-1]  # tokens of an answer depend on what is before it
    given = tokenizer([cue, *(f"{cue} {answers[0]}" for answers in of.answers)], add_special_tokens=False)
    start, *full = given["input_ids"]
    end = int(tokenizer.eos_token_id)
    answers = [[*_after(start, ids, tokenizer), end][:new_tokens] for ids in full]
    return _Encoded(prompts, [np.array(each, dtype=np.int32) for each in answers])


def _after(start: list[int], ids: list[int], tokenizer: Any) -> list[int]:
    """The tokens that follow a cue.

    Raises:
        ModelError: the tokenizer joins the end of the cue with what follows.
    """
    if ids[: len(start)] != start:
        raise ModelError(f"{type(tokenizer).__name__} does not keep the prompt's end apart from an answer")
    return ids[len(start) :]


def _stops(tokenizer: Any) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no token that ends a text (eos_token): answers would not end")
    return stop_tokens(tokenizer)


_SCORES = {"exact_match": squad.exact_match, "f1": squad.f1}


def _row(row: int, answers: Sequence[str], text: str, loss: float, tokens: int) -> dict[str, Any]:
    """One example as :data:`hofl.tasks.base.Keep` has it, with its scores and its mean loss of a token."""
    scores = {name: squad.best(score, text, answers) for name, score in _SCORES.items()}
    told = {"row": row, "target": list(answers), "prediction": text}
    return {**told, **scores, "loss": loss / tokens, "tokens": tokens}

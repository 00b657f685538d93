# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding with the live parameters of a cut model, by the ``generate`` of transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hofl.models.boundary import CutModel


def greedy(
    model: CutModel,
    inputs: dict[str, Tensor],
    *,
    new_tokens: int,
    stops: Sequence[int],
    pad: int,
    cache: bool = True,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to its first stop, which is among them.

    What a model's own ``generation_config`` asks for, such as a repetition penalty, is left out: the most
    likely token is taken, whatever came before.

    Args:
        model: a causal language model, with or without adapters.
        inputs: ``input_ids`` and ``attention_mask`` [batch, positions], padded on the left.
        new_tokens: at most so many.
        stops: ids that end a text.
        pad: what fills up texts that have ended.
        cache: keep keys and values of earlier positions: less work, more memory, the same tokens.
    """
    from transformers import GenerationConfig

    unwrap = getattr(model.module, "get_base_model", None)
    base: Any = unwrap() if unwrap else model.module
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=new_tokens,
        eos_token_id=list(stops),
        pad_token_id=pad,
        use_cache=cache,
    )
    given, own = inputs["input_ids"], base.generation_config
    base.generation_config = GenerationConfig()  # what settings leave out would be filled up from it
    try:
        with torch.no_grad():
            found = base.generate(given, attention_mask=inputs["attention_mask"], generation_config=settings)
    finally:
        base.generation_config = own
    return [_ended(row, frozenset(stops)) for row in found[:, given.shape[1] :].tolist()]


def _ended(ids: list[int], stops: frozenset[int]) -> list[int]:
    place = next((i for i, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: place + 1]


def stop_tokens(tokenizer: Any) -> list[int]:
    """The end of a text, and every token with a line break in it, ascending."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    breaks = {token for token, text in enumerate(texts) if "\n" in text}
    return sorted(breaks | {int(tokenizer.eos_token_id)})


def first_lines(tokenizer: Any, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Each text without special tokens, up to its first line break, without outer white space."""
    texts = tokenizer.batch_decode([list(each) for each in tokens], skip_special_tokens=True)
    return [text.split("\n", 1)[0].strip() for text in texts]

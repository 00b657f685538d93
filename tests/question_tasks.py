# SPDX-License-Identifier: Apache-2.0
"""Generation and language tasks on tiny models, with a real tokenizer whose every id can be read off."""

from pathlib import Path
from typing import Any

from families import adapted
from hofl.core.keys import Key
from hofl.models.boundary import cut
from hofl.models.tiny import VOCABULARY
from hofl.tasks.base import Task
from hofl.tasks.generation import generation_task
from hofl.tasks.generation_data import Columns, read_questions
from hofl.tasks.language import language_task
from hofl.tasks.language_data import read_files
from hofl.tasks.partition import Partition

WORDS = [
    "[PAD]",
    "[BOS]",
    "[END]",
    "\n",
    ":",
    "Question",
    "Answer",
    "who",
    "won",
    "a",
    "the",
    "cup",
    "in",
    "May",
]
NAMES = ("Ann", "Bo Ek", "Cy", "Di Fox Gray", "Ed")
COLUMNS = Columns("squad-v1", "context,question", "answers")


def tokenizer() -> Any:
    """One token a word, a line break or a colon; unused ids are words of their own."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = [*WORDS, *dict.fromkeys(word for name in NAMES for word in name.split())]
    known += [f"w{i}" for i in range(len(known), VOCABULARY)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[PAD]"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.Split(Regex("\n|:"), "isolated")]
    )
    core.post_processor = processors.TemplateProcessing("[BOS] $A", None, [("[BOS]", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="[END]", bos_token="[BOS]"
    )


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Questions with contexts of unequal lengths and answers of one to three words."""
    return [
        {
            "context": f"{NAMES[i % 5]} won" + " the cup" * (1 + i % 4),
            "question": "who won" + " in May" * (i % 2),
            "answers": {"text": [NAMES[i % 5], f"{NAMES[i % 5]} won"], "answer_start": [0, 0]},
        }
        for i in range(count)
    ]


def questions(family: str = "llama", length: int = 40, clients: int = 3, **more: Any) -> Task:
    """A generation task; twelve questions, the last five of them held out too."""
    data = read_questions(rows(), rows()[7:], Partition(clients=clients), COLUMNS, seed=1)
    sizes = {"length": length, "new_tokens": 5, "batch": 3, **more}
    return generation_task(data, cut(adapted(family)), tokenizer(), **sizes)


def text(words: int, key: int) -> str:
    """Words of the tokenizer with line breaks between some."""
    drawn = Key.of(key, "init").generator().integers(30, VOCABULARY, words)
    return " ".join(f"w{i}" + ("\n" if i % 11 == 0 else "") for i in drawn)


def write_texts(at: Path) -> Path:
    """Three training files of unequal lengths and a held-out one."""
    at.mkdir(exist_ok=True)
    for place, words in enumerate((50, 23, 70)):
        (at / f"part-{place}.txt").write_text(text(words, place), encoding="utf-8")
    (at / "held.txt").write_text(text(41, 9), encoding="utf-8")
    return at


def language(at: Path, family: str = "llama", kind: str = "iid", length: int = 8, **more: int) -> Task:
    """A language task on :func:`write_texts`."""
    write_texts(at)
    divided = Partition(kind, clients=3)
    data = read_files(str(at / "part-*.txt"), str(at / "held.txt"), divided, seed=1)
    return language_task(data, cut(adapted(family)), tokenizer(), length=length, batch=3, **more)

# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1 of SQuAD v1.1, as the official evaluation script defines them.

Rajpurkar, Zhang, Lopyrev, Liang, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016,
section 6.1, and the script ``evaluate-v1.1.py`` that goes with the data. Written out here, for libraries that
have it report means over a set, and the sums of examples are what is needed.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles, and white space evened out."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1.0 where both are the same once normalised, else 0.0; two that are empty then are the same."""
    return float(normalised(prediction) == normalised(answer))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, counted as often as they occur.

    0.0 where they share no word, so also where both are empty.
    """
    words, expected = normalised(prediction).split(), normalised(answer).split()
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0


def best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The highest score of a prediction over all answers that count as right; there is at least one."""
    return max(score(prediction, answer) for answer in answers)

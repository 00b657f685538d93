# SPDX-License-Identifier: Apache-2.0
"""Hard cases of SQuAD v1.1's exact match and F1, worked by hand from the official script's definition.

Normalised: lower case; every ASCII punctuation mark removed, nothing in its place; then the whole words a, an
and the; then white space evened out. F1 = 2 x shared words / (words predicted + words of the answer). Of
several answers the best counts.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """One prediction, the answers that count as right, and the two scores."""

    prediction: str
    answers: tuple[str, ...]
    exact: float
    f1: float


CASES = (
    # articles
    Case("The Normans", ("Normans",), 1, 1),
    Case("an apple a day", ("apple day",), 1, 1),
    Case("theatre", ("atre",), 0, 0),  # an article inside a word stays
    Case("A-Team", ("team",), 0, 0),  # punctuation goes first: ateam
    Case("the", ("a",), 1, 0),  # both empty: the same, and no word in common
    # punctuation
    Case("U.S.", ("US",), 1, 1),
    Case("308 points.", ("308",), 0, 2 / 3),  # 2 x 1 / (2 + 1)
    Case("well-known", ("well known",), 0, 0),  # wellknown is one word
    Case("Thirty-three (33)", ("33",), 0, 2 / 3),
    Case("rock 'n' roll!", ("rock n roll",), 1, 1),
    # white space and case
    Case("  Justin \t Bieber\n", ("justin   BIEBER",), 1, 1),
    # several answers
    Case("Denver", ("Denver Broncos", "the Broncos", "Denver"), 1, 1),
    Case("Broncos of Denver", ("Denver Broncos", "The Denver Broncos football team"), 0, 4 / 5),
    Case("Santa Clara", ("California", "Levi's Stadium in Santa Clara"), 0, 4 / 7),  # 2 x 2 / (2 + 5)
    # nothing predicted
    Case("", ("Denver Broncos",), 0, 0),
    Case("...", ("Denver Broncos", "Broncos"), 0, 0),
    # words that occur several times count as often as both have them
    Case("the cat cat", ("cat",), 0, 2 / 3),
    Case("to be or not to be", ("to be to be to be",), 0, 2 / 3),  # to, to, be, be: 2 x 4 / (6 + 6)
    # Unicode: only ASCII punctuation is removed, and accents are letters
    Case("CAF\u00c9", ("caf\u00e9",), 1, 1),
    Case("cafe", ("caf\u00e9",), 0, 0),
    Case("\u201cBold\u201d", ("Bold",), 0, 0),  # curly quotes stay
    Case("4100\u20132900 BC", ("4100-2900 BC",), 0, 1 / 2),  # an en dash stays: BC alone is shared
    Case("6\u00bd sacks", ("6\u00bd",), 0, 2 / 3),
    # numbers
    Case("$1,000,000", ("1000000",), 1, 1),
    Case("10,000", ("10 000",), 0, 0),
    Case("1.5 million", ("15 million",), 1, 1),
    Case("50%", ("50 percent",), 0, 2 / 3),
    Case("one", ("1",), 0, 0),
)

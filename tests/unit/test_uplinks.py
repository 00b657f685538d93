# SPDX-License-Identifier: Apache-2.0
"""The uplinks and downlinks of the table are the numbers that the byte formulas count."""

import math
import re

import pytest

from hofl.algorithms import ALGORITHMS
from hofl.theory.traffic import Sizes, of

NUMBERS = ("weights", "scalars", "activations", "feedback", "labels")
"""Categories of four-byte numbers; keys, digests and diagnostics are no part of a method."""

SIZES = [
    {"d": 1009, "d_c": 331, "d_a": 53, "q": 1, "E": 1, "k": 1, "A": 97, "y": 8, "lag": 0},
    {"d": 1009, "d_c": 331, "d_a": 53, "q": 3, "E": 5, "k": 2, "A": 97, "y": 8, "lag": 4},
    {"d": 20011, "d_c": 4003, "d_a": 101, "q": 2, "E": 7, "k": 7, "A": 769, "y": 16, "lag": 1},
]


def evaluate(formula: str, symbols: dict[str, int]) -> int:
    """A formula as a paper writes it: neighbours are multiplied; ``ceil`` rounds up."""
    tokens = re.findall(r"[A-Za-z_]+|\d+|[-+/()]", formula)
    assert "".join(tokens) == formula.replace(" ", ""), f"{formula}: not understood"
    python = ""
    for before, token in zip(["(", *tokens], tokens, strict=False):
        times = re.match(r"[\w(]", token) and re.fullmatch(r"\w+|\)", before) and before != "ceil"
        python += (" * " if times else " ") + token
    value = eval(python, {"__builtins__": {}, "ceil": math.ceil}, symbols)  # noqa: S307 (our own table)
    assert value == int(value)
    return int(value)


def counted(name: str, way: str, s: dict[str, int]) -> int:
    """The byte formula's numbers of four bytes."""
    lag = 0 if ALGORITHMS[name].centralised else s["lag"]  # an only client is always in step
    sizes = Sizes(s["d"], s["d_c"], s["d_a"], s["E"], s["q"], 4 * s["A"], 4 * s["y"], every=s["k"], lag=lag)
    found = of(name, sizes)[way]  # type: ignore[literal-required]
    assert set(found) <= {*NUMBERS, "seeds", "digests", "metrics"}
    return sum(count for category, count in found.items() if category in NUMBERS) // 4


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_says_what_the_formula_counts(name: str, sizes: dict[str, int]) -> None:
    symbols = sizes | {"d_fo": sizes["d"] - sizes["d_c"]}
    assert evaluate(ALGORITHMS[name].uplink, symbols) == counted(name, "up", sizes)
    assert evaluate(ALGORITHMS[name].downlink, symbols) == counted(name, "down", sizes)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [("E q + d_fo", 17), ("ceil(E / k) (A + y) + d_c", 63), ("E ((2 q + 1) A + y)", 265), ("0", 0)],
)
def test_formulas_are_read_as_written(formula: str, expected: int) -> None:
    """E = 5, q = 2, d_fo = 7, k = 2, A = 10, y = 3, d_c = 24, by hand."""
    symbols = {"E": 5, "q": 2, "d_fo": 7, "k": 2, "A": 10, "y": 3, "d_c": 24}
    assert evaluate(formula, symbols) == expected

# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: where the correct option goes, on every machine the same, and rows that are none."""

from typing import Any

import numpy as np
import pytest

from hofl.errors import ConfigError, DataError
from hofl.tasks.options import dealt, marked
from hofl.tasks.partition import Partition
from hofl.tasks.text_data import TextData, read_held_out, read_own, read_text

SCIQ = {
    "template_id": "sciq-v1",
    "text": "support,question,distractor1,distractor2,distractor3",
    "label": "correct_answer",
}
ARC = {"template_id": "arc-v1", "text": "question,choices", "label": "answerKey"}


def _sciq(i: int, **changes: Any) -> dict[str, Any]:
    wrong = {f"distractor{n}": f"wrong {n} of {i}" for n in (1, 2, 3)}
    return {"question": f"what {i} ?", "support": "", "correct_answer": f"right {i}", **wrong, **changes}


def _arc(options: list[str], key: str, letters: str = "ABCDE") -> dict[str, Any]:
    names = list(letters[: len(options)])
    return {"question": "which ?", "choices": {"text": options, "label": names}, "answerKey": key}


def _read(rows: list[dict[str, Any]], seed: int = 1, **settings: Any) -> TextData:
    return read_text(rows, rows, Partition(clients=1), seed=seed, **{**SCIQ, **settings})


def test_the_letter_is_that_of_the_correct_option_and_all_four_are_listed_once() -> None:
    data = _read([_sciq(i) for i in range(200)])
    for i, (texts, label) in enumerate(zip(data.train.texts, data.train.labels, strict=True)):
        lines = texts[2].split("\n")
        assert [line[:3] for line in lines] == ["A. ", "B. ", "C. ", "D. "]
        assert lines[label] == f"{'ABCD'[label]}. right {i}"
        assert sorted(line[3:] for line in lines) == [f"right {i}", *(f"wrong {n} of {i}" for n in (1, 2, 3))]
    assert data.names == ("A", "B", "C", "D")


def test_every_place_is_as_likely() -> None:
    """2,000 rows: 500 a place, standard deviation 19.4; within five of them."""
    labels = _read([_sciq(i) for i in range(2000)]).train.labels
    assert np.abs(np.bincount(labels, minlength=4) - 500).max() < 97


def test_the_order_follows_the_seed_and_the_rows_own_text_not_its_place() -> None:
    rows = [_sciq(i) for i in range(50)]
    one, same, other = (_read(rows, seed=seed) for seed in (1, 1, 2))
    back = _read(rows[::-1])
    assert one.train.texts == same.train.texts == back.train.texts[::-1] != other.train.texts
    assert one.train.labels.tolist() == back.train.labels[::-1].tolist() != other.train.labels.tolist()
    assert one.facts["data_sha256"] != other.facts["data_sha256"]


def test_a_node_lists_its_rows_as_one_process_with_all_rows_does() -> None:
    rows = [_sciq(i) for i in range(30)]
    whole, names = _read(rows), ("a", "b")
    there = Partition("nodes", names=names)
    node = read_own(rows[20:], there, "b", seed=1, **SCIQ)
    server = read_held_out(rows[:5], there, seed=1, **SCIQ)
    assert node.train.texts == whole.train.texts[20:] and server.evaluation.texts == whole.train.texts[:5]
    assert node.train.labels.tolist() == whole.train.labels[20:].tolist()
    assert node.names == server.names == whole.names


def test_white_space_around_cells_does_not_move_an_option() -> None:
    plain, padded = _sciq(7), {name: f"  {cell} " for name, cell in _sciq(7).items()}
    assert _read([plain]).train.texts == _read([padded]).train.texts


def test_the_support_may_be_empty_and_is_what_is_cut() -> None:
    empty, full = _read([_sciq(1), _sciq(2, support="because . ")]).train.texts
    assert (empty[0], full[0]) == ("", "because .")


@pytest.mark.parametrize(
    ("row", "rest"),
    [
        (_sciq(1, correct_answer=""), "1 of 3 rows do not fit template 'sciq-v1', which needs a question"),
        (_sciq(1, correct_answer=None), "1 of 3 rows do not fit"),
        (_sciq(1, distractor2=" "), "1 of 3 rows do not fit"),
        (_sciq(1, question=""), "1 of 3 rows do not fit"),
        (_sciq(1, distractor2=None), "1 of 3 rows have no support or question"),
    ],
)
def test_a_row_that_is_no_question_is_counted_and_refused(row: dict[str, Any], rest: str) -> None:
    with pytest.raises(DataError, match=f"^task.train: {rest}") as caught:
        _read([_sciq(5), row, _sciq(6)])
    assert str(caught.value).isprintable()


def test_the_columns_that_are_needed_are_named() -> None:
    with pytest.raises(ConfigError, match="needs columns for support, question, distractor1, distractor2, d"):
        _read([_sciq(1)], text="support,question")


@pytest.mark.parametrize(
    ("row", "options", "label"),
    [
        (_arc(["x", "y"], "B"), "A. x\nB. y", 1),
        (_arc(["x", "y", "z"], "3", "12345"), "A. x\nB. y\nC. z", 2),
        (_arc(["x", "y", "z", "v", "w"], "E"), "A. x\nB. y\nC. z\nD. v\nE. w", 4),
    ],
)
def test_marked_choices_keep_their_order(row: dict[str, Any], options: str, label: int) -> None:
    data = _read([row], **ARC)
    assert data.train.texts == [("which ?", options)] and data.train.labels.tolist() == [label]


@pytest.mark.parametrize(
    "row",
    [
        _arc(["x"], "A"),
        _arc(["x", "y", "z", "v", "w", "u"], "A", "ABCDEF"),
        _arc(["x", ""], "A"),
        _arc(["x", "y"], "C"),
        _arc(["x", "y"], "A", "AA"),
        {**_arc(["x", "y"], "A"), "choices": "x or y"},
        {**_arc(["x", "y"], "A"), "choices": {"text": ["x", "y"]}},
        {**_arc(["x", "y"], "A"), "answerKey": None},
    ],
)
def test_choices_that_are_none_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(
        DataError, match="1 of 2 rows do not fit template 'arc-v1', which needs a question, two"
    ):
        _read([_arc(["x", "y"], "A"), row], **ARC)


def test_a_repeated_option_does_not_move_the_letter_from_the_correct_one() -> None:
    """Real rows have a wrong option that reads as the right one: the letter is still one that is right."""
    found = dealt(("", "q", "same", "b", "c"), "same", 3)
    assert found is not None and found[0][2].split("\n")["ABCD".index(found[1])].endswith(". same")
    assert marked(("q", {"text": ["s", "s"], "label": ["A", "B"]}), "B", 0) == (("q", "A. s\nB. s"), "B")

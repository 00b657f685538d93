# SPDX-License-Identifier: Apache-2.0
"""``python -m hofl.presets configs`` writes the files of ``configs/papers`` anew."""

import sys
from pathlib import Path

from hofl.presets import presets, text


def main(folder: Path) -> None:
    """One file a preset of the papers' own, below a folder."""
    for preset in presets().values():
        if not preset.recommended:
            file = folder / f"{preset.name}.toml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text(preset), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

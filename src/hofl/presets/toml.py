# SPDX-License-Identifier: Apache-2.0
"""Settings by dotted key as a short TOML file: sections in the order of the schema, arrays on one line."""

import json
from collections.abc import Mapping
from typing import Any

from hofl.schema import Config


def dumps(settings: Mapping[str, Any]) -> str:
    """The file; keys of a section in the order given."""
    order = list(Config.model_fields)
    sections: dict[str, list[str]] = {"": []}
    for dotted, value in sorted(settings.items(), key=lambda item: order.index(item[0].partition(".")[0])):
        section, _, name = dotted.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}\n")
    top = "".join(sections.pop(""))
    return top + "".join(f"\n[{name}]\n{''.join(lines)}" for name, lines in sections.items())

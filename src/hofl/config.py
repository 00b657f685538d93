# SPDX-License-Identifier: Apache-2.0
"""A run's configuration: one TOML file, checked key by key, with the line of whatever is wrong."""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hofl.checks import cohort_size
from hofl.errors import ConfigError, HoflError
from hofl.schema import Config, OptimizerConfig

__all__ = ["Config", "OptimizerConfig", "about", "cohort_size", "dump", "load", "parse", "placed"]


Schema = TypeVar("Schema", bound=BaseModel)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides, check everything.

    Raises:
        ConfigError: one line with the file and line, the key, what was given and what is allowed.
    """
    return parse(read(path), str(path), overrides)


def read(path: str | Path) -> str:
    """The text of a TOML file, or of the preset of a name such as ``papers/ho_fl/opt-125m/sst2/fedavg``.

    Raises:
        ConfigError: it cannot be read, or there is no such preset.
    """
    if str(path).startswith("papers/") and not Path(path).exists():
        from hofl import presets  # it needs this module

        return presets.text(presets.find(str(path)))
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(f"{path}: {reason}; give the path of a .toml configuration") from None


def parse(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """Like :func:`load` on text; ``name`` is what messages call it."""
    return parse_as(Config, text, name, overrides)


def parse_as(schema: type[Schema], text: str, name: str, overrides: Sequence[str] = ()) -> Schema:
    """Like :func:`parse`, for the file of another schema."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax(name, text, str(error))) from None
    given = [_override(item) for item in overrides]
    for keys, value in given:
        _assign(data, keys, value)
    try:
        return schema.model_validate(_tuples(data))
    except ValidationError as error:
        commands = {".".join(keys) for keys, _ in given}
        raise ConfigError(_describe(schema, error.errors()[0], name, text, data, commands)) from None


@contextmanager
def placed(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Put the file and line, or ``command line``, before what is said of a setting while a run is built.

    What a boundary may be, say, is known only once there is a model; the message starts with its key.

    Raises:
        HoflError: the one raised inside, with its place if it is about a setting.
    """
    try:
        yield
    except HoflError as error:
        key = _subject(str(error))
        if key is None:
            raise
        spoken = any(item.partition("=")[0].strip() == key for item in overrides)
        where = "command line" if spoken else f"{path}{_line(read(path), key)}"
        raise type(error)(f"{where}: {error}") from None


@contextmanager
def about(key: str) -> Iterator[None]:
    """Begin what is said inside with the setting ``key``, unless it begins with a setting already.

    Raises:
        HoflError: the one raised inside.
    """
    try:
        yield
    except HoflError as error:
        if _subject(str(error)):
            raise
        raise type(error)(f"{key}: {error}") from error


def _subject(message: str) -> str | None:
    """The setting that a message begins with."""
    found = re.match(r"([a-z_.]+)(?=[: ])", message)
    return found[1] if found and found[1] in set(_paths(Config)) else None


def dump(config: Config) -> str:
    """The complete configuration as TOML; parsing it gives an equal one."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def run_id(config: Config) -> str:
    """Names a run: what was resolved of its configuration, 16 hexadecimal digits."""
    return hashlib.sha256(dump(config).encode()).hexdigest()[:16]


def _override(item: str) -> tuple[list[str], Any]:
    key, equals, raw = item.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key.strip()):
        raise ConfigError(f"command line: '{item}' is no setting; write section.key=value")
    try:
        parsed = tomllib.loads(f"v = {raw}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    return key.strip().split("."), parsed["v"] if set(parsed) == {"v"} else raw.strip()


def _assign(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"command line: {'.'.join(keys)} is unknown; {key} is no section")
        data = inner
    data[keys[-1]] = value


def _tuples(value: Any) -> Any:
    """Lists as tuples, since the models are frozen and strict."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _syntax(name: str, text: str, message: str) -> str:
    found = re.search(r"\(at line (\d+), column \d+\)", message)
    line = int(found[1]) if found else max(1, len(text.splitlines()))
    return f"{name}:{line}: {re.sub(r' *[(]at [^)]*[)]', '', message)}; the file is not valid TOML"


def _describe(
    schema: type[BaseModel],
    error: ErrorDetails,
    name: str,
    text: str,
    data: dict[str, Any],
    commands: set[str],
) -> str:
    context = error.get("ctx", {})
    path = str(context.get("path") or ".".join(_keys(schema, error["loc"])))
    spoken = any(f"{key}.".startswith(f"{path}.") for key in commands)
    where = "command line" if spoken else f"{name}{_line(text, path)}"
    if error["type"] == "extra_forbidden":
        return f"{where}: {path} is unknown{_suggest(schema, path)}"
    given = _given(data, path)
    if given is None:
        return f"{where}: {path} {_allowed(error)}"
    return f"{where}: {path} = {_show(given)}: {_allowed(error)}"


def _keys(schema: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The dotted key of an error: stops at an element of an array or a branch of a union."""
    known = set(_paths(schema))
    keys: list[str] = []
    for part in location:
        if not isinstance(part, str) or ".".join(keys) in known:
            break
        keys.append(part)
    return keys


def _allowed(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    words = {
        "value_error": str(context.get("error", "")),
        "together": str(context.get("allowed", "")),
        "literal_error": f"must be {context.get('expected', '')}",
        "missing": "must have an element more",
        "too_long": f"must have at most {context.get('max_length')} elements",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be a string in quotes",
        "bool_type": "must be true or false",
        "tuple_type": "must be an array such as [8, 16]",
        "model_type": "must be a section with keys of its own",
    }
    return words.get(error["type"]) or error["msg"].replace("\n", " ")


def _show(value: Any) -> str:
    shown = tomli_w.dumps({"v": value}, multiline_strings=False).partition("= ")[2].split()
    line = " ".join(shown).replace("[ ", "[").replace(", ]", "]")
    return line if len(line) <= 80 else line[:77] + "..."


def _given(data: Any, path: str) -> Any:
    """What the file or the command line says at a dotted key; None if nothing."""
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _line(text: str, path: str) -> str:
    """``:n``, the line that sets ``path`` or else the closest section around it; empty if none does."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
        key = re.match(r"\s*([\w.\"' -]+?)\s*=", line)
        if header:
            section = re.sub(r"[\s\"']", "", header[1])
            lines.setdefault(section, number)
        elif key:
            bare = re.sub(r"[\s\"']", "", key[1])
            lines.setdefault(f"{section}.{bare}" if section else bare, number)
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return f":{lines[path]}" if path else ""


def _paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, without the names of sections."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner:
            yield from _paths(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def _suggest(schema: type[BaseModel], path: str) -> str:
    known = list(_paths(schema))
    last = path.rpartition(".")[2]
    close = [k for k in known if k.rpartition(".")[2] == last] or difflib.get_close_matches(
        path, known, 1, 0.75
    )
    if close:
        return f", did you mean {close[0]}?"
    section = path.rpartition(".")[0]
    if section:
        inside = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
        return f"; [{section}] has {', '.join(inside)}"
    sections = dict.fromkeys(f"[{k.partition('.')[0]}]" for k in known if "." in k)
    return f"; there are {', '.join([k for k in known if '.' not in k])} and {', '.join(sections)}"

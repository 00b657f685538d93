# SPDX-License-Identifier: Apache-2.0
"""Finding the list of blocks of any module, and where each parameter lies relative to it."""

from torch import nn

from hofl.core.layout import EMBED
from hofl.errors import ModelError

RIVAL = 1 / 8
"""Another list of blocks with this share of the largest one's parameters makes the choice ambiguous."""
_BEFORE = ("embed", "wte", "wpe", "project_in")
_AFTER = ("norm", "ln_f", "project_out", "head", "score", "classifier", "pooler")


def _lists(module: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    found = module.named_modules()
    return {n: m for n, m in found if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1}


def _weight(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _refuse(module: nn.Module, why: str) -> ModelError:
    lists = ", ".join(f"{path} ({len(found)})" for path, found in _lists(module).items() if path)
    example = next((path for path in _lists(module) if path), "net.stages")
    return ModelError(
        f"model.blocks: {why} in {type(module).__name__}; lists found: {lists or 'none'}; "
        f'name the one whose elements run one after another, as in model.blocks = "{example}"'
    )


def find_blocks(module: nn.Module, path: str | None = None) -> tuple[str, list[nn.Module]]:
    """The dotted path and the elements of the block list.

    Args:
        module: any module, not wrapped.
        path: the user's choice; else the children of an ``nn.Sequential``, else the unique largest
            list (by parameters) whose elements share a class.

    Raises:
        ModelError: no list, two rivals, or a path that names no list; the message lists candidates.
    """
    if path is None and not isinstance(module, nn.Sequential):
        path = _largest(module)
    lists: dict[str, nn.Module] = {"": module, **dict(module.named_modules())}
    chosen = lists.get(path or "")
    if not isinstance(chosen, nn.ModuleList | nn.Sequential) or len(chosen) < 1:
        raise _refuse(module, f'"{path}" is no list of blocks')
    elements = list(chosen)
    if len({id(block) for block in elements}) < len(elements):
        raise _refuse(module, f'"{path}" holds one module twice')
    return path or "", elements


def _largest(module: nn.Module) -> str:
    alike = {path: _weight(m) for path, m in _lists(module).items() if len({type(c) for c in m}) == 1}
    if not alike:
        raise _refuse(module, "no list of blocks of one class")
    best = max(alike, key=lambda path: alike[path])
    for path, weight in alike.items():
        nested = f"{path}.".startswith(f"{best}.") or f"{best}.".startswith(f"{path}.")
        if path != best and not nested and weight > RIVAL * alike[best]:
            raise _refuse(module, f'both "{best}" and "{path}" could be the blocks')
    return best


def block_of(name: str, path: str, count: int, after: bool) -> int:
    """The block a parameter belongs to: ``EMBED``, ``0 .. count-1``, or ``count`` for the head.

    Args:
        name: the parameter's dotted name.
        path: of the block list.
        count: number of blocks.
        after: whether it is registered after the block list; names decide where registration misleads
            (OPT registers its final norm before its layers). ``CutModel.self_test`` checks the outcome.
    """
    prefix = f"{path}." if path else ""
    rest = name.removeprefix(prefix).split(".", 1)[0]
    if name.startswith(prefix) and rest.isdigit():
        return int(rest)
    if any(word in name for word in _BEFORE):
        return EMBED
    return count if after or any(word in name for word in _AFTER) else EMBED

# SPDX-License-Identifier: Apache-2.0
"""Which nodes a SuperLink lets in: those whose public keys lie in the key folder, and no other."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hofl.errors import RunFailed
from hofl.runtime.flower.superlink import CONNECTION, Site, flwr

_BOOK = "registered.json"
_KNOWN = "already in use"
_AT_ONCE = 4


def changed(site: Site) -> bool:
    """Whether a key has come or gone since the last :func:`register`; costs no command."""
    here = _here(site)
    return site.keys is not None and here.keys() != _book(site).keys()


def register(site: Site) -> tuple[list[str], list[str]]:
    """Tell the SuperLink of the keys that have come or gone since the last call, 1 to 2 s each.

    Returns:
        names of the nodes let in from now on, and of those whose key is gone and that are refused.

    Raises:
        RunFailed: Flower refuses a key.
    """
    book, here = _book(site), _here(site)
    new = [sha for sha in here if sha not in book]
    gone = [sha for sha in book if sha not in here]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        for sha, node in zip(new, pool.map(lambda sha: _add(site, here[sha]), new), strict=True):
            book[sha] = {"name": here[sha].stem, "node": node}
            _write(site, book)  # at once: without its number a node cannot be refused later
        left = [str(book[sha]["name"]) for sha in gone]
        for sha, _ in zip(gone, pool.map(lambda sha: _remove(site, book[sha]), gone), strict=True):
            del book[sha]
            _write(site, book)
    return [here[sha].stem for sha in new], left


def forget(site: Site) -> None:
    """Before the first start on a new database: nothing is registered there."""
    (site.state / _BOOK).unlink(missing_ok=True)


def _here(site: Site) -> dict[str, Path]:
    """Files of public keys by the hash of what is in them."""
    files = sorted(site.keys.nodes.glob("*.pub")) if site.keys else []
    return {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in files}


def _book(site: Site) -> dict[str, dict[str, Any]]:
    """What has been registered in this database: name and Flower's number of each key by its hash."""
    file = site.state / _BOOK
    if not file.is_file():
        return {}
    book: dict[str, dict[str, Any]] = json.loads(file.read_bytes())
    return book


def _write(site: Site, book: dict[str, dict[str, Any]]) -> None:
    file = site.state / _BOOK
    fresh = file.with_suffix(".partial")
    fresh.write_text(json.dumps(book, indent=2), encoding="utf-8")
    os.replace(fresh, file)


def _add(site: Site, file: Path) -> str:
    """The node's number; empty if the SuperLink knows the key already, from a call that was broken off."""
    try:
        answer = flwr(site, "supernode", "register", str(file.absolute()), CONNECTION, "--name", file.stem)
    except RunFailed as error:
        if _KNOWN in str(error):
            return ""
        raise RunFailed(f"{file}: {error}") from None
    return str(answer["node-id"])


def _remove(site: Site, entry: dict[str, Any]) -> None:
    if not entry["node"]:
        raise RunFailed(
            f"node {entry['name']} cannot be shut out, its number is lost: remove {site.database}"
        )
    flwr(site, "supernode", "unregister", entry["node"], CONNECTION)

# SPDX-License-Identifier: Apache-2.0
"""A node's file: who this client is, where its server, data and model are, and what it agrees to."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from hofl import config as settings
from hofl.errors import ConfigError
from hofl.memory.units import bytes_of
from hofl.runtime.flower.processes import is_here
from hofl.schema import Count, Natural
from hofl.tasks.files import CLIENT_ID

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):(\d{1,5})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def _size(text: str) -> str:
    bytes_of(text)
    return text


def _client(text: str) -> str:
    if text and not CLIENT_ID.fullmatch(text):
        raise ValueError("must be a client id: 1 to 64 of A-Z a-z 0-9 _ -")
    return text


def _declared(boundary: int) -> int:
    if boundary < -1:
        raise ValueError("must be -1 (any) or a number of blocks")
    return boundary


def _hashes(models: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_SHA256.fullmatch, models)):
        raise ValueError("must hold SHA-256 sums, 64 hexadecimal digits each")
    return models


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(_Section):
    """The client's own data; what is empty is as the run says in ``[task]``."""

    train: str = ""
    text: str = ""
    label: str = ""


class SourceConfig(_Section):
    """Where the model lies on this machine; empty: where the run says."""

    source: str = ""


class DeviceConfig(_Section):
    """What this machine has.

    Attributes:
        threads: of PyTorch; 0 leaves it alone.
        memory: a size such as ``2 GiB``; empty for no limit.
        boundary: blocks below which it cannot backpropagate; -1 any.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Natural = 0
    memory: Annotated[str, AfterValidator(_size)] = ""
    boundary: Annotated[int, AfterValidator(_declared)] = -1

    @property
    def bytes(self) -> int:
        """``memory`` in bytes; 0 for no limit."""
        return bytes_of(self.memory)


class ConsentConfig(_Section):
    """What this node takes part in: see :class:`hofl.runtime.flower.consent.Consent`."""

    models: Annotated[tuple[str, ...], AfterValidator(_hashes)] = ()
    max_probe_cost: Natural = 0
    split: bool = False
    minimum_batch: Count = 1
    max_rounds: Natural = 0
    differential_privacy: bool = False


class NodeConfig(_Section):
    """A node's file; :func:`load_node` makes its paths absolute.

    Attributes:
        client: this client's id.
        server: ``host:port`` of the server.
        ca: certificate of its authority; empty, like ``key``, for plain HTTP inside one machine.
        key: this node's private key.
        folder: what the node keeps.
    """

    client: Annotated[str, AfterValidator(_client)] = ""
    server: str = ""
    ca: str = ""
    key: str = ""
    folder: str = "state"
    data: DataConfig = DataConfig()
    model: SourceConfig = SourceConfig()
    device: DeviceConfig = DeviceConfig()
    consent: ConsentConfig = ConsentConfig()

    @property
    def secure(self) -> bool:
        """Whether the server is reached over TLS, with this node's key."""
        return bool(self.ca)

    @model_validator(mode="after")
    def _together(self) -> "NodeConfig":
        for path, wrong, allowed in _contradictions(self):
            if wrong:
                raise PydanticCustomError("together", "{allowed}", {"path": path, "allowed": allowed})
        return self


def load_node(path: str | Path, overrides: Sequence[str] = (), client_id: str | None = None) -> NodeConfig:
    """Read a node's file, apply ``section.key=value`` overrides, check everything.

    Args:
        path: a TOML file; paths in it are relative to its folder, those of overrides to the current one.
        overrides: as of ``hofl run``.
        client_id: what ``--client-id`` says; it goes before the file.

    Raises:
        ConfigError: one line with the file and line, the key, what was given and what is allowed.
    """
    text = settings.read(path)
    flagged = {} if client_id is None else {"client": client_id}
    given = [*overrides, *tomli_w.dumps(flagged).splitlines()]
    node = settings.parse_as(NodeConfig, text, str(path), given)
    spoken = frozenset(item.partition("=")[0].strip() for item in given)
    return _absolute(node, _Source(str(path), text, spoken))


@dataclass(frozen=True)
class _Source:
    """Where a node's settings were said: the file, its text, and keys of the command line."""

    name: str
    text: str
    spoken: frozenset[str]

    def where(self, path: str) -> str:
        """The file and line, or ``command line``."""
        return "command line" if path in self.spoken else f"{self.name}{settings._line(self.text, path)}"

    def folder(self, path: str) -> Path:
        """What the path at this key is relative to."""
        return Path.cwd() if path in self.spoken else Path(self.name).resolve().parent


def _contradictions(node: NodeConfig) -> Iterator[tuple[str, bool, str]]:
    """Settings that are missing or wrong together: (key, is it wrong, what is allowed)."""
    flag = 'is missing; give --client-id ID, or client = "ID" in the node file'
    yield "client", not node.client, flag
    yield "server", not node.server, 'is missing; give server = "host:port"'
    yield "server", not _is_address(node.server), 'must be "host:port", without a scheme'
    keyless = "is missing: with ca the server asks for this node's private key"
    yield "key", bool(node.ca) and not node.key, f'{keyless}; give key = "ID.key" of hofl keys'
    open_ = 'is missing: a key is used over TLS alone; give ca = "ca.crt" of hofl keys'
    yield "ca", bool(node.key) and not node.ca, open_
    away = "is another machine, which is reached over TLS alone; give ca and key of hofl keys"
    yield "server", not node.ca and not is_loopback(node.server), away
    yield "folder", not node.folder, "must name a folder"


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    if not found or not 1 <= int(found[2]) <= 65535:
        return False
    try:
        return not found[1].startswith("[") or bool(ip_address(found[1][1:-1]))
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is this machine for certain, without asking a name server."""
    return is_here(address.rpartition(":")[0].strip("[]").lower())


def _absolute(node: NodeConfig, source: _Source) -> NodeConfig:
    """The node with its paths as they are from any folder; its secrets must be there."""
    changed: dict[str, Any] = {}
    for name in ("ca", "key", "folder"):
        said = getattr(node, name)
        place = source.folder(name) / Path(said).expanduser() if said else None
        if place and name != "folder" and not place.is_file():
            raise ConfigError(f"{source.where(name)}: {name} = {said}: no such file")
        changed[name] = str(place or "")
    train, model = node.data.train, node.model.source
    if train and not train.startswith(("hub:", "package:")):
        train = str(source.folder("data.train") / Path(train).expanduser())
    lies_here = source.folder("model.source") / Path(model).expanduser()
    if model and (lies_here.exists() or model.startswith((".", "/", "~")) or model.endswith(".gguf")):
        model = str(lies_here)
    changed["data"] = node.data.model_copy(update={"train": train})
    changed["model"] = node.model.model_copy(update={"source": model})
    return node.model_copy(update=changed)

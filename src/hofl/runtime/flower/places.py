# SPDX-License-Identifier: Apache-2.0
"""Where a client's bytes and its data are: a folder of its own, or a simulation's node."""

import os
import secrets
from pathlib import Path

import torch

from hofl.build_task import device_of, node_task
from hofl.config import Config
from hofl.runtime import files
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.join import Invitation
from hofl.runtime.flower.node_config import NodeConfig
from hofl.runtime.flower.role import Builder, Self
from hofl.tasks.base import Task


class FolderStore:
    """Bytes in files of one folder, each replaced whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with files.storage(folder, "make it writable, or name another folder"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, name: str) -> bytes | None:
        """The file's bytes, None if there is none."""
        path = self._folder / name
        return path.read_bytes() if path.is_file() and not path.is_symlink() else None

    def put(self, name: str, data: bytes) -> None:
        """Replace the file."""
        with files.storage(self._folder, "make room, or name another folder"):
            files.replace(self._folder / name, data)

    def salt(self) -> bytes:
        """32 secret bytes, made once: what this client's data is hashed with."""
        path = self._folder / "salt"
        if not path.is_file():
            with files.storage(self._folder, "make it writable, or name another folder"):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(descriptor, secrets.token_bytes(32))
                os.close(descriptor)
        return path.read_bytes()


def self_of(config: NodeConfig, resident: bool) -> Self:
    """What a node's file says of it."""
    return Self(
        client=config.client,
        consent=Consent.of(config),
        build=builder(config),
        boundary=config.device.boundary,
        memory=config.device.bytes,
        resident=resident,
        salt=FolderStore(Path(config.folder)).salt(),
    )


def builder(node: NodeConfig) -> Builder:
    """Makes a node's task from the run's configuration and its own data, model and device."""

    def _build(invitation: Invitation, config: Config) -> Task:
        if threads := node.device.threads or config.run.threads:
            torch.set_num_threads(threads)
        return node_task(
            config,
            node.client,
            train=node.data.train,
            text=node.data.text,
            label=node.data.label,
            source=node.model.source,
            device=device_of(node.device.device),
            names=invitation.labels,
            images=invitation.images,
        )

    return _build

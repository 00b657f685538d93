# SPDX-License-Identifier: Apache-2.0
"""The key folder of a fleet: its own certificate authority, the server's certificate, a key for each node.

    ca.crt, ca.key            signs the server's certificate; ca.key is needed here only
    server.crt, server.key    TLS of the server, for the names it was made for and this machine itself
    nodes/ID.key, nodes/ID.pub    who a node is: ECDSA P-384 in OpenSSH's format, as Flower reads it

Nothing is ever overwritten: each file appears whole or not at all, a second run makes what is missing and
keeps the rest. A ``nodes/ID.key`` that went to its node may be gone from here; its ``.pub`` stays.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hofl.errors import ConfigError
from hofl.runtime.files import write_synced
from hofl.runtime.flower import certificates
from hofl.runtime.flower.certificates import CA_DAYS, FIX, check_certificate, read_bytes
from hofl.tasks.files import CLIENT_ID

__all__ = ["KeyFolder", "check_certificate", "create", "load_private", "public_keys", "read_folder"]

HERE = ("localhost", "127.0.0.1")
"""Hosts that every server certificate is for."""


@dataclass(frozen=True)
class KeyFolder:
    """The paths of a key folder, whether or not the files are there."""

    folder: Path

    @property
    def ca_certificate(self) -> Path:
        """What every machine holds."""
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """What no running machine needs."""
        return self.folder / "ca.key"

    @property
    def server_certificate(self) -> Path:
        """The server's, with its names."""
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        """The server's secret."""
        return self.folder / "server.key"

    @property
    def nodes(self) -> Path:
        """The folder of the nodes' keys."""
        return self.folder / "nodes"

    def node_key(self, client: str) -> Path:
        """A node's secret."""
        return self.nodes / f"{client}.key"

    def node_public(self, client: str) -> Path:
        """By what the server knows a node."""
        return self.nodes / f"{client}.pub"

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients with a public key here, sorted."""
        return tuple(sorted(path.stem for path in self.nodes.glob("*.pub")))


def create(folder: str | Path, hosts: Sequence[str], clients: Sequence[str], days: int = 365) -> list[Path]:
    """Make what a key folder lacks; files that are there stay as they are.

    Args:
        folder: new or made by this function.
        hosts: DNS names and IP addresses under which nodes reach the server, without ports.
        clients: ids of the nodes.
        days: for which a new server certificate is valid, at most as long as the authority's.

    Returns:
        the files that were written.

    Raises:
        ConfigError: an argument is not allowed, a file that is there does not fit what is asked, a secret
            that is needed is missing, or the folder cannot be written.
    """
    names = list(dict.fromkeys(certificates.host(host) for host in (*hosts, *HERE)))
    for client in clients:
        if not CLIENT_ID.fullmatch(client):
            raise ConfigError(f"{client[:80]!a} is no client id: allowed are 1 to 64 of A-Z a-z 0-9 _ -")
    if not 1 <= days <= CA_DAYS:
        raise ConfigError(f"{days} days: a server certificate is valid for 1 to {CA_DAYS}")
    keys, written = KeyFolder(Path(folder)), list[Path]()
    try:
        for place in (keys.folder, keys.nodes):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(place, 0o700)
        _certificates(keys, names, days, written)
        for client in dict.fromkeys(clients):
            _node(keys, client, written)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename2 or error.filename}: was there already; not touched") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}; nothing was overwritten") from None
    return written


def read_folder(folder: str | Path) -> KeyFolder:
    """The key folder of a server, checked: complete, secret, valid today, and of one authority.

    Raises:
        ConfigError: what is missing or wrong, and what to do.
    """
    keys = KeyFolder(Path(folder))
    needed = (keys.ca_certificate, keys.server_certificate, keys.server_key)
    missing = [path.name for path in needed if not path.is_file()]
    missing += [] if keys.clients else ["nodes/*.pub"]
    if missing:
        raise ConfigError(f"{folder}: no {', '.join(missing)} here; make them with: hofl keys {folder}")
    for certificate in (keys.ca_certificate, keys.server_certificate):
        check_certificate(certificate)
    _require_pair(keys)
    return keys


def public_keys(folder: str | Path) -> dict[str, bytes]:
    """Each client's public key as Flower's registry holds it, PEM SubjectPublicKeyInfo.

    Raises:
        ConfigError: a file is named after no client id or holds no ECDSA key, or two hold the same.
    """
    keys, found = KeyFolder(Path(folder)), dict[str, bytes]()
    for client in keys.clients:
        path = keys.node_public(client)
        if not CLIENT_ID.fullmatch(client):
            raise ConfigError(f"{path}: {client[:80]!a} is no client id; rename or remove it")
        try:
            key = serialization.load_ssh_public_key(read_bytes(path))
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"{path}: is no ECDSA public key in OpenSSH's format; {FIX.format('it')}")
        encoded = key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        twin = next((other for other, bytes_ in found.items() if bytes_ == encoded), None)
        if twin is not None:
            raise ConfigError(f"{path}: holds the key of {twin}; each client needs its own")
        found[client] = encoded
    return found


def load_private(path: str | Path) -> ec.EllipticCurvePrivateKey:
    """A node's private key, in OpenSSH's format.

    Raises:
        ConfigError: no such file, others can read it, or it holds no usable EC key without a passphrase.
    """
    file = Path(path)
    data = read_bytes(file)
    _require_private(file, 0o600)
    try:
        key = serialization.load_ssh_private_key(data, None)
    except TypeError:
        raise ConfigError(f"{path}: has a passphrase; run: ssh-keygen -p -N '' -f {path}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: is no OpenSSH private key; make one with hofl keys") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: is no ECDSA key; make one with hofl keys")
    return key


def _certificates(keys: KeyFolder, names: Sequence[x509.GeneralName], days: int, written: list[Path]) -> None:
    """The authority and the server's certificate, each made if it is missing."""
    signed = keys.server_certificate.is_file()
    if signed or keys.ca_certificate.is_file():
        needed = keys.ca_certificate if signed else keys.ca_key
        if not needed.is_file():
            raise ConfigError(f"{needed}: is missing; put it back, or start with a new folder")
    else:
        _write(keys.ca_certificate, certificates.authority(_secret(keys.ca_key, written)), written)
    check_certificate(keys.ca_certificate)
    if not signed:
        ca_key, issuer = _pem_key(keys.ca_key), certificates.read(keys.ca_certificate)
        if ca_key.public_key() != issuer.public_key():
            raise ConfigError(f"{keys.ca_key}: is not of ca.crt; put the right one back")
        made = certificates.signed(ca_key, issuer, _secret(keys.server_key, written), names, days)
        _write(keys.server_certificate, made, written)
    check_certificate(keys.server_certificate)
    known = certificates.names(certificates.read(keys.server_certificate))
    lacking = [str(name.value) for name in names if name not in known]
    if lacking:
        found = FIX.format("server.crt")
        raise ConfigError(f"{keys.server_certificate}: is not for {', '.join(lacking)}; {found}")
    _require_pair(keys)


def _require_pair(keys: KeyFolder) -> None:
    """The server's certificate is of this authority, and of its key, which is secret."""
    certificate = certificates.require_issued(keys.server_certificate, keys.ca_certificate)
    if certificate.public_key() != _pem_key(keys.server_key).public_key():
        raise ConfigError(f"{keys.server_key}: is not of server.crt; {FIX.format('server.crt')}")


def _node(keys: KeyFolder, client: str, written: list[Path]) -> None:
    """A node's pair, if it is not there; a public file alone is of a node that has its key."""
    secret, public = keys.node_key(client), keys.node_public(client)
    if public.is_file():
        return
    if secret.is_file():
        key = load_private(secret)
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PrivateFormat.OpenSSH
        plain = serialization.NoEncryption()
        _write(secret, key.private_bytes(serialization.Encoding.PEM, form, plain), written)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, line + f" {client}\n".encode(), written)


def _secret(path: Path, written: list[Path]) -> ec.EllipticCurvePrivateKey:
    """The key of a certificate: the one that is there, or a new one."""
    if path.is_file():
        return _pem_key(path)
    key = ec.generate_private_key(ec.SECP384R1())
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, plain), written)
    return key


def _pem_key(path: Path) -> ec.EllipticCurvePrivateKey:
    data = read_bytes(path)
    _require_private(path, 0o600)
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: is no PEM private key of hofl keys; {FIX.format('it')}")
    return key


def _require_private(path: Path, mode: int) -> None:
    """Refuse what others can read; where there are no such rights, there is nothing to refuse."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: others can read this; run: chmod {mode:o} {path}")


def _write(path: Path, data: bytes, written: list[Path]) -> None:
    """Make a file whole, for its owner alone, where there is none.

    Raises:
        FileExistsError: there is one.
    """
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        try:
            write_synced(descriptor, data)
        finally:
            os.close(descriptor)
        os.link(partial, path)  # a rename would replace what is there
    finally:
        os.unlink(partial)
    written.append(path)

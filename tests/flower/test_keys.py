# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import os
import socket
import ssl
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.args import try_obtain_root_certificates, try_obtain_server_certificates
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message, verify_signature
from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

from hofl.commands.keys import keys as command
from hofl.errors import ConfigError
from hofl.runtime.flower import certificates
from hofl.runtime.flower.keys import (
    KeyFolder,
    check_certificate,
    create,
    load_private,
    public_keys,
    read_folder,
)

PLAIN = serialization.NoEncryption()
OPENSSH = serialization.PrivateFormat.OpenSSH


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    folder = tmp_path_factory.mktemp("keys") / "fleet"
    create(folder, ["hofl.example.org", "10.1.2.3"], ["clinic-a", "clinic-b"])
    return read_folder(folder)


def refusal(folder: Path, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        create(folder, *arguments) if arguments else read_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def handshake(server: KeyFolder, authority: Path, name: str) -> str:
    """A TLS handshake over a socket pair, verified as `name`: "" or why the client refused."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(server.server_certificate, server.server_key)
    here = ssl.create_default_context(cafile=str(authority))
    here.verify_flags |= ssl.VERIFY_X509_STRICT
    left, right = socket.socketpair()
    left.settimeout(20)
    right.settimeout(20)

    def serve() -> None:
        try:
            with there.wrap_socket(left, server_side=True) as wrapped:
                wrapped.recv(1)
        except OSError:
            pass  # the client went away: what it says is what is compared

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with here.wrap_socket(right, server_hostname=name) as wrapped:
            wrapped.sendall(b"x")
            return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        right.close()
        left.close()
        thread.join(20)
        assert not thread.is_alive()


def test_flower_reads_a_nodes_private_key(made: KeyFolder) -> None:
    arguments = argparse.Namespace(
        auth_supernode_private_key=str(made.node_key("clinic-a")), auth_supernode_public_key=None
    )
    private, public = _try_setup_client_authentication(arguments)
    assert private.curve.name == "secp384r1"
    assert public_key_to_bytes(public) == public_keys(made.folder)["clinic-a"]
    signature = sign_message(load_private(made.node_key("clinic-a")), b"hello")
    assert verify_signature(public, b"hello", signature)
    assert not verify_signature(load_private(made.node_key("clinic-b")).public_key(), b"hello", signature)


def test_public_keys_are_what_flower_registers(made: KeyFolder) -> None:
    found = public_keys(made.folder)
    assert list(found) == ["clinic-a", "clinic-b"]
    for client, key in found.items():
        assert key == try_load_public_key(made.node_public(client))


def test_ssh_keygen_reads_the_pair(made: KeyFolder) -> None:
    told = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(made.node_key("clinic-a"))], capture_output=True, text=True, check=True
    )
    assert told.stdout.split()[:2] == made.node_public("clinic-a").read_text().split()[:2]


def test_flower_takes_the_certificates(made: KeyFolder) -> None:
    server = argparse.Namespace(
        ssl_certfile=str(made.server_certificate),
        ssl_keyfile=str(made.server_key),
        ssl_ca_certfile=str(made.ca_certificate),
    )
    ca = made.ca_certificate.read_bytes()
    expected = (ca, made.server_certificate.read_bytes(), made.server_key.read_bytes())
    assert try_obtain_server_certificates(server) == expected
    node = argparse.Namespace(root_certificates=str(made.ca_certificate), insecure=False)
    assert try_obtain_root_certificates(node, "h:1") == ca


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "hofl.example.org", "10.1.2.3"])
def test_a_handshake_succeeds_under_each_name(made: KeyFolder, name: str) -> None:
    assert handshake(made, made.ca_certificate, name) == ""


def test_a_handshake_fails_for_another_name(made: KeyFolder) -> None:
    assert "other.example.org" in handshake(made, made.ca_certificate, "other.example.org")
    assert "10.1.2.4" in handshake(made, made.ca_certificate, "10.1.2.4")


def test_a_handshake_fails_under_another_authority(made: KeyFolder, tmp_path: Path) -> None:
    create(tmp_path / "other", [], ["x"])
    assert "certificate" in handshake(made, tmp_path / "other" / "ca.crt", "localhost")


def test_openssl_verifies_the_chain(made: KeyFolder) -> None:
    subprocess.run(
        ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "ca.crt", "server.crt"],
        cwd=made.folder, check=True, capture_output=True,
    )  # fmt: skip


def test_the_server_cannot_sign_and_the_authority_lasts_ten_years(made: KeyFolder) -> None:
    server = certificates.read(made.server_certificate).extensions
    assert not server.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    now = datetime.now(UTC)
    assert abs(check_certificate(made.server_certificate) - now - timedelta(days=365)) < timedelta(hours=1)
    assert abs(check_certificate(made.ca_certificate) - now - timedelta(days=3652)) < timedelta(hours=1)


def test_the_names_of_the_certificate(made: KeyFolder) -> None:
    values = [name.value for name in certificates.names(certificates.read(made.server_certificate))]
    assert values == ["hofl.example.org", ip_address("10.1.2.3"), "localhost", ip_address("127.0.0.1")]


def test_everything_is_for_the_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        written = create(tmp_path / "k", [], ["a"])
    finally:
        os.umask(old)
    names = ["ca.key", "ca.crt", "server.key", "server.crt", "nodes/a.key", "nodes/a.pub"]
    assert [str(path.relative_to(tmp_path / "k")) for path in written] == names
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    for folder in (tmp_path / "k", tmp_path / "k" / "nodes"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(p for p in (tmp_path / "k").rglob("*") if p.is_file()) == sorted(written)  # no partial file


def test_a_second_run_adds_nodes_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    create(folder, ["h.example"], ["a"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "nodes" / "a.key").unlink()  # it went to its node
    assert [path.name for path in create(folder, ["H.example"], ["a", "b"])] == ["b.key", "b.pub"]
    del before[folder / "nodes" / "a.key"]
    assert {path: path.read_bytes() for path in before} == before
    assert create(folder, [], ["a", "b"]) == []
    assert not (folder / "nodes" / "a.key").exists()


def test_a_run_that_was_cut_short_is_completed_with_the_same_keys(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "k")
    create(keys.folder, [], ["a"])
    secrets = {path: path.read_bytes() for path in (keys.ca_key, keys.server_key, keys.node_key("a"))}
    for path in (keys.server_certificate, keys.ca_certificate, keys.node_public("a")):
        path.unlink()
    assert [p.name for p in create(keys.folder, [], ["a"])] == ["ca.crt", "server.crt", "a.pub"]
    assert {path: path.read_bytes() for path in secrets} == secrets
    assert handshake(read_folder(keys.folder), keys.ca_certificate, "localhost") == ""


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "k", os.link

    def late(source: str, target: Path) -> None:
        if target.name == "ca.key":
            target.write_text("another process's")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert "ca.key: was there already; not touched" in refusal(folder, [], ["a"])
    assert (folder / "ca.key").read_text() == "another process's"
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["ca.key"]


def test_another_host_needs_another_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    create(folder, [], ["a"])
    told = refusal(folder, ["new.example.org", "10.0.0.9"], ["b"])
    assert "server.crt: is not for new.example.org, 10.0.0.9; move server.crt away" in told
    assert not (folder / "nodes" / "b.key").exists()
    (folder / "server.crt").unlink()
    create(folder, ["new.example.org"], ["b"])
    assert handshake(read_folder(folder), folder / "ca.crt", "new.example.org") == ""


def test_secrets_that_are_away(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    create(folder, [], ["a"])
    (folder / "ca.key").rename(tmp_path / "ca.key")
    assert [path.name for path in create(folder, [], ["b"])] == ["b.key", "b.pub"]
    assert read_folder(folder).clients == ("a", "b")
    (folder / "server.crt").unlink()
    assert "ca.key: is missing; put it back" in refusal(folder, [], ["c"])
    create(tmp_path / "other", [], [])
    (tmp_path / "other" / "ca.key").rename(folder / "ca.key")
    assert "ca.key: is not of ca.crt" in refusal(folder, [], ["c"])
    assert not (folder / "server.crt").exists()


@pytest.mark.parametrize(
    ("hosts", "clients", "days", "expected"),
    [
        (["host:9092"], [], 365, "'host:9092' is no host"),
        (["https://h"], [], 365, "'https://h' is no host"),
        (["10.0.0"], [], 365, "'10.0.0' is no host"),
        (["-a.org"], [], 365, "'-a.org' is no host"),
        ([""], [], 365, "'' is no host"),
        ([], ["../x"], 365, "'../x' is no client id"),
        ([], ["a" * 65], 365, "is no client id"),
        ([], ["a"], 0, "0 days: a server certificate is valid for 1 to 3652"),
        ([], ["a"], 3653, "3653 days"),
    ],
)
def test_arguments_that_are_refused(
    tmp_path: Path, hosts: list[str], clients: list[str], days: int, expected: str
) -> None:
    assert expected in refusal(tmp_path / "k", hosts, clients, days)
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    create(tmp_path / "k", [], ["a"])
    (tmp_path / "k" / name).unlink()
    assert f"no {name} here; make them with: hofl keys" in refusal(tmp_path / "k")


def test_a_folder_without_nodes_or_at_all(tmp_path: Path) -> None:
    create(tmp_path / "k", [], [])
    assert "no nodes/*.pub here" in refusal(tmp_path / "k")
    assert "no ca.crt, server.crt, server.key, nodes/*.pub here" in refusal(tmp_path / "none")


def test_files_of_different_fleets_do_not_mix(tmp_path: Path) -> None:
    for name in ("k", "other"):
        create(tmp_path / name, [], ["a"])
    (tmp_path / "other" / "server.key").replace(tmp_path / "k" / "server.key")
    assert "server.key: is not of server.crt" in refusal(tmp_path / "k")
    (tmp_path / "other" / "server.crt").replace(tmp_path / "k" / "server.crt")
    assert "server.crt: is not signed by" in refusal(tmp_path / "k")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_private_key_that_others_read_is_refused(tmp_path: Path, mode: int) -> None:
    create(tmp_path / "k", [], ["a"])
    path = tmp_path / "k" / "nodes" / "a.key"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can read this; run: chmod 600 {path}"):
        load_private(path)
    path.chmod(0o600)
    assert load_private(path).curve.name == "secp384r1"
    server = tmp_path / "k" / "server.key"
    server.chmod(mode)
    assert f"run: chmod 600 {server}" in refusal(tmp_path / "k")


def test_a_folder_that_others_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k").chmod(0o755)
    assert f"run: chmod 700 {tmp_path / 'k'}" in refusal(tmp_path / "k", [], ["a"])
    assert list((tmp_path / "k").iterdir()) == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"nonsense", "is no OpenSSH private key"),
        (
            ec.generate_private_key(ec.SECP384R1()).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, PLAIN
            ),
            "is no OpenSSH private key",
        ),
        (
            ed25519.Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, OPENSSH, PLAIN),
            "is no ECDSA key",
        ),
    ],
)
def test_other_private_keys_are_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "x.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=expected):
        load_private(path)


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", str(path)], check=True
    )
    with pytest.raises(ConfigError, match="has a passphrase; run: ssh-keygen -p"):
        load_private(path)


def test_public_keys_that_are_refused(tmp_path: Path) -> None:
    create(tmp_path / "k", [], ["a"])
    nodes = tmp_path / "k" / "nodes"
    (nodes / "b.pub").write_bytes((nodes / "a.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"b\.pub: holds the key of a; each client needs its own"):
        public_keys(tmp_path / "k")
    (nodes / "b.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(ConfigError, match=r"b\.pub: is no ECDSA public key"):
        public_keys(tmp_path / "k")
    (nodes / "b.pub").rename(nodes / "b c.pub")
    with pytest.raises(ConfigError, match="'b c' is no client id"):
        public_keys(tmp_path / "k")


def test_certificates_in_time(made: KeyFolder, tmp_path: Path) -> None:
    now, path = datetime.now(UTC), made.server_certificate
    with pytest.raises(ConfigError, match=r"server\.crt: expired on .* UTC; move server\.crt away"):
        check_certificate(path, now + timedelta(days=366))
    with pytest.raises(ConfigError, match=r"valid only from .* is this clock right"):
        check_certificate(path, now - timedelta(hours=2))
    check_certificate(path, now + timedelta(days=364))
    check_certificate(path, now - timedelta(minutes=50))
    (tmp_path / "x.crt").write_text("nonsense")
    with pytest.raises(ConfigError, match="is no PEM certificate"):
        check_certificate(tmp_path / "x.crt")


def test_an_expired_server_certificate_stops_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SLACK", timedelta(days=3))
    create(tmp_path / "k", [], ["a"])
    keys = KeyFolder(tmp_path / "k")
    keys.server_certificate.unlink()
    names = [certificates.host("localhost")]
    authority = certificates.read(keys.ca_certificate)
    pem = [serialization.load_pem_private_key(p.read_bytes(), None) for p in (keys.ca_key, keys.server_key)]
    keys.server_certificate.write_bytes(certificates.signed(pem[0], authority, pem[1], names, -1))
    assert "server.crt: expired on" in refusal(keys.folder)
    assert "server.crt: expired on" in refusal(keys.folder, [], ["b"])
    keys.server_certificate.unlink()
    create(keys.folder, [], ["b"])  # as the message says
    assert handshake(read_folder(keys.folder), keys.ca_certificate, "localhost") == ""


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_what_goes_where(tmp_path: Path) -> None:
    folder = str(tmp_path / "k")
    told = json.loads(
        run(folder, "--host", "h.example", "--node", "a", "--node", "b", "--days", "9", "--json")
    )
    assert told["written"][:2] == ["ca.key", "ca.crt"] and len(told["written"]) == 8
    assert told["machines"] == {
        "server": ["ca.crt", "server.crt", "server.key", "nodes/*.pub"],
        "node a": ["ca.crt", "nodes/a.key"],
        "node b": ["ca.crt", "nodes/b.key"],
        "none (offline)": ["ca.key"],
    }
    left = datetime.fromisoformat(told["valid_until"]) - datetime.now(UTC)
    assert timedelta(days=8) < left < timedelta(days=9)
    again = run(folder, "--node", "c")
    assert "written: nodes/c.key" in again and "written: ca.key" not in again
    assert "ca.crt, nodes/c.key" in again and "keep it offline" in again
    assert "written: nothing" in run(folder)
    assert "PRIVATE KEY" not in again

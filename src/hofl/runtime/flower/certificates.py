# SPDX-License-Identifier: Apache-2.0
"""Certificates of a fleet: an authority of its own, and the server's, signed by it."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hofl.errors import ConfigError

CA_DAYS = 3652
"""Ten years."""
SLACK = timedelta(hours=1)
"""How far the clock of another machine may be behind."""
FIX = "move {} away and run hofl keys again"

_DNS = re.compile(r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_certificate(path: str | Path, now: datetime | None = None) -> datetime:
    """The moment until which a certificate is valid, UTC.

    Args:
        path: a PEM file.
        now: aware; the clock's if None.

    Raises:
        ConfigError: unreadable, expired, or not valid yet.
    """
    certificate, now = read(Path(path)), now or datetime.now(UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        raise ConfigError(f"{path}: valid only from {begins:%Y-%m-%d %H:%M} UTC; is this clock right?")
    if now > ends:
        raise ConfigError(f"{path}: expired on {ends:%Y-%m-%d %H:%M} UTC; {FIX.format(Path(path).name)}")
    return ends


def authority(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A new authority's own certificate, PEM."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hofl fleet authority")])
    builder = _builder(name, name, key, key, datetime.now(UTC) + timedelta(days=CA_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _pem(builder.add_extension(_usage(signs_certificates=True), critical=True), key)


def signed(
    ca_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    days: int,
) -> bytes:
    """A server's certificate, PEM: valid for ``days``, and never longer than its authority."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hofl fleet server")])
    ends = min(datetime.now(UTC) + timedelta(days=days), authority.not_valid_after_utc)
    builder = _builder(subject, authority.subject, key, ca_key, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return _pem(builder.add_extension(x509.SubjectAlternativeName(names), critical=False), ca_key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    ends: datetime,
) -> x509.CertificateBuilder:
    """What both certificates have; the key identifiers are asked for by strict verifiers."""
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - SLACK).not_valid_after(ends)
    return builder.add_extension(own, critical=False).add_extension(above, critical=False)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    """An authority signs certificates, a server handshakes."""
    ca = signs_certificates
    return x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)


def _pem(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read(path: Path) -> x509.Certificate:
    """A PEM certificate.

    Raises:
        ConfigError: unreadable.
    """
    try:
        return x509.load_pem_x509_certificate(read_bytes(path))
    except ValueError:
        raise ConfigError(f"{path}: is no PEM certificate; {FIX.format('it')}") from None


def names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Hosts that a certificate is for."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def host(text: str) -> x509.GeneralName:
    """A host as a certificate names it.

    Raises:
        ConfigError: neither an IP address nor a DNS name.
    """
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass  # then it must be a name
    if not _DNS.fullmatch(text.lower()) or re.fullmatch(r"[\d.]+", text):
        raise ConfigError(
            f"{text[:80]!a} is no host: give a DNS name or an IP address, without port or scheme"
        )
    return x509.DNSName(text.lower())


def read_bytes(path: Path) -> bytes:
    """A file's content.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def require_issued(path: Path, authority: Path) -> x509.Certificate:
    """The certificate at ``path``, which ``authority`` has signed.

    Raises:
        ConfigError: it has not.
    """
    certificate = read(path)
    try:
        certificate.verify_directly_issued_by(read(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(f"{path}: is not signed by {authority}; {FIX.format(path.name)}") from None
    return certificate

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates on disk: there, valid, of each other, and for nobody else."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedblend_federation.ops.doctor.probes import RENEW, Finding, ending
from fedblend_federation.ops.settings import ServerSettings

COPY = "copy it from the folder that fedblend federation init made"
MAKE = "fedblend federation keys node.toml"
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm)


def secret(path: Path, advice: str) -> Iterator[Finding]:
    """Whether a secret key is there, and nobody else's to read."""
    if not path.exists():
        yield Finding("key is missing", str(path), "no such file", advice)
    yield from permissions("key", path, 0o600)


def permissions(
    what: str, path: Path, mode: int, wrong: int = 0o077
) -> Iterator[Finding]:
    """Whether others have rights that they must not have."""
    if path.exists() and path.stat().st_mode & wrong:
        found = f"mode {path.stat().st_mode & 0o777:o}"
        advice = f"chmod {mode:o} {path}"
        yield Finding(f"{what} is open to others", str(path), found, advice)


def authority(path: Path) -> Iterator[Finding]:
    """Whether the certificate of the authority can be used."""
    shown = x509_at(path)
    if isinstance(shown, Finding):
        yield shown
    else:
        advice = "begin a new federation with fedblend federation init"
        yield from ending(str(path), shown.not_valid_after_utc, advice)


def certificate(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the server's certificate is valid, for its address and its key."""
    shown, above = x509_at(settings.certificate), x509_at(settings.ca)
    if isinstance(shown, Finding):
        yield shown
        return
    where, host = str(settings.certificate), settings.address.host
    yield from ending(where, shown.not_valid_after_utc, RENEW)
    if not _covers(shown, host):
        value = f"not for {host}"
        yield Finding("certificate does not match address", where, value, RENEW)
    if not isinstance(above, Finding) and not _signed_by(shown, above):
        value = f"not by {settings.ca}"
        yield Finding("certificate is signed by another authority", where, value, RENEW)
    if settings.key.exists() and not _belongs(settings.key, shown):
        value = f"not of {settings.key}"
        yield Finding("certificate is of another key", where, value, RENEW)


def x509_at(path: Path) -> x509.Certificate | Finding:
    """The certificate in a file, or why there is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except PermissionError:
        raise
    except OSError as error:
        value = error.strerror or str(error)
    except ValueError:
        value = "not a certificate in PEM format"
    return Finding("certificate cannot be read", str(path), value, COPY)


def _covers(shown: x509.Certificate, host: str) -> bool:
    try:
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return False
    try:
        wanted = ipaddress.ip_address(host)
        return wanted in names.value.get_values_for_type(x509.IPAddress)
    except ValueError:
        known = names.value.get_values_for_type(x509.DNSName)
        return host.lower() in map(str.lower, known)


def _signed_by(shown: x509.Certificate, above: x509.Certificate) -> bool:
    try:
        shown.verify_directly_issued_by(above)
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def _belongs(key: Path, shown: x509.Certificate) -> bool:
    try:
        own = load_pem_private_key(key.read_bytes(), None).public_key()
    except _UNREADABLE:
        return False
    return own == shown.public_key()


def public_key(path: Path) -> Iterator[Finding]:
    """Whether a node's public key can be used."""
    advice = "fedblend federation roster puts it there, from public.toml of the node"
    try:
        key = load_ssh_public_key(path.read_bytes())
    except PermissionError:
        raise
    except OSError as error:
        value = error.strerror or str(error)
        yield Finding("public key cannot be read", str(path), value, advice)
    except _UNREADABLE:
        yield Finding("public key cannot be read", str(path), "not OpenSSH's", advice)
    else:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            yield Finding("is no ECDSA key", str(path), type(key).__name__, advice)


def own_key(path: Path) -> Iterator[Finding]:
    """Whether a node's own key can be used."""
    if not path.exists():
        return
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except _UNREADABLE:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        advice = f"remove it; {MAKE} makes another one"
        yield Finding("is no ECDSA key of OpenSSH", str(path), "unusable", advice)

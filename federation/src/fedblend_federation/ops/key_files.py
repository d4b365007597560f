# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates in files, as Flower and TLS read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedblend.errors import RunError

Kind = TypeVar("Kind")


def node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a node, ECDSA in OpenSSH's format.

    Raises:
        RunError: one line: the file cannot be read, or is no such key.
    """
    what = "a private key of OpenSSH, as ssh-keygen -t ecdsa -b 384 makes"
    load = load_ssh_private_key
    return read(path, lambda data: load(data, None), ec.EllipticCurvePrivateKey, what)


def public_node_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public half of a node's key; raises as above."""
    what = "a public key of OpenSSH, ECDSA"
    return read(path, load_ssh_public_key, ec.EllipticCurvePublicKey, what)


def certificate(path: Path) -> x509.Certificate:
    """A certificate in PEM format; raises as above."""
    load = x509.load_pem_x509_certificate
    return read(path, load, x509.Certificate, "a certificate in PEM format")


def read(path: Path, load: Callable[[bytes], Any], kind: type[Kind], what: str) -> Kind:
    """What a file holds, if it is of that kind; raises as above."""
    try:
        found = parse(path.read_bytes(), load, kind)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    if found is None:
        raise RunError(f"{path}: is not {what}")
    return found


def parse(data: bytes, load: Callable[[bytes], Any], kind: type[Kind]) -> Kind | None:
    """What these bytes hold, if it is of that kind; None if it is not."""
    try:
        found = load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, kind) else None

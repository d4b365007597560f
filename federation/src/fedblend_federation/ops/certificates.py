# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates of a federation.

One authority of its own signs the server's certificate, and nodes trust that authority
alone. Nodes prove who they are by ECDSA keys in OpenSSH's format, as Flower reads them,
and mask what they send by X25519 keys of another file.
"""

import base64
import datetime
import ipaddress
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
"""An authority outlives the certificates that it signs."""
_SKEW = datetime.timedelta(hours=1)
"""How far the clocks of two machines may be apart."""


class Pair(NamedTuple):
    """A private key and what is public of it, as the bytes of two files."""

    key: bytes
    public: bytes


def authority(name: str) -> Pair:
    """A new authority: its key and its self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name)
    signs = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _dated(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
    )
    return Pair(_pem(key), _signed(builder, key))


def server_certificate(signer: Pair, host: str, days: int) -> Pair:
    """A key and a certificate for the server at that host, and for loopback."""
    key = ec.generate_private_key(ec.SECP256R1())
    above = x509.load_pem_x509_certificate(signer.public)
    above_key = load_pem_private_key(signer.key, None)
    assert isinstance(above_key, ec.EllipticCurvePrivateKey)
    hosts = dict.fromkeys((host, "localhost", "127.0.0.1"))
    names = x509.SubjectAlternativeName([_general(one) for one in hosts])
    knows = x509.AuthorityKeyIdentifier.from_issuer_public_key(above_key.public_key())
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = (
        _dated(_named(host), above.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(use, critical=False)
        .add_extension(knows, critical=False)
    )
    return Pair(_pem(key), _signed(builder, above_key))


def node_key() -> Pair:
    """A node's key in OpenSSH's format, ECDSA P-384."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return Pair(private, public)


def secure_key() -> Pair:
    """A node's key for secure sums: X25519, its public half in base64."""
    key = X25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(pem, base64.b64encode(key.public_key().public_bytes_raw()))


def _named(text: str) -> x509.Name:
    # A common name has at most 64 signs; the alternative names have the whole host.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(identifier, critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates of a federation.

An authority of the federation's own signs the server's certificate, and nodes trust
that authority alone. Nodes prove who they are by ECDSA keys in OpenSSH's format, as
Flower reads them, and mask what they send by X25519 keys of another file.

``make_keys`` makes the keys of a node where they stay, and ``public.toml``, which the
node hands over. ``collect`` puts these files into ``roster.toml``, for every node, and
into the keys that the link knows. A server could put its own keys into a roster: people
compare fingerprints by another way than through the server.

Files of a machine are made from ``templates``: nginx, systemd and TOML as those
programs read them, with ``@name@`` where a value goes.
"""

import base64
import datetime
import hashlib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

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
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import AfterValidator

from fedblend.config.table import Table, misfit
from fedblend.errors import ConfigError, RunError
from fedblend_federation.ops import key_files
from fedblend_federation.ops.settings import (
    NodeEntry,
    NodeSettings,
    ServerSettings,
    load_as,
    name_clients,
)
from fedblend_federation.secure.roster import (
    PublicKey,
    Roster,
    RosterEntry,
    private_key,
)
from fedblend_federation.secure.session import public_key

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
    subject = _common_name(name)
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
        _certificate_builder(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
    )
    return Pair(_pem(key), _sign(builder, key))


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
        _certificate_builder(_common_name(host), above.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(use, critical=False)
        .add_extension(knows, critical=False)
    )
    return Pair(_pem(key), _sign(builder, above_key))


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


def _common_name(text: str) -> x509.Name:
    # A common name has at most 64 signs; the alternative names have the whole host.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _certificate_builder(
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


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


PUBLIC, ROSTER = "public.toml", "roster.toml"


def _ssh_key(text: str) -> str:
    key = key_files.parse(text.encode(), load_ssh_public_key, ec.EllipticCurvePublicKey)
    if key is None:
        raise misfit("a public key of OpenSSH, ECDSA")
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


class PublicKeys(Table):
    """``public.toml``: what a node hands over; none of it is secret."""

    version: Literal[1]
    node: Annotated[str, AfterValidator(_ssh_key)]
    clients: list[PublicKey]


class Print(NamedTuple):
    """What people compare of a node."""

    name: str
    secure: str
    """Of its keys for secure sums, as the rosters of other nodes have them."""
    node: str = ""
    """Of the key by which the link knows it, where that is at hand."""

    def __str__(self) -> str:
        own = f"  node key {self.node}" if self.node else ""
        return f"{self.name:<12} {self.secure}{own}"


def make_keys(path: Path) -> tuple[PublicKeys, list[Path]]:
    """Make the keys of the node whose node.toml this is, but none that is there.

    Writes ``public.toml`` beside it. Returns what is in it, and the keys that are new.

    Raises:
        ConfigError: one line: a key that is there cannot be used.
        RunError: a file cannot be read or written.
    """
    settings, made = load_as(NodeSettings, path), []

    def data_of(place: Path, make: Callable[[], Pair]) -> bytes:
        if not place.exists():
            write_private(place.parent, {place.name: make().key})
            made.append(place)
        return place.read_bytes()

    try:
        data_of(settings.key, node_key)
        public = key_files.node_key(settings.key).public_key()
        node = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        keys = []
        for own in settings.client_settings().values():
            if own.secure_key is None:
                raise ConfigError(f"{path}: secure_key: is missing")
            data = data_of(own.secure_key, secure_key)
            raw = public_key(private_key(data, own.secure_key))
            key = base64.b64encode(raw).decode()
            keys.append(PublicKey(client=own.client, key=key))
        found = PublicKeys(version=1, node=node, clients=keys)
        text = "".join(f"\n[[clients]]\n{_entry(one)}" for one in keys)
        write_private(path.parent, {PUBLIC: render(PUBLIC, node=node, clients=text)})
    except OSError as error:
        raise RunError(f"{error.filename}: {error.strerror}") from None
    return found, made


def collect(path: Path, files: Sequence[Path]) -> list[Print]:
    """Put the public keys of nodes beside server.toml: ``roster.toml``, nodes/NAME.pub.

    Nodes whose files are not given keep what is there. Returns what to compare of all
    nodes that have keys.

    Raises:
        ConfigError: one line: a file is not what a node wrote.
        RunError: a file is of no node, or there is another key of its node.
    """
    settings, place = load_as(ServerSettings, path), path.parent / ROSTER
    before = load_as(Roster, place).nodes if place.exists() else []
    roster = {one.client: one for one in before}
    known = {
        node.name: " ".join(node.key.read_text().split()[:2])
        for node in settings.nodes
        if node.key.exists()
    }
    for file in files:
        public = load_as(PublicKeys, file)
        node = _node_of(settings, public, file)
        if known.setdefault(node.name, public.node) != public.node:
            _refuse_other(node.key, file)
        for one in public.clients:
            entry = RosterEntry(name=node.name, client=one.client, key=one.key)
            if roster.setdefault(one.client, entry) != entry:
                _refuse_other(place, file)
    found = Roster(version=1, nodes=[roster[client] for client in sorted(roster)])
    for node in settings.nodes:
        if node.name in known:
            public = f"{known[node.name]} {node.name}\n".encode()
            write_private(node.key.parent, {node.key.name: public})
    text = "".join(
        f'\n[[nodes]]\nname = "{one.name}"\n{_entry(one)}' for one in found.nodes
    )
    write_private(path.parent, {ROSTER: render(ROSTER, nodes=text)})
    return [
        one._replace(node=_ssh_print(known[one.name]) if one.name in known else "")
        for one in prints_of_roster(found)
    ]


def _entry(one: PublicKey) -> str:
    return f'client = {one.client}\nkey = "{one.key}"\n'


def _node_of(settings: ServerSettings, public: PublicKeys, file: Path) -> NodeEntry:
    clients = sorted(one.client for one in public.clients)
    for node in settings.nodes:
        if sorted(node.client_ids) == clients:
            return node
    raise RunError(f"{file}: {name_clients(clients)}: is not a node of server.toml")


def _refuse_other(place: Path, file: Path) -> None:
    raise RunError(
        f"{place}: has another key than {file}, and is not overwritten; remove the old "
        "one if the node has a new key"
    )


def prints_of_roster(roster: Roster) -> list[Print]:
    """Those of all nodes of a roster, in order."""
    entries = sorted(roster.nodes, key=lambda one: (one.name, one.client))
    return [
        Print(name, _secure_print(some))
        for name, some in groupby(entries, key=lambda one: one.name)
    ]


def own_print(public: PublicKeys) -> Print:
    """That of this node, which has these keys."""
    clients = sorted(public.clients, key=lambda one: one.client)
    return Print("this node", _secure_print(clients), _ssh_print(public.node))


def _ssh_print(key: str) -> str:
    """A fingerprint as ssh-keygen -lf shows it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _secure_print(keys: Iterable[PublicKey]) -> str:
    """128 bits of a hash of some clients' keys, in groups that can be read aloud."""
    digest = hashlib.sha256()
    for one in keys:
        digest.update(f"{one.client} ".encode() + base64.b64decode(one.key))
    text = digest.hexdigest()[:32]
    return " ".join(text[at : at + 4] for at in range(0, 32, 4))


HOME = Path("/var/lib/fedblend")
"""Where the units and the proxy expect the files of a machine."""
PROGRAM = Path("/opt/fedblend/bin/fedblend")
"""Where fedblend is installed."""
USER, FLOWER_USER = "fedblend", "fedblend-flower"
"""Who owns rows and states, and who runs the SuperNode of a node."""


def template(name: str) -> str:
    """The text of a template."""
    return (resources.files("fedblend_federation.ops") / "templates" / name).read_text(
        "utf-8"
    )


def render(name: str, /, **values: object) -> bytes:
    """A template with its values."""
    known = {
        "home": HOME,
        "program": PROGRAM,
        "user": USER,
        "flower_user": FLOWER_USER,
        **values,
    }
    return re.sub(r"@(\w+)@", lambda at: str(known[at[1]]), template(name)).encode()


def write_private(folder: Path, files: Mapping[str, bytes]) -> None:
    """Files that nobody else can read; a key is never readable, not even at first."""
    for name, data in files.items():
        beside = folder / f"{name}.new"
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(beside, folder / name)

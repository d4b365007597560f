# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``roster.toml``: the public keys of all clients, by which answers are masked.

A node takes the keys of the others from this file and from nowhere else, so that a
server cannot put a key of its own in the place of a node's. ``fedblend federation
keys`` makes a ``secure.key`` for each client, and ``fedblend federation roster`` writes
this file. Clients of one node have keys of their own, so that no two pairs of clients
have the same masks.
"""

import base64
import binascii
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import AfterValidator

from fedblend.config.config import Config
from fedblend.config.table import Index, Table, Word, misfit
from fedblend.config.tables.federation import Federation
from fedblend.errors import ConfigError
from fedblend_federation.ops.key_files import parse
from fedblend_federation.ops.settings import ClientSettings, parse_as
from fedblend_federation.policy.policy import Accept
from fedblend_federation.secure.client import Means
from fedblend_federation.secure.session import public_key


def _key(text: str) -> str:
    try:
        fits = len(base64.b64decode(text, validate=True)) == 32
    except (binascii.Error, ValueError):
        fits = False
    if not fits:
        raise misfit("32 bytes in base64, a public key of X25519")
    return text


class PublicKey(Table):
    """The public half of a client's key for secure sums."""

    client: Index
    key: Annotated[str, AfterValidator(_key)]


class RosterEntry(PublicKey):
    """A client as the others know it; ``name`` is that of its node."""

    name: Word


class Roster(Table):
    """``roster.toml``."""

    version: Literal[1]
    nodes: list[RosterEntry]


class Keys(NamedTuple):
    """What a client knows of the keys for secure sums."""

    private: X25519PrivateKey
    public: dict[int, bytes]
    """Of all clients."""
    names: dict[int, str]
    """Of the nodes of all clients."""


def keys_of(settings: ClientSettings) -> Keys:
    """A client's own key, and the public keys of all clients.

    Raises:
        ConfigError: one line that says what is missing or wrong.
    """
    if settings.roster is None or settings.secure_key is None:
        raise ConfigError(
            "node.toml: roster and secure_key are missing; federation.secure needs the "
            "keys of all nodes, see docs/security.md"
        )
    try:
        files = settings.secure_key.read_bytes(), settings.roster.read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return _keys(*files, settings.client, settings.secure_key, settings.roster)


@lru_cache(maxsize=16)
def _keys(own: bytes, roster: bytes, client: int, secure_key: Path, path: Path) -> Keys:
    """All from the bytes of their files, which are parsed once."""
    private, found = private_key(own, secure_key), parse_as(Roster, roster, path)
    keys = {node.client: base64.b64decode(node.key) for node in found.nodes}
    if len(keys) != len(found.nodes) or len(set(keys.values())) != len(keys):
        raise ConfigError(f"{path}: nodes: has a client or a key twice")
    if keys.get(client) != public_key(private):
        raise ConfigError(
            f"{path}: nodes: the key of client {client} is not that of "
            f"{secure_key.name}"
        )
    return Keys(private, keys, {node.client: node.name for node in found.nodes})


def private_key(data: bytes, path: Path) -> X25519PrivateKey:
    """A key from the bytes of its file.

    Raises:
        ConfigError: they are no such key.
    """
    key = parse(data, lambda data: load_pem_private_key(data, None), X25519PrivateKey)
    if key is None:
        raise ConfigError(f"{path}: is not an X25519 key in PEM format")
    return key


def means_of(settings: ClientSettings, config: Config, accept: Accept) -> Means:
    """What a node needs for the secure sums of an experiment.

    Raises:
        ConfigError: the node's key or roster is missing or wrong.
    """
    asked = config.federation or Federation()
    private, keys, names = keys_of(settings)
    bits, clip = asked.secure_bits, asked.secure_clip
    # Of these nodes, min_cohort are left whoever colludes.
    least, colluding = accept.min_cohort + accept.colluding, accept.colluding
    own = (private, keys, least, colluding, names)
    return Means(bits, clip, config.run.weights, *own)

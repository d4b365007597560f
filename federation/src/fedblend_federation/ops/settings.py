# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``server.toml`` and ``node.toml``: where things are on the machine of an operator.

Checked like a configuration: nothing unknown, nothing coerced, one line for what is
wrong. Paths are relative to the file.
"""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedblend.config import toml
from fedblend.config.table import Index, Table, Word, first_error, misfit
from fedblend.errors import ConfigError, RunError, SettingError

_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
NAME_RULE = "1 to 32 of a-z, 0-9 and -, with no - at either end"
HOST_RULE = "a host name or an IP address"
CLIENT = "{client}"
"""Stands for the number of a client in the name of a file."""


class Address(NamedTuple):
    """Where something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def is_host(text: str) -> bool:
    """Whether this may be a host: an IP address or a name of dotted labels."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.split(".")
        named = all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdecimal()
        return named and len(text) <= 253
    return True


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_name(text: str) -> bool:
    """Whether a node may be called this."""
    return _NAME.fullmatch(text) is not None


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    known = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536
    if not colon or not known or not is_host(bare) or (":" in bare and bare == host):
        raise misfit("host:port, such as fl.example.org:443")
    return Address(bare, int(port))


def _node_name(text: str) -> str:
    if not is_name(text):
        raise misfit(NAME_RULE)
    return text


def _anchor(text: str, info: ValidationInfo) -> Path:
    assert info.context is not None
    return (info.context["folder"] / text).absolute()


if TYPE_CHECKING:
    Place = Path
    Reached = Address
else:
    Place = Annotated[str, StringConstraints(min_length=1), AfterValidator(_anchor)]
    """A path, relative to the file in which it stands."""
    Reached = Annotated[str, AfterValidator(_address)]


class _Clients(Table):
    """The one client of a node, or all that it hosts."""

    client: Index | None = None
    clients: list[Index] | None = None

    @model_validator(mode="after")
    def _some_client(self) -> Self:
        one, several = self.client is not None, self.clients is not None
        if one and several:
            raise SettingError(
                "clients", "is given in addition to client; give one of them"
            )
        if not one and not several:
            raise SettingError("client", "is missing; or give clients, a list")
        if several and not self.clients:
            raise SettingError("clients", "is empty")
        if len(set(self.client_ids)) < len(self.client_ids):
            raise SettingError("clients", "names a client twice")
        return self

    @property
    def client_ids(self) -> tuple[int, ...]:
        """The clients of the node."""
        return (self.client,) if self.client is not None else tuple(self.clients or ())


class NodeEntry(_Clients):
    """A node as the server knows it; its key is that of all its clients."""

    name: Annotated[str, AfterValidator(_node_name)]
    key: Place
    retired: bool = False


class ServerSettings(Table):
    """``server.toml``."""

    version: Literal[1]
    address: Reached
    link: Reached
    certificate: Place
    key: Place
    ca: Place
    folder: Place
    nodes: list[NodeEntry]

    @model_validator(mode="after")
    def _clients_are_counted(self) -> "ServerSettings":
        names = [node.name for node in self.nodes]
        again = sorted({name for name in names if names.count(name) > 1})
        if again:
            raise SettingError("nodes", f'"{again[0]}" is named twice')
        clients = sorted(client for node in self.nodes for client in node.client_ids)
        if clients != list(range(len(clients))) or not names:
            wrong = f"clients {clients} are not 0, 1, ... without a gap"
            raise SettingError("nodes", wrong)
        return self

    @property
    def clients(self) -> int:
        """The number of clients of all nodes."""
        return sum(len(node.client_ids) for node in self.nodes)


class NodeData(Table):
    """Where the rows of a node are; the experiment's configuration describes them."""

    file: Place
    target: Word | None = None
    client: Word | None = None
    inputs: Word | None = None


class ClientSettings(NamedTuple):
    """Where the things of one client are."""

    client: int
    folder: Path
    policy: Path
    data: NodeData
    home: Path
    """The folder of the node; that of the client, or one that it is in."""
    clients: int = 1
    """How many the node hosts."""
    roster: Path | None = None
    secure_key: Path | None = None
    """Of this client alone."""
    bases: Path | None = None
    """A file or a folder of frozen bases."""


class NodeSettings(_Clients):
    """``node.toml``.

    A node with ``clients`` in place of ``client`` hosts several: ``{client}`` in the
    names of ``policy``, ``secure_key`` and ``data.file`` stands for the number of each,
    and each has a folder of its own in ``folder``.

    A node may have two halves, of two users. One has the network, and needs ``ca``,
    ``key``, ``flower`` and ``socket``. The worker has the rows, the policy and the
    state. With ``supernode`` the first is Flower's SuperNode, which runs code that the
    server sends. Secure sums need ``roster`` and ``secure_key``, both the worker's, and
    adapters ``bases``: a file, or a folder of files, of frozen bases.
    """

    version: Literal[1]
    server: Reached
    ca: Place
    key: Place
    folder: Place
    policy: Place
    data: NodeData
    flower: Place | None = None
    socket: Place | None = None
    supernode: bool = False
    roster: Place | None = None
    secure_key: Place | None = None
    bases: Place | None = None

    @property
    def worker_socket(self) -> Path:
        """The socket of the worker."""
        return self.socket or self.folder / "socket"

    @model_validator(mode="after")
    def _rows_of_each(self) -> Self:
        name = str(self.data.file)
        if self.clients is not None and CLIENT not in name:
            raise SettingError("data.file", f"needs {CLIENT} in its name, for clients")
        if self.clients is None and CLIENT in name:
            raise SettingError("data.file", f"{CLIENT} is for a node with clients")
        if self.clients and self.secure_key and CLIENT not in str(self.secure_key):
            raise SettingError("secure_key", f"needs {CLIENT} in its name, for clients")
        return self

    def client_settings(self) -> dict[int, ClientSettings]:
        """Where the things of each client of the node are."""
        return {
            client: ClientSettings(
                client,
                self.folder
                if self.clients is None
                else self.folder / f"client-{client}",
                _client_path(self.policy, client),
                self.data.model_copy(
                    update={"file": _client_path(self.data.file, client)}
                ),
                self.folder,
                len(self.client_ids),
                self.roster,
                self.secure_key and _client_path(self.secure_key, client),
                self.bases,
            )
            for client in self.client_ids
        }

    @property
    def flower_folder(self) -> Path:
        """The folder of the half that has the network."""
        return self.flower or self.folder


def _client_path(path: Path, client: int) -> Path:
    return Path(str(path).replace(CLIENT, str(client)))


def name_clients(clients: Sequence[int]) -> str:
    """The clients of a node in a few words: "client 3", "clients 0 to 62"."""
    if len(clients) == 1:
        return f"client {clients[0]}"
    first, last = min(clients), max(clients)
    if last - first + 1 == len(clients):
        return f"clients {first} to {last}"
    return f"clients {', '.join(map(str, sorted(clients)))}"


def client_at(path: Path, client: int | None) -> ClientSettings:
    """One of the clients of the node whose node.toml this is.

    Raises:
        RunError: the node hosts several and none is named, or another one.
    """
    node = load_as(NodeSettings, path)
    known = node.client_settings()
    if client is None and len(known) == 1:
        (client,) = known
    if client not in known:
        named = "which one" if client is None else str(client)
        raise RunError(
            f"--client: {named}? This node hosts {name_clients(node.client_ids)}"
        )
    return known[client]


Kind = TypeVar("Kind", bound=Table)


def load_as(kind: type[Kind], path: Path) -> Kind:
    """A file as a table of that kind.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    return _validate(kind, toml.read(path), path)


def parse_as(kind: type[Kind], data: bytes, path: Path) -> Kind:
    """The bytes of a file as a table of that kind; as ``load_as``."""
    return _validate(kind, toml.parse(data, str(path)), path)


def load(path: Path) -> ServerSettings | NodeSettings:
    """Either of the two; only a server has ``link``."""
    content = toml.read(path)
    return _validate(
        ServerSettings if "link" in content else NodeSettings, content, path
    )


def _validate(kind: type[Kind], content: dict[str, Any], path: Path) -> Kind:
    try:
        return kind.model_validate(content, context={"folder": path.parent})
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_error(error, content)}") from None

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``server.toml`` and ``node.toml``: where things are on the machine of an operator.

Checked like a configuration: nothing unknown, nothing coerced, one line for what is
wrong. Paths are relative to the file.
"""

import ipaddress
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedblend.config import toml
from fedblend.config.schema.table import Index, Table, first_error
from fedblend.config.schema.tables import Word
from fedblend.errors import ConfigError, SettingError

_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
NAME_RULE = "1 to 32 of a-z, 0-9 and -, with no - at either end"
HOST_RULE = "a host name or an IP address"


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


def _misfit(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("range", "{allowed}", {"allowed": allowed})


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    known = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536
    if not colon or not known or not is_host(bare) or (":" in bare and bare == host):
        raise _misfit("host:port, such as fl.example.org:443")
    return Address(bare, int(port))


def _node_name(text: str) -> str:
    if not is_name(text):
        raise _misfit(NAME_RULE)
    return text


def _anchored(text: str, info: ValidationInfo) -> Path:
    assert info.context is not None
    return (info.context["folder"] / text).absolute()


if TYPE_CHECKING:
    Place = Path
    Reached = Address
else:
    Place = Annotated[str, StringConstraints(min_length=1), AfterValidator(_anchored)]
    """A path, relative to the file in which it stands."""
    Reached = Annotated[str, AfterValidator(_address)]


class NodeEntry(Table):
    """A node as the server knows it."""

    name: Annotated[str, AfterValidator(_node_name)]
    key: Place
    client: Index
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
        clients = sorted(node.client for node in self.nodes)
        if clients != list(range(len(names))) or not names:
            wrong = f"clients {clients} are not 0, 1, ... without a gap"
            raise SettingError("nodes", wrong)
        return self


class NodeData(Table):
    """Where the rows of a node are; the experiment's configuration describes them."""

    file: Place
    target: Word | None = None
    client: Word | None = None
    inputs: Word | None = None


class NodeSettings(Table):
    """``node.toml``.

    A node may have two halves, of two users. One has the network, and needs ``ca``,
    ``key``, ``flower`` and ``socket``. The worker has the rows, the policy and the
    state. With ``supernode`` the first is Flower's SuperNode, which runs code that the
    server sends. Secure sums need ``roster`` and ``secure_key``, both the
    worker's.
    """

    version: Literal[1]
    server: Reached
    client: Index
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

    @property
    def worker_socket(self) -> Path:
        """The socket of the worker."""
        return self.socket or self.folder / "socket"

    @property
    def flower_folder(self) -> Path:
        """The folder of the half that has the network."""
        return self.flower or self.folder


RENAMED = {"carrier": "flower", "door": "socket"}
"""Keys of ``node.toml`` in earlier versions."""
Kind = TypeVar("Kind", bound=Table)


def load_as(kind: type[Kind], path: Path) -> Kind:
    """A file as a table of that kind.

    Raises:
        ConfigError: one line with the file, the key, its value and what is allowed.
    """
    return _validated(kind, toml.read(path), path)


def parse_as(kind: type[Kind], data: bytes, path: Path) -> Kind:
    """The bytes of a file as a table of that kind; as ``load_as``."""
    return _validated(kind, toml.parse(data, str(path)), path)


def load(path: Path) -> ServerSettings | NodeSettings:
    """Either of the two; only a server has ``link``."""
    content = toml.read(path)
    return _validated(
        ServerSettings if "link" in content else NodeSettings, content, path
    )


def _validated(kind: type[Kind], content: dict[str, Any], path: Path) -> Kind:
    for old, new in RENAMED.items() if kind is NodeSettings else ():
        if old in content:
            raise ConfigError(f"{path}: {old}: is now called {new}")
    try:
        return kind.model_validate(content, context={"folder": path.parent})
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_error(error, content)}") from None

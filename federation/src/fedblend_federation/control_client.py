# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The calls of Flower's control API that register the keys of nodes, on one connection.

Flower's CLI does the same with a process for every key.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedblend.errors import RunError
from fedblend_federation.message import one_line

GONE = "unregistered"
"""Flower's status of a node whose key was unregistered; the link remembers its id."""

Request = TypeVar("Request")
Response = TypeVar("Response")


class ControlClient:
    """The control API of one link.

    Args:
        address: of the link: host:port.
        ca: file of the authority that signed the link's certificate.
    """

    def __init__(self, address: str, ca: Path) -> None:
        about = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        try:
            trusted = ca.read_bytes()
            self._client = ControlHttpClient.from_server_address(
                address, False, trusted, about
            )
        except (OSError, ValueError) as error:
            unreadable = isinstance(error, ssl.SSLError | ValueError)
            why = "is no certificate" if unreadable else error.strerror
            raise RunError(f"{ca}: {why}") from None
        self._address = address

    def close(self) -> None:
        """Close the connections to the link."""
        self._client.close()

    def statuses(self) -> dict[str, str]:
        """The status of every node that is registered, by the link's id of it."""
        found = self._call(self._client.ListNodes, ListNodesRequest()).nodes_info
        return {str(one.node_id): one.status for one in found if one.status != GONE}

    def register(self, key: Path, name: str) -> str:
        """Register a public key; the link's id of the node."""
        request = RegisterNodeRequest(public_key=_public_key(key), name=name)
        return str(self._call(self._client.RegisterNode, request).node_id)

    def unregister(self, id: str) -> None:
        """Unregister the key of a node."""
        request = UnregisterNodeRequest(node_id=int(id))
        self._call(self._client.UnregisterNode, request)

    def _call(self, call: Callable[[Request], Response], request: Request) -> Response:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            code, why = error.response.status_code, one_line(error.response.text)
            raise RunError(f"link {self._address}: HTTP {code}: {why}") from None
        except (httpx.HTTPError, ValueError) as error:
            why = one_line(error) or type(error).__name__
            raise RunError(f"link {self._address}: {why}") from None


def _public_key(path: Path) -> bytes:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except Exception as error:
        raise RunError(f"{path}: is no public key ({type(error).__name__})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RunError(f"{path}: is no ECDSA key, as ssh-keygen -t ecdsa -b 384 makes")
    return public_key_to_bytes(key)

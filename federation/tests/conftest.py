# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""No test of a federation leaves this machine, and small federations to look at."""

import ipaddress
import shutil
import socket
from pathlib import Path

import pytest

from fedblend_federation.ops.provision import provision


def _is_outside(address) -> bool:
    if not isinstance(address, tuple):  # a path: a socket of this machine
        return False
    try:
        return not ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return address[0] not in ("localhost", "")


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch):
    """Whoever connects to another machine fails, and cannot hide it."""
    tried = []

    def clip_updates(name):
        connect = getattr(socket.socket, name)

        def checked(self, address):
            if _is_outside(address):
                tried.append(address)
                raise ConnectionRefusedError(f"{address} is not on this machine")
            return connect(self, address)

        return checked

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, clip_updates(name))
    yield tried
    assert not tried, "a test has tried to leave this machine"


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Path:
    """A federation of two nodes; to be read only."""
    folder = tmp_path_factory.mktemp("federation") / "lab"
    where = {"host": "127.0.0.1", "port": 8443}
    provision(folder, nodes=["alice", "bob"], with_keys=True, **where)
    return folder


@pytest.fixture
def own(lab, tmp_path) -> Path:
    """A federation to spoil."""
    made = shutil.copytree(lab, tmp_path / "own")
    # In a test both halves of a node are one user's, which is worth a warning.
    for folder in made.glob("nodes/*/flower"):
        folder.rmdir()
    return made


@pytest.fixture
def no_services(monkeypatch):
    """The doctor does not look at the services of this machine."""
    from fedblend_federation.ops import doctor

    for name in ("link_service", "worker_service"):
        monkeypatch.setattr(doctor, name, lambda settings: [])

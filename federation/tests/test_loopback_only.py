# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The guard of these tests works."""

import socket

import pytest


def test_another_machine_cannot_be_reached(loopback_only):
    with pytest.raises(ConnectionRefusedError, match="not on this machine"):
        socket.create_connection(("192.0.2.1", 9), timeout=1)
    with socket.socket(socket.AF_INET) as other, pytest.raises(ConnectionRefusedError):
        other.connect_ex(("192.0.2.1", 9))
    assert loopback_only == [("192.0.2.1", 9), ("192.0.2.1", 9)]
    loopback_only.clear()


def test_this_machine_can(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    path = str(tmp_path / "here")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as one:
        server.bind(path)
        server.listen()
        one.connect(path)

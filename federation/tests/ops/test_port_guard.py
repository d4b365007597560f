# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's ports on loopback are for one user: attacks by another user of the machine.

The last tests start Flower's own programs; user nobody, who needs root to be, tries
what their ports offer. ``test_live_link.py`` tries it at the link as we start it.
"""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from neighbor import CALLS, as_nobody, may_become_nobody

from fedblend_federation.flower import processes
from fedblend_federation.flower.port_guard import WITNESS, Guard, owner_of
from fedblend_federation.ops.doctor import examine
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as
from fedblend_federation.ops.supervisor import is_up

OWN, OTHER = os.getuid(), os.getuid() + 12345
HERE, THERE = ("127.0.0.1", 8000), ("127.0.0.1", 40000)


def status_of(path: str, owner: int | None, **scope) -> int:
    """What a caller gets who belongs to that user."""
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(event):
        sent.append(event)

    guard = Guard(application, lambda caller, here: owner)
    called = {"type": "http", "path": path, "client": THERE, "server": HERE, **scope}
    asyncio.run(guard(called, None, send))  # pyright: ignore[reportArgumentType]
    return sent[0]["status"] if sent else 0


@pytest.mark.parametrize(
    "path", [*CALLS.values(), "/v1/fleet", "/v1/Fleet/x", "//", ""]
)
def test_only_the_own_user_and_root_pass(path):
    assert status_of(path, OWN) == status_of(path, 0) == 200
    assert status_of(path, OTHER) == status_of(path, None) == 403
    assert status_of(path, OWN, client=None) == 403


def test_nodes_pass_because_they_sign():
    assert status_of("/v1/fleet/pull-messages", OTHER) == 200
    assert status_of("/health", OTHER) == 200
    assert status_of(WITNESS, OTHER) == 200


def test_other_protocols_do_not_pass():
    assert status_of("/v1/control/start-run", OWN, type="websocket") == 0


@pytest.fixture
def connection():
    """Both ends of a connection on loopback: the caller's, and the program's."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
        with caller, here:
            yield caller, here


def test_the_kernel_knows_whose_a_connection_is(connection):
    caller, here = connection
    ends = caller.getsockname(), here.getsockname()
    assert owner_of(*ends) == OWN
    assert owner_of(*reversed(ends)) == OWN  # the program's own end
    assert owner_of(("127.0.0.1", 1), here.getsockname()) is None
    assert owner_of(("no address", 1), here.getsockname()) is None


def test_a_caller_who_has_hung_up_is_nobody(connection):
    """The kernel lists a socket without a process as root's."""
    caller, here = connection
    ends = caller.getsockname(), here.getsockname()
    caller.shutdown(socket.SHUT_WR)
    assert owner_of(*ends) is None
    caller.close()
    assert owner_of(*ends) is None


def test_it_works_on_ipv6():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as caller:
        here, _ = listener.accept()
        with here:
            ends = caller.getsockname()[:2], here.getsockname()[:2]
            assert owner_of(*ends) == OWN


as_root = pytest.mark.skipif(
    not may_become_nobody(), reason="only root can become user nobody"
)


@pytest.fixture
def federation(tmp_path) -> Path:
    port = processes.free_port()
    where = {"host": "127.0.0.1", "port": port, "link_port": port}
    provision(tmp_path / "lab", nodes=["alice"], with_keys=True, **where)
    return tmp_path / "lab"


@as_root
@pytest.mark.slow
def test_without_the_guard_the_attacks_succeed(federation):
    """Flower as it is: the attacks are real, and the doctor sees it."""
    path = federation / "server" / "server.toml"
    settings = load_as(ServerSettings, path)
    options = processes.link_command(settings)[4:]
    command = [processes.program("flower-superlink"), *options]
    log = settings.folder / "link.log"
    link = processes.start(command, settings.folder, log)
    try:
        processes.wait_until(lambda: is_up(settings), 120, "the link")
        found = as_nobody(settings.link, settings.ca)
        findings = [one.what for one in examine(path)]
    finally:
        processes.stop(link)
    assert found["list runs"] == found["read the description"] == 200
    assert found["take a task"] == 200
    assert 403 not in found.values()
    assert "is open to every user of this machine" in findings


@as_root
@pytest.mark.slow
def test_nobody_gets_nowhere_at_a_supernode(federation):
    """On Flower's own path a node has a port; on ours it has none."""
    node = load_as(NodeSettings, federation / "nodes" / "alice" / "node.toml")
    port = processes.free_port()
    command = processes.supernode_command(node, port)
    log = node.flower_folder / "node.log"
    supernode = processes.start(command, node.flower_folder, log)
    try:
        processes.wait_until(lambda: listens(port), 120, "the SuperNode")
        found = as_nobody(f"127.0.0.1:{port}", None)
    finally:
        processes.stop(supernode)
    assert found == dict.fromkeys(CALLS, 403)


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's own link, as we start it: what a node, a stranger and a neighbor get there.

This is the one test of every push that starts Flower.
"""

import contextlib
import time
from pathlib import Path

import pytest
from neighbor import CALLS, as_nobody, may_become_nobody

from fedblend.errors import RunError
from fedblend_federation.flower import processes
from fedblend_federation.ops import registration
from fedblend_federation.ops.credentials import node_key
from fedblend_federation.ops.doctor import examine
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import NodeEntry, ServerSettings, load_as
from fedblend_federation.ops.supervisor import is_up

pytest.importorskip("flwr")
from fedblend_federation.flower.link_clients import Failed, FleetClient, Lost

OPEN = "is open to every user of this machine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A federation of one node, whose link is up and knows the node's key."""
    port = processes.free_port()
    place = tmp_path_factory.mktemp("live") / "lab"
    where = {"host": "127.0.0.1", "port": port, "link_port": port}
    provision(place, nodes=["alice"], with_keys=True, **where)
    settings = settings_of(place)
    processes.connect(settings)
    command = processes.link_command(settings)
    log = settings.folder / "link.log"
    link = processes.start(command, settings.folder, log)
    try:
        processes.wait_until(lambda: is_up(settings), 120, "the link")
        registration.register(settings)
        yield place
    finally:
        processes.stop(link)


def settings_of(folder: Path) -> ServerSettings:
    return load_as(ServerSettings, folder / "server" / "server.toml")


@pytest.fixture
def fleet(folder):
    """Makes connections of the node, or with another key or authority."""
    home, address = folder / "nodes" / "alice", str(settings_of(folder).link)
    with contextlib.ExitStack() as opened:

        def connection(
            key=home / "node.key", ca=home / "ca.crt", log=print
        ) -> FleetClient:
            return opened.enter_context(
                contextlib.closing(FleetClient(address, ca, key, log))
            )

        yield connection


def status(folder: Path) -> list[str]:
    return [member.status for member in registration.members(settings_of(folder))]


@pytest.mark.slow
def test_a_node_comes_and_goes(folder, fleet):
    node = fleet()
    number = node.activate(10.0)
    assert status(folder) == ["online"]
    assert node.heartbeat(10.0)
    assert node.pull() is None
    assert node.deactivate(number)
    assert status(folder) == ["offline"]
    # As after a crash: who was there a moment ago may come back at once.
    node.activate(10.0)
    assert fleet().deactivate(number)
    assert fleet().activate(10.0) == number


def test_a_stranger_is_refused(fleet, tmp_path):
    key = tmp_path / "other.key"
    key.write_bytes(node_key().key)
    stranger = fleet(key)
    with pytest.raises((Lost, Failed)):
        stranger.activate(10.0)
    with pytest.raises(Lost):
        stranger.pull()
    assert not stranger.heartbeat(10.0)


def test_another_authority_is_not_trusted(fleet, lab, monkeypatch):
    """Whoever poses as the link gets no message and no signature."""

    def give_up(seconds):
        raise TimeoutError

    monkeypatch.setattr(time, "sleep", give_up)
    lines: list[str] = []
    node = fleet(ca=lab / "nodes/alice/ca.crt", log=lines.append)
    with pytest.raises(TimeoutError):
        node.activate(10.0)
    assert "CERTIFICATE_VERIFY_FAILED" in lines[0]


def test_the_doctor_sees_the_guard(folder):
    found = [one.what for one in examine(folder / "server" / "server.toml")]
    assert OPEN not in found


@pytest.mark.skipif(not may_become_nobody(), reason="only root can become user nobody")
def test_nobody_gets_nowhere(folder):
    settings = settings_of(folder)
    assert as_nobody(settings.link, settings.ca) == dict.fromkeys(CALLS, 403)
    # Its own user is served.
    assert processes.call(settings, "ls", processes.CONNECTION)["success"]


def test_many_keys_are_registered_on_one_connection(folder, monkeypatch):
    """The link knows them all, and forgets those that left."""
    settings, opened = settings_of(folder), []
    connect = registration.connect

    def connected(settings):
        opened.append(settings)
        return connect(settings)

    monkeypatch.setattr(registration, "connect", connected)
    names = [f"more{number}" for number in range(5)]
    entries = list(settings.nodes)
    for client, name in enumerate(names, len(entries)):
        key = settings.nodes[0].key.with_name(f"{name}.pub")
        key.write_bytes(node_key().public)
        entries.append(NodeEntry.model_construct(name=name, key=key, client=client))
    registration.register(settings.model_copy(update={"nodes": entries}))
    assert len(opened) == 1
    with connect(settings) as link:
        assert len(link.statuses()) == 6
    registration.register(settings)
    with connect(settings) as link:
        assert len(link.statuses()) == 1


def test_a_link_that_is_not_there_is_one_line(lab):
    with pytest.raises(RunError, match=r"link 127.0.0.1:8000: .*refused"):
        registration.members(load_as(ServerSettings, lab / "server" / "server.toml"))

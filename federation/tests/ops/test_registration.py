# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes as the link knows them: restarts, replaced keys, lost notes."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from edits import edit

from fedblend.errors import RunError
from fedblend_federation.ops import registration
from fedblend_federation.ops.credentials import node_key
from fedblend_federation.ops.settings import ServerSettings, load_as


class Link:
    """Stands in for Flower's: it has numbers and keys, and tells names to nobody."""

    def __init__(self):
        self.keys: dict[str, bytes] = {}
        self.drawn = 0

    def statuses(self) -> dict[str, str]:
        return dict.fromkeys(self.keys, "online")

    def unregister(self, id: str) -> None:
        del self.keys[id]

    def register(self, path: Path, name: str) -> str:
        key = path.read_bytes()
        if key in self.keys.values():
            raise RunError("link: HTTP 409: Public key already in use.")
        self.drawn += 1
        self.keys[str(self.drawn)] = key
        return str(self.drawn)


@pytest.fixture
def link(monkeypatch) -> Link:
    found = Link()
    monkeypatch.setattr(registration, "connect", lambda settings: nullcontext(found))
    return found


@pytest.fixture
def settings(own) -> ServerSettings:
    return load_as(ServerSettings, own / "server" / "server.toml")


def said(settings) -> list[tuple]:
    return [(m.name, *m.clients, m.status) for m in registration.members(settings)]


def test_keys_are_registered_once(link, settings):
    assert said(settings)[0] == ("alice", 0, "unknown")
    registration.register(settings)
    registration.register(settings)
    assert link.drawn == 2
    assert said(settings) == [("alice", 0, "online"), ("bob", 1, "online")]


def test_keys_are_registered_again_where_the_link_lost_its_database(link, settings):
    registration.register(settings)
    link.keys.clear()
    registration.register(settings)
    assert sorted(link.keys) == ["3", "4"]


def test_keys_are_registered_again_where_nobody_knows_whose_ids_they_have(
    link, settings
):
    registration.register(settings)
    (settings.folder / "members.json").unlink()
    registration.register(settings)
    registration.register(settings)
    assert sorted(link.keys) == ["3", "4"]
    assert said(settings)[0] == ("alice", 0, "online")


def test_ids_belong_to_clients_by_their_keys(link, settings):
    registration.register(settings)
    found = registration.link_nodes(settings)
    assert found.registered == {1: ("alice", (0,)), 2: ("bob", (1,))}


def test_a_retired_node_has_no_key_and_others_keep_their_numbers(link, own, settings):
    registration.register(settings)
    path = own / "server" / "server.toml"
    edit(path, 'key = "nodes/alice.pub"', 'key = "nodes/alice.pub"\nretired = true')
    left = load_as(ServerSettings, path)
    registration.register(left)
    assert sorted(link.keys) == ["2"]
    assert said(left) == [("alice", 0, "retired"), ("bob", 1, "online")]
    assert registration.link_nodes(left) == ({2: ("bob", (1,))}, (0,))


def test_a_replaced_key_is_forgotten(link, own, settings):
    registration.register(settings)
    new = node_key().public
    (own / "server" / "nodes" / "alice.pub").write_bytes(new)
    registration.register(settings)
    assert sorted(link.keys) == ["2", "3"]
    assert link.keys["3"] == new


def test_a_node_that_left_is_forgotten(link, own, settings):
    registration.register(settings)
    path = own / "server" / "server.toml"
    entry = '[[nodes]]\nname = "bob"\nkey = "nodes/bob.pub"\nclient = 1\n'
    registration.register(load_as(ServerSettings, edit(path, entry, "")))
    assert sorted(link.keys) == ["1"]


def test_a_missing_key_is_one_line(link, own, settings):
    (own / "server" / "nodes" / "alice.pub").unlink()
    with pytest.raises(RunError, match=r"alice.pub: No such file"):
        registration.register(settings)

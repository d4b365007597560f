# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``server.toml`` and ``node.toml``: what is accepted, and the line for what is not."""

import copy

import pytest

from fedblend.config import toml
from fedblend.errors import ConfigError
from fedblend_federation.ops.settings import (
    Address,
    NodeSettings,
    ServerSettings,
    is_host,
    is_loopback,
    load,
    load_as,
)

SERVER = {
    "version": 1,
    "address": "fl.example.org:443",
    "link": "127.0.0.1:8000",
    "certificate": "server.crt",
    "key": "/etc/own.key",
    "ca": "ca.crt",
    "folder": "state",
    "nodes": [
        {"name": "alice", "key": "nodes/alice.pub", "client": 1},
        {"name": "bob", "key": "nodes/bob.pub", "client": 0},
    ],
}
NODE = {
    "version": 1,
    "server": "[2001:db8::1]:443",
    "client": 3,
    "ca": "ca.crt",
    "key": "node.key",
    "folder": "state",
    "policy": "policy.toml",
    "data": {"file": "rows.csv", "target": "label", "inputs": "x"},
}


def put(folder, content, *settings):
    content = copy.deepcopy(content)
    for setting in settings:
        toml.put(content, setting)
    path = folder / "settings.toml"
    path.write_text(toml.write(content))
    return path


def test_paths_are_relative_to_the_file(tmp_path):
    server = load(put(tmp_path, SERVER))
    assert isinstance(server, ServerSettings)
    assert server.certificate == tmp_path / "server.crt"
    assert str(server.key) == "/etc/own.key"
    assert server.nodes[0].key == tmp_path / "nodes" / "alice.pub"
    node = load(put(tmp_path, NODE))
    assert isinstance(node, NodeSettings)
    assert node.server == Address("2001:db8::1", 443)
    assert str(node.server) == "[2001:db8::1]:443"
    assert node.data.file == tmp_path / "rows.csv"
    assert node.data.inputs == "x"


@pytest.mark.parametrize(
    ("content", "setting", "line"),
    [
        (SERVER, "link=8000", "link: 8000 is not text"),
        (SERVER, "link='x'", 'link: "x" is not host:port, such as fl.example.org:443'),
        (SERVER, "address='a:b:1'", 'address: "a:b:1" is not host:port, such as'),
        (SERVER, "address='fl.org:0'", 'address: "fl.org:0" is not host:port'),
        (SERVER, "address='fl.org:99999'", 'address: "fl.org:99999" is not host:port'),
        (SERVER, "adress=''", "adress: unknown key; did you mean 'address'?"),
        (SERVER, "version=2", "version: 2 is not 1"),
        (SERVER, "key=''", 'key: "" is not of length 1 or more'),
        (SERVER, "nodes=[]", "nodes: clients [] are not 0, 1, ... without a gap"),
        (SERVER, "nodes=[{name='A', key='k', client=0}]",
         'nodes.0.name: "A" is not 1 to 32 of a-z, 0-9 and -'),
        (SERVER, "nodes=[{name='a', key='k', client=1}]",
         "nodes: clients [1] are not 0, 1, ... without a gap"),
        (SERVER, "nodes=[{name='a', key='k', client=0},{name='a', key='k', client=1}]",
         'nodes: "a" is named twice'),
        (NODE, "client=-1", "client: -1 is not at least 0"),
        (NODE, "data.fil='x'", "data.fil: unknown key; did you mean 'file'?"),
        (NODE, "data.inputs=3", "data.inputs: 3 is not text"),
        (NODE, "data=1", "data: 1 is not a table"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(content, setting, line, tmp_path):
    path = put(tmp_path, content, setting)
    with pytest.raises(ConfigError) as error:
        load_as(ServerSettings if content is SERVER else NodeSettings, path)
    assert str(error.value).startswith(f"{path}: {line}")
    assert "\n" not in str(error.value)


def test_what_is_missing(tmp_path):
    path = put(tmp_path, {key: NODE[key] for key in NODE if key != "policy"})
    with pytest.raises(ConfigError, match="policy: is missing"):
        load(path)
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        load(tmp_path / "nothing.toml")


def test_hosts():
    good = ["fl.example.org", "localhost", "10.0.0.1", "::1", "a-b.c1"]
    bad = ["", "a..b", "-a.org", "a_b.org", "1.2.3", "http://a", "a" * 64, "a b", "a:1"]
    assert all(map(is_host, good))
    assert not any(map(is_host, bad))
    assert [is_loopback(host) for host in (*good, "0.0.0.0", "127.8.8.8")] == [
        False,
        True,
        False,
        True,
        False,
        False,
        True,
    ]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes that host several clients come to the simulator's numbers, each for itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from configured import (
    CASES,
    CLIENTS,
    POLICY,
    experiment,
    federated,
    few,
    largest_gap,
    method,
    sends_at_enrollment,
    simulated,
    simulation,
    write_rows,
)

from fedblend.errors import ConfigError, RunError
from fedblend_federation import message as messages
from fedblend_federation.client import executor
from fedblend_federation.client.ledger import read_ledger
from fedblend_federation.client.node import Host, Node, answering
from fedblend_federation.message import UNKNOWN, Message
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.server import membership
from fedblend_federation.server.checkpoint import Nodes, write_nodes
from fedblend_federation.server.membership import Registered
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

TOLERANCE = 1e-6
"""A dozen roundings of float32: the tests' compiler settings round differently in the
simulator's one program and in those of the nodes."""


def hosts(
    place: Path, folder: Path, clients: dict[int, list[int]], policy: str = POLICY
) -> dict[int, Node | Host]:
    """Nodes by address, each with the clients that it hosts."""
    made = {}
    for address, hosted in clients.items():
        home = folder / f"host{address}"
        home.mkdir(parents=True)
        (home / "policy.toml").write_text(few(policy))
        (home / "node.toml").write_text(
            f'version = 1\nserver = "127.0.0.1:8000"\nclients = {hosted}\nca = "ca"\n'
            'key = "key"\nfolder = "state"\npolicy = "policy.toml"\n'
            f'[data]\nfile = "{place}/rows{{client}}.npz"\n'
        )
        made[address] = answering(load_as(NodeSettings, home / "node.toml"))
    return made


def homes(folder: Path, clients: dict[int, list[int]]) -> list[Path]:
    """Folders whose ``state`` is that of each client, in the order of clients."""
    found = {}
    for address, hosted in clients.items():
        for client in hosted:
            home = folder / f"seen{client}"
            home.mkdir()
            state = folder / f"host{address}" / "state" / f"client-{client}"
            (home / "state").symlink_to(state)
            found[client] = home
    return [found[client] for client in sorted(found)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in CASES if one != "apfl"]


@pytest.mark.parametrize("name", ["apfl", *SLOW])
def test_hosted_clients_come_to_the_simulators_numbers(name, place, tmp_path):
    how, clients = method(name, place, rounds=2), {7: [2, 0], 9: [1]}
    out = experiment(tmp_path / "out", federated(how + "[measure]\nlocal = false\n"))
    carrying = LoopbackTransport(hosts(place, tmp_path, clients))  # pyright: ignore
    run_server(out, carrying, poll=0.0)
    text = simulated(how + "[measure]\nlocal = false\n", place)
    there = simulation(text)
    assert largest_gap(out, homes(tmp_path, clients), there) <= TOLERANCE
    answers = 2 + sends_at_enrollment(text)
    for client in range(CLIENTS):
        home = tmp_path / f"host{7 if client != 1 else 9}/state/client-{client}"
        ledger = read_ledger(home)
        assert (ledger.experiments, ledger.answers) == (1, answers)


FEDAVG = (
    '[model]\nname = "softmax"\n[algorithm]\nname = "fedavg"\nrate = 0.3\nsteps = 3\n'
    "batch_size = 8\n[run]\nrounds = 2\nevery = 2\n[measure]\nlocal = false\n"
)


class Counting(LoopbackTransport):
    """Counts the messages to each address."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.messages: list[tuple[int, bytes]] = []

    def send(self, outgoing):
        self.messages += list(outgoing.items())
        super().send(outgoing)


def test_a_bundle_is_one_message_and_no_longer_than_it_may_be(
    place, tmp_path, monkeypatch
):
    """Functions are compiled once for all clients of the node."""

    def sent(name: str) -> list[int]:
        out = experiment(tmp_path / name / "out", federated(FEDAVG))
        carrying = Counting(hosts(place, tmp_path / name, {7: [0, 1, 2]}))
        run_server(out, carrying, poll=0.0)
        return [
            len(list(messages.unpack_bundle(data)))
            for _, data in carrying.messages
            if messages.is_bundle(data)
        ]

    before = executor.update.cache_info().misses  # pyright: ignore
    # Enrollment, measures before, two rounds, measures after, the end.
    assert sent("one") == [3] * 6
    assert executor.update.cache_info().misses == before + 1  # pyright: ignore
    monkeypatch.setattr(membership, "BUNDLE_BYTES", 2500)
    assert sent("short")[:3] == [1, 1, 1]  # enrollment has the configuration


def test_a_client_that_refuses_fails_no_other(place, tmp_path):
    """One has too few answers left: the others of its node go on."""
    made = hosts(place, tmp_path, {7: [0, 1, 2]})
    home = tmp_path / "host7"
    node = home / "node.toml"
    node.write_text(node.read_text().replace("policy.toml", "policy{client}.toml"))
    for client in range(3):
        answers = "[budget]\nanswers = 1\n" if client == 1 else ""
        (home / f"policy{client}.toml").write_text(few(POLICY + answers))
    made = {7: answering(load_as(NodeSettings, node))}
    text = federated(FEDAVG).replace("[federation]", "[federation]\nquorum = 0.6")
    out = experiment(tmp_path / "out", text)
    summary = run_server(out, LoopbackTransport(made), poll=0.0)  # pyright: ignore
    lines = (out / "audit.jsonl").read_text().splitlines()
    refused = [
        one["fields"] for one in map(json.loads, lines) if "refused" in one["event"]
    ]
    assert {one["client"] for one in refused} == {1}
    assert "policy budget.answers" in refused[0]["reason"]
    assert summary["runs"][0]["round"] == 2
    answers = [
        read_ledger(home / "state" / f"client-{client}").answers for client in range(3)
    ]
    assert answers == [2, 1, 2]


def test_a_key_speaks_for_its_own_clients_alone(place, tmp_path):
    """A node that hosts a client of another key is denied that one."""
    made = hosts(place, tmp_path, {7: [0, 1], 9: [2]})
    out = experiment(tmp_path / "out", federated(FEDAVG, deadline=1.0))
    known = {7: Registered("gateway", (0,)), 9: Registered("other", (1, 2))}
    (out / "server").mkdir()
    write_nodes(out / "server", Nodes(known))
    with pytest.raises(RunError, match=r"client 1 \(other\) did not join; denied: gat"):
        run_server(out, LoopbackTransport(made), poll=0.0)  # pyright: ignore


def test_a_reply_in_anothers_name_is_no_reply(place, tmp_path):
    """A host may not answer for clients of other nodes, nor swap its own."""
    made = hosts(place, tmp_path, {7: [0, 1], 9: [2]})
    carrying = LoopbackTransport(made)  # pyright: ignore
    swapped = {0: 1, 1: 0}

    def spoil(address: int, data: bytes) -> list[bytes]:
        if address == 9 or not messages.is_bundle(data):
            return [data]
        parts = list(messages.unpack_bundle(data))
        if messages.decode(parts[0][1]).kind != "round":
            return [data]
        renamed = [(swapped[client], part) for client, part in parts]
        return [messages.pack_bundle([*renamed, (2, parts[0][1])])]

    carrying.spoil = spoil
    text = federated(FEDAVG, deadline=1.0)
    text = text.replace("[federation]", "[federation]\nquorum = 0.3")
    out = experiment(tmp_path / "out", text)
    run_server(out, carrying, poll=0.01)
    lines = [
        json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()
    ]
    rounds = [one["fields"]["counted"] for one in lines if one["event"] == "round"]
    assert rounds == [1, 1]
    strays = {one["fields"]["what"] for one in lines if one["event"] == "stray"}
    assert "client 0: a reply of client 1 that was not asked for" in strays
    assert "client None: a reply of client 0 that was not asked for" in strays


def test_a_bundle_that_is_lost_is_sent_again_and_counted_once(place, tmp_path):
    """The node has answered all three: it sends the same answers again."""
    carrying = Counting(hosts(place, tmp_path, {7: [0, 1, 2]}))
    lost: list[bytes] = []

    def spoil(address: int, data: bytes) -> list[bytes | None]:
        kinds = {messages.decode(part).kind for _, part in messages.unpack_bundle(data)}
        if kinds == {"round"} and not lost:
            lost.append(data)
            return [None]
        return [data]

    carrying.spoil = spoil
    out = experiment(tmp_path / "out", federated(FEDAVG))
    run_server(out, carrying, poll=0.0)
    lines = map(json.loads, (out / "audit.jsonl").read_text().splitlines())
    strays = [one["fields"]["what"] for one in lines if one["event"] == "stray"]
    assert sorted(strays) == [f"client {client}: lost" for client in range(3)]
    for client in range(3):
        ledger = read_ledger(tmp_path / f"host7/state/client-{client}")
        assert ledger.answers == 2
    rounds = [
        [messages.decode(part) for _, part in messages.unpack_bundle(data)]
        for _, data in carrying.messages
        if messages.is_bundle(data)
    ]
    assert [some[0].attempt for some in rounds if some[0].kind == "round"] == [0, 1, 0]


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"junk", "bytes"),
        (messages.MAGIC + b"junk", "a bundle with a damaged header"),
        (messages.encode(Message("round", "trial", 5, 0)), "this node hosts clients 0"),
    ],
)
def test_what_is_to_no_client_is_refused_in_one_line(place, tmp_path, data, reason):
    host = hosts(place, tmp_path, {7: [0, 1]})[7]
    reply = messages.decode(host.reply(data))
    assert reply.kind == "refused" and reason in reply.fields["reason"]
    assert "foreign" in (tmp_path / "host7/state/audit.jsonl").read_text()


def test_what_is_to_another_client_in_a_bundle_is_left_out(place, tmp_path):
    host = hosts(place, tmp_path, {7: [0, 1]})[7]
    stop = Message("stop", "trial", UNKNOWN)
    sent = [(c, messages.encode(stop._replace(client=c))) for c in (0, 5, 1)]
    parts = list(messages.unpack_bundle(host.reply(messages.pack_bundle(sent))))
    assert [client for client, _ in parts] == [0, 1]
    assert {messages.decode(data).kind for _, data in parts} == {"refused"}
    (line,) = (tmp_path / "host7/state/audit.jsonl").read_text().splitlines()
    assert "to client 5" in line


@pytest.mark.parametrize(
    "line, reason",
    [
        ("client = 1\nclients = [2]", "clients: is given in addition to client"),
        ("clients = []", "clients: is empty"),
        ("clients = [1, 1]", "clients: names a client twice"),
        ("", "client: is missing"),
        ("client = 1", r"data.file: \{client\} is for a node with clients"),
    ],
)
def test_clients_that_cannot_be_are_one_line(place, tmp_path, line, reason):
    hosts(place, tmp_path, {7: [0, 1]})
    path = tmp_path / "host7" / "node.toml"
    path.write_text(path.read_text().replace("clients = [0, 1]", line))
    with pytest.raises(ConfigError, match=reason):
        load_as(NodeSettings, path)


def test_memory_and_disk_are_limits_of_the_whole_node(place, tmp_path):
    policy = POLICY + "[limits]\ndisk_gb = 1e-6\n"
    host = hosts(place, tmp_path, {7: [0, 1]}, policy)[7]
    np.save(tmp_path / "host7/state/client-0/other.npy", np.zeros(1000))
    out = experiment(
        tmp_path / "out", federated(FEDAVG).replace("clients = 3", "clients = 2")
    )
    with pytest.raises(RunError, match=r"policy limits\.disk_gb"):
        run_server(out, LoopbackTransport({7: host}), poll=0.0)  # pyright: ignore

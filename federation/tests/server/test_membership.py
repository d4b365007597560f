# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who takes part: clients by their keys, absent and retired ones, claims of rows."""

import json

import pytest
from configured import CLIENTS, experiment, federated, nodes, write_rows

from fedblend.errors import RunError
from fedblend_federation import message as messages
from fedblend_federation.message import UNKNOWN, Message
from fedblend_federation.server.checkpoint import Nodes, read_nodes, write_nodes
from fedblend_federation.server.membership import Membership, Registered
from fedblend_federation.server.run import run_server
from fedblend_federation.transport import Timeouts
from loopback import LoopbackTransport

FEDAVG = """
[model]
name = "softmax"
[algorithm]
name = "{name}"
rate = 0.1
steps = 2
batch_size = 8
[run]
rounds = 3
every = 3
[measure]
local = false
"""
KNOWN = {5: Registered("alice", (0,)), 6: Registered("bob", (1,))}


class Fixed:
    """A transport on which nodes describe themselves as the clients they say."""

    def __init__(self, said: dict[int, int]):
        self.said, self.waiting = said, []

    def addresses(self):
        return sorted(self.said)

    def send(self, outgoing):
        self.waiting += list(outgoing.items())

    def receive(self):
        from fedblend_federation.transport import Reply

        found, self.waiting = self.waiting, []
        return [
            Reply(
                address,
                messages.encode(
                    messages.decode(data)._replace(client=self.said[address]).reply()
                ),
            )
            for address, data in found
        ]


def joined(said: dict[int, int], registered) -> Membership:
    invitation = Message("describe", "trial", UNKNOWN)
    membership = Membership(
        Fixed(said),
        invitation,
        lambda client, fields: None,
        lambda event, **fields: None,
        registered=registered,
    )
    membership.reachable()
    membership.receive()
    return membership


def test_a_node_is_the_client_of_its_key():
    honest = joined({5: 0, 6: 1}, KNOWN)
    assert (honest.clients, honest.denied) == ({0: 5, 1: 6}, {})
    swapped = joined({5: 1, 6: 0}, KNOWN)
    assert swapped.clients == {}
    assert swapped.denials() == (
        "alice: it says client 1, its key is of client 0; "
        "bob: it says client 0, its key is of client 1"
    )
    assert swapped.is_settled
    stranger = joined({5: 0, 7: 1}, KNOWN)
    assert stranger.clients == {0: 5}
    assert stranger.denials() == "at 7: its key is not one of server.toml"


def test_the_nodes_of_a_federation_are_read_as_written(tmp_path):
    assert read_nodes(tmp_path) == Nodes()
    write_nodes(tmp_path, Nodes(KNOWN, (2,)))
    assert read_nodes(tmp_path) == Nodes(KNOWN, (2,))
    (tmp_path / "nodes.json").write_text(json.dumps({"registered": {"a": 1}}))
    with pytest.raises(RunError, match=r"nodes.json: is damaged"):
        read_nodes(tmp_path)


def trial(tmp_path, *, name="fedavg", quorum=1.0, deadline=1.0, more=""):
    """A folder for an experiment, and the nodes of all clients."""
    write_rows(tmp_path)
    method = FEDAVG.format(name=name)
    if name == "apfl":
        method = method.replace("rate = 0.1", "rate = 0.1\nalpha = 0.5")
    text = federated(method, deadline).replace(
        "[model]", f"quorum = {quorum}\n{more}[model]", 1
    )
    return experiment(tmp_path / "run", text), nodes(tmp_path, tmp_path)


def audit(run) -> list[dict]:
    lines = (run / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "name", ["fedavg", pytest.param("apfl", marks=pytest.mark.slow)]
)
def test_a_missing_node_does_not_keep_others_from_starting(name, tmp_path):
    run, all = trial(tmp_path, name=name, quorum=0.6)
    there = {at: node for at, node in all.items() if node.client != 1}
    summary = run_server(run, LoopbackTransport(there), poll=0.0)
    (found,) = summary["runs"]
    assert found["received"] == 3 * (CLIENTS - 1)
    began = [line["fields"] for line in audit(run) if line["event"] == "began without"]
    assert began == [{"clients": "(1,)"}]


def test_too_few_nodes_are_named(tmp_path):
    run, all = trial(tmp_path, quorum=1.0, deadline=0.3)
    (run / "server").mkdir()
    names = ("alice", "bob", "carol")
    ids = {
        at: Registered(names[node.client], (node.client,)) for at, node in all.items()
    }
    write_nodes(run / "server", Nodes(ids))
    there = {at: node for at, node in all.items() if node.client != 1}
    with pytest.raises(RunError, match=r"client 1 \(bob\) did not join"):
        run_server(run, LoopbackTransport(there), poll=0.0)


def test_a_retired_client_is_not_waited_for(tmp_path):
    run, all = trial(tmp_path, quorum=1.0, deadline=30.0)
    (run / "server").mkdir()
    there = {at: node for at, node in all.items() if node.client != 1}
    ids = {
        at: Registered(f"n{node.client}", (node.client,)) for at, node in there.items()
    }
    write_nodes(run / "server", Nodes(ids, (1,)))
    summary = run_server(run, LoopbackTransport(there), poll=0.0)
    (found,) = summary["runs"]
    assert found["received"] == 3 * (CLIENTS - 1)


def test_a_claim_of_more_rows_than_allowed_is_denied(tmp_path):
    run, all = trial(tmp_path, deadline=0.3, more="max_rows = 20\n")
    with pytest.raises(
        RunError, match=r"client 0 has \d+ rows, federation.max_rows is"
    ):
        run_server(run, LoopbackTransport(all), poll=0.0)


def test_absence_is_shorter_than_the_deadline():
    assert Timeouts().absence < Timeouts().deadline / 10

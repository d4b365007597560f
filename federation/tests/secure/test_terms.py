# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that enrolls one node under other terms than all others opens nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from configured import CLIENTS, experiment, federated, method, write_rows
from federations import SecureFederation
from test_secure_experiment import nodes, secure
from trials import apart, clock, forged

from fedblend.errors import RunError
from fedblend.simulation.serialize import unpack
from fedblend_federation import message as messages
from fedblend_federation.ops.provision import provision
from fedblend_federation.secure.flatten import flatten
from fedblend_federation.server.run import run_server
from fedblend_federation.server.settings import BelowQuorum
from loopback import LoopbackTransport

_ = clock
VICTIM = 1
Lie = Callable[[dict, bytearray], tuple[dict, bytes]]


class LyingTransport(LoopbackTransport):
    """Enrolls some nodes with another message, and tells the server that all agree."""

    def __init__(self, nodes: dict, some: set[int], lie: Lie):
        super().__init__(nodes)
        self.lie, self.some, self.now = lie, some, set[int]()
        self.digests: dict[int, str] = {}
        self.spoil = self.as_if_all_agreed

    def send(self, outgoing):
        for address, data in outgoing.items():
            message = messages.decode(data)
            if message.kind == "enroll" and message.client in self.some:
                header, metadata, body = apart(data)
                fields, body = self.lie(json.loads(metadata["fields"]), body)
                data = forged(header, {**metadata, "fields": json.dumps(fields)}, body)
            super().send({address: data})

    def as_if_all_agreed(self, address: int, data: bytes) -> list[bytes]:
        reply = messages.decode(data)
        if reply.kind != "share":
            return [data]
        header, metadata, body = apart(data)
        fields = json.loads(metadata["fields"])
        fields["attempt"] = self.digests.setdefault(reply.round, fields["attempt"])
        return [forged(header, {**metadata, "fields": json.dumps(fields)}, body)]


def _first_parameters(fields: dict, body: bytearray) -> tuple[dict, bytes]:
    return fields, np.full(len(body) // 4, 1e3, np.float32).tobytes()


def _capacities(fields: dict, body: bytearray) -> tuple[dict, bytes]:
    return {**fields, "capacities": {"train": 900}}, bytes(body)


def _preprocessing(fields: dict, body: bytearray) -> tuple[dict, bytes]:
    return {**fields, "preprocessing": {"mean": [1e9]}}, bytes(body)


def _nothing(fields: dict, body: bytearray) -> tuple[dict, bytes]:
    return fields, bytes(body)


def lied(folder: Path, lie: Lie) -> np.ndarray | None:
    """The model after a round of eight nodes, if it could be opened."""
    federation = SecureFederation(folder, rounds=1)
    transport = LyingTransport(federation.nodes, {VICTIM}, lie)
    federation.transport = transport  # pyright: ignore[reportAttributeAccessIssue]
    server = federation.server()
    try:
        while server.round < 1:
            server.step()
    except BelowQuorum:
        return None
    return flatten(server.down.shared)


@pytest.mark.parametrize("lie", [_first_parameters, _capacities, _preprocessing])
def test_what_one_node_was_enrolled_with_is_in_the_masks(lie, tmp_path):
    honest = lied(tmp_path / "honest", _nothing)
    assert honest is not None and np.abs(honest).max() < 10
    found = lied(tmp_path / "lying", lie)
    assert found is None or np.abs(found).min() > 1


def test_the_server_names_who_was_enrolled_with_other_terms(tmp_path):
    federation = SecureFederation(tmp_path, rounds=1, quorum=0.5)
    transport = LyingTransport(federation.nodes, {VICTIM}, _capacities)
    transport.spoil = lambda address, data: [data]
    federation.transport = transport  # pyright: ignore[reportAttributeAccessIssue]
    server = federation.server()
    while server.round < 1:
        server.step()
    others = [fields["others"] for _, fields in federation.notes if "others" in fields]
    assert others and "or was enrolled with other terms" in others[0]


def test_a_node_is_enrolled_in_an_experiment_once(tmp_path):
    """Else its states would be those of other terms."""
    federation = SecureFederation(tmp_path, rounds=1)
    federation.complete(federation.server())
    node, params = federation.nodes[1000 + VICTIM], federation.params
    head = messages.Message("enroll", "trial", VICTIM)
    again = messages.decode(node.reply(messages.encode(head, params)))
    assert again.kind == "enroll"
    other = head._replace(fields={"rates": [1e-30, 1e-30, 0.0]})
    reply = messages.decode(node.reply(messages.encode(other, params)))
    assert "enrolled in this experiment with other terms" in reply.fields["reason"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "lab"
    provision(folder, host="127.0.0.1", nodes=["alice", "bob", "carol"], with_keys=True)
    return folder


@pytest.mark.parametrize(
    ("said", "told"), [("rate = 0.3", "rate = 1e-30"), ("l2 = 0.01", "l2 = 0.5")]
)
def test_all_nodes_but_one_cannot_be_told_to_stand_still(
    said, told, rows, lab, tmp_path
):
    """With the rate 1e-30 of all others the sum was the update of the last node."""
    made = nodes(rows, tmp_path, lab)
    text = secure(federated(method("fedavg", rows, 1), 0.2))
    text += "[measure]\nlocal = false\n"

    def lie(fields: dict, body: bytearray) -> tuple[dict, bytes]:
        assert said in fields["config"]
        return {**fields, "config": fields["config"].replace(said, told)}, bytes(body)

    transport = LyingTransport(made, set(range(CLIENTS - 1)), lie)
    try:
        run_server(experiment(tmp_path / "run", text), transport, poll=0.0)
    except RunError as error:
        assert "boxes that it made or holds do not open" in str(error)
        return
    model, _ = unpack((tmp_path / "run" / "model.safetensors").read_bytes())
    assert min(np.abs(leaf).min() for leaf in model.values()) > 1

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node replies alike to equal messages, and loses nothing on the way."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from trials import COUNTS, Trial, apart, clock, forged

from fedblend.simulation.serialize import pack
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.message import Message
from fedblend_federation.server import membership
from fedblend_federation.server.settings import BelowQuorum
from loopback import EXPERIMENT

_ = clock


class Recorded(Trial):
    """A federation in which all messages to client 1 are kept."""

    def run(self, rounds=None):
        send, self.sent = self.transport.send, []

        def recorded(outgoing):
            self.sent.extend(data for at, data in outgoing.items() if at == 1001)
            send(outgoing)

        self.transport.send = recorded  # pyright: ignore
        return super().run(rounds)

    def of(self, kind: str, round: int) -> bytes:
        (found,) = [
            data for data in self.sent if _is(messages.decode(data), kind, round)
        ]
        return found


def _is(message: Message, kind: str, round: int) -> bool:
    return (message.kind, message.round) == (kind, round)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _without_replies(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without the replies, which have the hash of the audit's newest line in them."""
    return {n: data for n, data in files.items() if not n.startswith("reply-")}


def test_messages_may_come_again_in_any_order(tmp_path):
    trial = Recorded(tmp_path, "scaffold", rounds=4, every=4)
    server = trial.run()
    place, node = tmp_path / "node1" / EXPERIMENT, trial.node(1)
    before = _files(place)
    assert [name for name in before if name.startswith("state-")] == [
        "state-1",
        "state-2",
        "state-3",
    ]
    answers = {}
    for turn in range(2):
        for path in place.glob("reply-*") if turn else ():
            path.unlink()  # then it is computed again
        for kind, round in (("round", 2), ("round", 3), ("measure", 4), ("round", 2)):
            answer = messages.decode(node.reply(trial.of(kind, round)))
            said = {**answer.fields, "audit": ""}, pack(dict(answer.arrays))
            assert answer.kind == kind
            assert answers.setdefault((kind, round), said) == said
        if turn:
            # Enrollment once more, long after: its state is there again, no other
            # moves.
            answer = messages.decode(node.reply(trial.of("enroll", messages.UNKNOWN)))
            assert answer.kind == "enroll"
    after = _files(place)
    after.pop("state--1")
    assert _without_replies(after) == _without_replies(before)
    assert server.bases.tolist() == [3] * len(COUNTS)


def test_a_message_that_comes_late_takes_no_newer_state_away(tmp_path):
    trial = Recorded(tmp_path, "apfl", rounds=4, every=4)
    trial.run(rounds=3)
    trial.transport.nodes[1001].reply(trial.of("round", 1))
    assert {1, 2} <= set(states.rounds(tmp_path / "node1" / EXPERIMENT))
    again = Trial(tmp_path, "apfl", rounds=4, every=4)
    assert again.run().bases.tolist() == [3] * len(COUNTS)


def test_nodes_restarted_for_every_message_come_to_the_same(tmp_path):
    whole = Trial(tmp_path / "whole", "scaffold")
    wanted = whole.outcome(whole.run())
    trial = Trial(tmp_path / "anew", "scaffold")
    send = trial.transport.send

    def restarted(outgoing):
        for client in range(len(COUNTS)):
            trial.transport.nodes[1000 + client] = trial.node(client)
        send(outgoing)

    trial.transport.send = restarted  # pyright: ignore
    assert trial.outcome(trial.run()) == wanted


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"client": 2}, "to client 2, this node is client 1"),
        ({"client": messages.UNKNOWN}, "to client -2, this node is client 1"),
        ({"kind": "refused"}, "of kind 'refused'"),
        ({"round": -1}, "there is no round -1"),
        ({"round": -2, "kind": "measure"}, "there is no round -2"),
        ({"base": 1}, "round 1 cannot start from round 1"),
        ({"base": 7, "round": 9}, "round 7 is asked for, this node has [-1, 0]"),
        ({"base": -2}, "round -2 is asked for"),
        ({"experiment": "other"}, "other is not known here"),
    ],
)
def test_what_no_server_asks_is_refused_and_moves_nothing(head, reason, tmp_path):
    trial = Recorded(tmp_path, "fedavg")
    trial.run(rounds=1)
    before = _files(tmp_path / "node1" / EXPERIMENT)
    message = Message("round", EXPERIMENT, 1, 1, base=0)._replace(**head)
    node = trial.transport.nodes[1001]
    told = jax.tree.map(np.asarray, trial.params)
    answer = messages.decode(node.reply(messages.encode(message, {"shared": told})))
    assert answer.kind == "refused" and reason in answer.fields["reason"]
    assert answer.client == 1
    assert _files(tmp_path / "node1" / EXPERIMENT) == before
    assert trial.events("refused")[-1]["reason"] == answer.fields["reason"]


def test_a_node_that_was_away_goes_on_from_where_it_was_counted(tmp_path):
    trial = Trial(tmp_path, "scaffold", rounds=4, every=4, quorum=0.5)
    server = trial.server()
    node = trial.transport.nodes[1001]
    while not server.done:
        trial.transport.nodes.pop(1001, None)
        if server.round in (0, 3):
            trial.transport.nodes[1001] = node
        server.step()
    assert server.bases.tolist() == [3] * len(COUNTS)
    assert states.rounds(tmp_path / "node1" / EXPERIMENT).count(0) == 1


def test_a_node_without_its_folder_is_refused_by_itself_and_named(tmp_path):
    trial = Trial(tmp_path, "scaffold", quorum=0.5)
    trial.run(rounds=1)
    shutil.rmtree(tmp_path / "node1")
    again = Trial(tmp_path, "scaffold", quorum=0.5)
    server = again.run()
    assert server.bases.tolist() == [2, 0, 2, 2]
    (reason,) = {
        event["reason"] for event in again.events("refused") if "client" in event
    }
    assert "was not enrolled in it, or has lost its folder" in reason


@pytest.mark.parametrize("name", ["terms.json", "state-0"])
def test_what_a_node_keeps_is_noticed_when_it_is_damaged(name, tmp_path):
    trial = Recorded(tmp_path, "scaffold")
    trial.run(rounds=2)
    path = tmp_path / "node1" / EXPERIMENT / name
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        if name == "terms.json" or at > 8:
            path.write_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
            answer = messages.decode(trial.node(1).reply(trial.of("round", 1)))
            assert answer.kind == "refused", at
    path.write_bytes(data)
    assert messages.decode(trial.node(1).reply(trial.of("round", 1))).kind == "round"


def test_a_node_under_another_address_joins_again(tmp_path):
    whole = Trial(tmp_path / "whole", "apfl")
    wanted = whole.outcome(whole.run())
    trial = Trial(tmp_path / "moved", "apfl")
    server = trial.server()
    while not server.done:
        trial.transport.nodes = {
            at + 10: node for at, node in trial.transport.nodes.items()
        }
        server.step()
    assert trial.outcome(server) == wanted


def test_two_nodes_cannot_be_the_same_client_at_once(tmp_path):
    trial = Trial(tmp_path, "fedavg", quorum=0.5)
    server = trial.server()
    now = [0.0]
    server.peers._clock = lambda: now[0]  # pyright: ignore
    trial.transport.nodes[2001] = trial.node(1)
    for _ in range(3):
        server.step()
    assert server.peers.clients[1] == 1001  # pyright: ignore
    assert server.peers.denied == {2001: {1: "client 1 is there already"}}  # pyright: ignore
    assert len(trial.events("denied")) == 1
    # The first one is gone, and after a while the other is asked again.
    del trial.transport.nodes[1001]
    now[0] += membership.RETRY_DENIED
    trial.complete(server)
    assert server.peers.clients[1] == 2001 and not server.peers.denied[2001]  # pyright: ignore
    assert server.bases.tolist() == [2] * len(COUNTS)


def test_a_node_of_another_experiment_does_not_join(tmp_path):
    trial = Trial(tmp_path)
    meet = messages.encode(Message("describe", "other", 1))
    trial.transport.spoil = lambda at, data: [meet] if at == 1001 else [data]
    server = trial.server()
    with pytest.raises(BelowQuorum, match="client"):
        trial.complete(server)
    assert 1 not in server.peers.clients  # pyright: ignore
    assert "was not asked for" in str(trial.events("stray"))


@pytest.mark.parametrize("kind", [KeyError, ValueError, TypeError, RuntimeError])
def test_a_failure_at_a_node_is_reported_without_its_text(tmp_path, kind):
    trial = Recorded(tmp_path)
    trial.run(rounds=1)
    node = trial.node(1)

    def fail(terms):
        raise kind("a row of somebody")

    def note(event, **fields):
        raise OSError("full")

    permissions = node.permissions()._replace(executor=fail)
    node.permissions = lambda: permissions
    answer = messages.decode(node.reply(trial.of("round", 0)))
    assert answer.fields == {"reason": f"failed: {kind.__name__}"}
    assert "a row of somebody" in str(trial.events("refused")[-1])
    node.note = note
    assert messages.decode(node.reply(b"")).kind == "refused"


def test_measures_that_nobody_knows_are_rejected(tmp_path):
    trial = Trial(tmp_path, rounds=1)
    odd = iter(
        ['{"loss": 1e999}', '{"loss": NaN}', '{"odd": 1}', f'{{"loss": {10**400}}}']
    )

    def spoil(at, data):
        header, metadata, body = apart(data)
        if metadata["kind"] != "measure":
            return [data]
        fields = '{"measures": {"train": {"personal": ' + next(odd) + "}}}"
        return [forged(header, {**metadata, "fields": fields}, body)]

    trial.transport.spoil = spoil
    server = trial.server()
    server.step()
    server.step()
    reasons = [event["reason"] for event in trial.events("rejected")]
    assert len(reasons) == len(COUNTS)
    assert all("measures are damaged" in reason for reason in reasons)
    assert server.measured == [{}]

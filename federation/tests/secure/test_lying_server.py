# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A server that tries to see more than one sum of a round gets one line."""

import atexit
import base64
import json
import shutil
import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from federations import CLIENTS, SecureFederation, algorithm, problem
from trials import apart, clock, forged

import fedblend as fb
from fedblend import compress
from fedblend.errors import ConfigError
from fedblend.simulation.serialize import pack, pack_named, unpack
from fedblend_federation import message as messages
from fedblend_federation.message import Message
from fedblend_federation.secure.flatten import flatten
from fedblend_federation.secure.session import SHARES_BYTES
from fedblend_federation.server.settings import BelowQuorum

_ = clock
VICTIM, EVERYBODY = 3, list(range(CLIENTS))


class Lied:
    """A federation whose server gets no reply in an exchange of round 1, and lies."""

    def __init__(self, folder, until: str = "unmask"):
        stopped, self.sent = stopped_in(until)
        shutil.copytree(stopped, folder, dirs_exist_ok=True)
        self.federation = SecureFederation(folder)

    def ask(self, kind: str, client: int = VICTIM, round: int = 1, **fields) -> Message:
        """The reply to what the server asked, or asks with some fields changed."""
        return messages.decode(self.reply(kind, client, round, **fields))

    def reply(self, kind: str, client: int = VICTIM, round: int = 1, **fields) -> bytes:
        header, metadata, body = apart(self.sent[kind, round, client])
        known = json.loads(metadata["fields"])
        metadata["fields"] = json.dumps({**known, **fields})
        node = self.federation.nodes[1000 + client]
        return node.reply(forged(header, metadata, body))

    def ask_as(self, kind: str, of: str, **fields) -> Message:
        """The reply to a message of a kind, with the fields of one of another kind."""
        known = {**self.fields(of), **fields}
        message = Message(kind, "trial", VICTIM, 1, fields=known)
        node = self.federation.nodes[1000 + VICTIM]
        return messages.decode(node.reply(messages.encode(message)))

    def fields(self, kind: str, client: int = VICTIM) -> dict:
        return dict(messages.decode(self.sent[kind, 1, client]).fields)


@cache
def stopped_in(until: str) -> tuple[str, dict[tuple[str, int, int], bytes]]:
    """The folders of a federation, and the messages that its server has sent."""
    folder = tempfile.mkdtemp(prefix="fedblend-secure-")
    atexit.register(shutil.rmtree, folder)
    gone = {(until, 1): set(EVERYBODY)}
    federation, sent = SecureFederation(Path(folder), gone=gone), {}
    send = federation.transport.send

    def recorded(outgoing):
        for data in outgoing.values():
            message = messages.decode(data)
            sent[message.kind, message.round, message.client] = data
        send(outgoing)

    federation.transport.send = recorded  # pyright: ignore
    server = federation.server()
    # All exchanges of a round apart: nobody shares for the next one.
    server.collector._following = list  # pyright: ignore
    with pytest.raises(BelowQuorum):
        federation.complete(server)
    return folder, sent


@pytest.fixture
def lied(tmp_path):
    return Lied(tmp_path)


def refused(reply: Message) -> str:
    assert reply.kind == "refused", reply.kind
    reason = reply.fields["reason"]
    assert "\n" not in reason and len(reason) < 200
    return reason


def test_a_message_that_comes_again_gets_the_same_numbers(lied):
    for kind in ("round", "unmask"):
        first = lied.ask(kind)
        lied.federation.nodes[1000 + VICTIM] = lied.federation.node(VICTIM)
        again = lied.ask(kind)
        assert first.kind == again.kind == kind
        assert pack(dict(first.arrays)) == pack(dict(again.arrays))


def test_a_round_is_not_answered_again_with_fewer_sharers(lied):
    fewer = lied.fields("round")["nonces"][:-1]
    reason = refused(lied.ask("round", nonces=fewer))
    assert "attempt 0 at round 1 was answered" in reason


def test_a_round_is_not_answered_again_with_other_weights(lied):
    assert "was answered" in refused(lied.ask("round", largest=1e9))


def test_of_two_attempts_one_is_opened(lied):
    assert lied.ask("unmask").kind == "unmask"
    for kind in ("share", "round", "unmask"):
        reason = refused(lied.ask(kind, attempt=1))
        assert "a sum of round 1 was opened" in reason
    members = EVERYBODY[:-1]
    assert "was opened" in refused(lied.ask("share", attempt=1, members=members))


def test_an_attempt_that_a_later_one_replaced_is_not_opened(lied):
    nonces = []
    for client in EVERYBODY:
        shared = lied.ask("share", client, attempt=1)
        nonces.append([client, shared.fields["nonce"]])
    assert lied.ask("round", attempt=1, nonces=nonces).kind == "round"
    assert "no answer in this attempt" in refused(lied.ask("unmask"))
    assert "attempt 1 at round 1 was answered" in refused(lied.ask("round"))
    # An earlier round is over for good.
    assert "was opened" in refused(lied.ask("unmask", round=0, answered=[VICTIM]))


def test_an_attempt_has_one_cohort(lied):
    members = EVERYBODY[:-1]
    nonces = [
        [client, lied.ask("share", client, members=members).fields["nonce"]]
        for client in members
    ]
    reason = refused(lied.ask("round", members=members, nonces=nonces))
    assert "attempt 0 at round 1 was answered" in reason and "cohort" in reason


def test_an_answer_that_changed_is_not_masked_again(lied):
    """Other noise, another clip, or a state that was lost: not under the same masks."""
    path = lied.federation.folder / f"node{VICTIM}" / "trial" / "state-0"
    arrays, metadata = unpack(path.read_bytes())
    path.write_bytes(pack_named(arrays, {**metadata, "request": "another"}))
    reason = refused(lied.ask("round"))
    assert "a mask hides one answer" in reason


def test_all_others_cannot_be_said_to_be_gone(lied):
    for answered, line in (
        ([VICTIM], "accept.min_cohort: a sum is of 1 nodes; allowed: at least 3"),
        (EVERYBODY[:5], "5 of 8 clients answered; allowed: at least 6"),
        (EVERYBODY[4:], "not among those who did"),
        ([*EVERYBODY, 99], "client 99 is not one of the sharers"),
        ([3, 3, 3], "not different clients in order"),
        ("all", "not different clients in order"),
    ):
        assert line in refused(lied.ask("unmask", answered=answered))
    assert lied.ask("unmask").kind == "unmask"


def test_too_few_sharers_are_refused(tmp_path):
    lied = Lied(tmp_path, "round")
    nonces = lied.fields("round")["nonces"]
    some = [pair for pair in nonces if pair[0] in (1, 2, 3, 4, 5)]
    assert "5 of 8 clients shared" in refused(lied.ask("round", nonces=some))


def test_of_a_client_a_node_gives_one_share(lied):
    """That of b_j or that of e_j; with both the server had the answer."""
    assert lied.ask("unmask").kind == "unmask"
    others = [client for client in EVERYBODY if client != 5]
    assert "was opened" in refused(lied.ask("unmask", answered=others))


def test_a_cohort_below_the_minimum_is_refused(lied):
    line = "policy accept.min_cohort: a sum is of 2 nodes; allowed: at least 3"
    assert refused(lied.ask("share", attempt=1, members=[2, 3])) == line


def shared(folder, members, **secure) -> Message:
    """What a node that was enrolled says to an attempt with these members."""
    federation = SecureFederation(folder, secure=secure)
    server = federation.server()
    while not (folder / f"node{VICTIM}" / "trial").exists():
        server.step()
    fields = {"attempt": 1, "members": members}
    asked = Message("share", "trial", VICTIM, 2, fields=fields)
    return messages.decode(
        federation.nodes[1000 + VICTIM].reply(messages.encode(asked))
    )


def test_a_cohort_in_which_those_who_collude_could_open_an_answer_is_refused(tmp_path):
    """``test_collusion.py`` has the attack: the server and two of six nodes."""
    six = EVERYBODY[:6]
    assert shared(tmp_path / "0", six, least=5).kind == "share"
    reply = shared(tmp_path / "2", six, least=5, colluding=2)
    assert refused(reply) == (
        "policy accept.colluding: the number of clients of 2 other nodes is 2; "
        "allowed: at most 1 in a cohort of 6"
    )
    seven = shared(tmp_path / "7", EVERYBODY[:7], least=5, colluding=2)
    assert seven.kind == "share"


def test_a_node_that_hosts_several_clients_counts_once(tmp_path):
    """Three clients of one node are one node, and have as many shares as they are."""
    names = dict.fromkeys((2, 3, 4), "gate")
    line = "policy accept.min_cohort: a sum is of 1 nodes; allowed: at least 3"
    assert refused(shared(tmp_path / "one", [2, 3, 4], names=names)) == line
    names = dict.fromkeys((0, 1, 2), "gate")
    reply = shared(tmp_path / "more", EVERYBODY, colluding=1, names=names)
    assert "of 1 other nodes is 3; allowed: at most 2 in a cohort of 8" in refused(
        reply
    )
    names = dict.fromkeys((1, 2, 3), "own")
    own = shared(tmp_path / "own", EVERYBODY, colluding=1, names=names)
    assert own.kind == "share"


def test_a_server_does_not_ask_to_open_a_sum_of_too_few_nodes(tmp_path):
    """Nodes would refuse it for good; another attempt may have more."""
    names = {0: "gate", 1: "gate", **{c: f"n{c}" for c in EVERYBODY[2:]}}
    gone = {("round", 1): {7}}
    secure = {"least": 7, "names": names}
    federation = SecureFederation(tmp_path, gone=gone, secure=secure, quorum=0.5)
    server = federation.server()
    server.collector.names = names  # pyright: ignore
    with pytest.raises(BelowQuorum, match="clients of 6 nodes answered, 7 are needed"):
        federation.complete(server)
    federation.transport.gone = {}
    federation.complete(server)
    assert server.round == 3


def test_a_server_waits_for_as_many_as_the_policies_demand(tmp_path):
    gone = {("round", 1): {0}}
    federation = SecureFederation(tmp_path, gone=gone, secure={"least": 8}, quorum=0.5)
    with pytest.raises(BelowQuorum, match="round 1: 7 of 8 clients answered, 8 are"):
        federation.complete(federation.server())
    federation.transport.gone = {}
    server = federation.server()
    federation.complete(server)
    assert server.round == 3


def test_a_swapped_key_shows(tmp_path):
    """A node with another roster: all it sends has another digest."""
    federation = SecureFederation(tmp_path, quorum=0.5)
    node = federation.nodes[1000 + VICTIM]
    swapped = federation.means(VICTIM)
    keys = {**swapped.roster, 5: bytes(range(32))}
    permissions = node.permissions()._replace(
        secure=lambda terms: swapped._replace(roster=keys)
    )
    node.permissions = lambda: permissions
    server = federation.complete(federation.server())
    assert server.records[-1].rejected == 3
    others = [fields["others"] for _, fields in federation.notes if "others" in fields]
    line = "client 3 rejected: it has other keys in its roster.toml, or was enrolled"
    assert len(others) == 3 and all(line in one for one in others)


def test_sharing_for_the_next_round_obeys_the_same_rules(lied):
    """A sum is opened whatever is asked beside it, and then no other one of round 1."""
    for asked in (
        {"attempt": 0, "members": [2, 3]},
        {"attempt": -1, "members": EVERYBODY},
        {"attempt": 0, "members": [0, 1, 2]},
        {"attempt": 0, "members": "all"},
        "now",
    ):
        other = Lied(lied.federation.folder.with_name(f"other {asked}"))
        reply = other.ask("unmask", next=asked)
        assert reply.kind == "unmask" and "next" not in reply.fields
    reply = lied.ask("unmask", next={"attempt": 0, "members": EVERYBODY})
    assert len(reply.fields["next"]["nonce"]) == 64
    assert "a sum of round 1 was opened" in refused(lied.ask("share", attempt=1))


def test_a_server_cannot_put_in_shares_of_its_own(lied):
    own = base64.b64encode(bytes(SHARES_BYTES)).decode()
    for boxes in ([own] * (CLIENTS - 2), ["ä"] * (CLIENTS - 1), "all", None):
        assert "has no boxes" in refused(lied.ask("unmask", boxes=boxes))
    reply = lied.ask("unmask", boxes=[own] * (CLIENTS - 1))
    assert reply.fields["damaged"] == [c for c in EVERYBODY if c != VICTIM]
    # It has given its own share of its own seed, in a box; and that is all.
    assert "a sum of round 1 was opened" in refused(lied.ask("unmask", attempt=1))
    assert "was opened" in refused(lied.ask("unmask"))


def test_a_server_that_spoils_boxes_gets_no_sum_of_fewer(tmp_path):
    """Nodes name honest ones, and still agree to no smaller cohort, U1 or U2."""
    lied = Lied(tmp_path, "round")
    spoiled = lied.fields("round")["boxes"]
    spoiled[:6] = [base64.b64encode(bytes(SHARES_BYTES)).decode()] * 6
    reply = lied.ask("round", boxes=spoiled)
    others = [client for client in EVERYBODY if client != VICTIM]
    assert reply.fields["damaged"] == others[:6]
    few, attempt = [3, 7], {"attempt": 1}
    line = "policy accept.min_cohort: a sum is of 2 nodes; allowed: at least 3"
    assert refused(lied.ask("share", members=few, **attempt)) == line
    asked = {"boxes": [], "answered": few}
    assert line == refused(lied.ask_as("unmask", "round", **asked))
    nonces = [pair for pair in lied.fields("round")["nonces"] if pair[0] in few]
    other = Lied(tmp_path / "other", "round")
    assert line == refused(other.ask("round", nonces=nonces, boxes=spoiled[-1:]))


def test_what_is_not_masked_is_refused(lied):
    header, metadata, body = apart(lied.sent["round", 1, VICTIM])
    metadata["fields"] = "{}"
    node = lied.federation.nodes[1000 + VICTIM]
    reply = messages.decode(node.reply(forged(header, metadata, body)))
    assert "is not the number of an attempt" in refused(reply)


def test_an_experiment_without_secure_sums_opens_nothing(tmp_path):
    federation = SecureFederation(tmp_path, secure=None)
    federation.complete(federation.server())
    message = Message("share", "trial", VICTIM, 1)
    node = federation.nodes[1000 + VICTIM]
    reply = messages.decode(node.reply(messages.encode(message)))
    assert "share is for secure sums" in refused(reply)


def tampered(folder, change) -> np.ndarray:
    """The model of a server that sends one node another message than all others."""
    federation = SecureFederation(folder, rounds=2)
    send = federation.transport.send

    def lying(outgoing):
        for address, data in outgoing.items():
            message = messages.decode(data)
            asked = (message.kind, message.round, message.client)
            send({address: change(data) if asked == ("round", 1, VICTIM) else data})

    federation.transport.send = lying  # pyright: ignore
    server = federation.server()
    while server.round < 2:
        server.step()
    return flatten(server.down.shared)


def _other_model(data: bytes) -> bytes:
    header, metadata, body = apart(data)
    return forged(header, metadata, bytes(body[:-1]) + bytes([body[-1] ^ 1]))


def _other_weight(data: bytes) -> bytes:
    header, metadata, body = apart(data)
    fields = {**json.loads(metadata["fields"]), "largest": 1e9}
    return forged(header, {**metadata, "fields": json.dumps(fields)}, body)


@pytest.mark.parametrize("change", [_other_model, _other_weight])
def test_nodes_that_are_told_different_things_make_no_sum(change, tmp_path):
    """Another model, or a largest weight next to which all others weigh nothing.

    Numbers of 64 random bits are beyond 2**40 with a fraction of 2**31 of the clip's
    65536: none of some ten is near an honest one.
    """
    honest = tampered(tmp_path / "honest", lambda data: data)
    found = tampered(tmp_path / "lying", change)
    assert np.abs(honest).max() < 10
    assert np.abs(found).min() > 1


def test_a_secret_that_is_cut_off_masks_nothing(tmp_path):
    """An empty file, or one of zeros, is a mask that everybody knows."""
    lied = Lied(tmp_path, "round")
    path = lied.federation.folder / f"node{VICTIM}" / "trial" / "secure.secret"
    whole = path.read_bytes()
    line = "secure.secret: the file is damaged on the disk of this node; restore it fr"
    for data in (b"", bytes(32), whole[:31], whole[:32], whole[:-1], whole + b"0"):
        path.write_bytes(data)
        assert line in refused(lied.ask("round"))
        assert path.read_bytes() == data
    path.write_bytes(whole)
    assert lied.ask("round").kind == "round"


def after_a_lie(folder, change) -> np.ndarray:
    """The model after round 1, if one node got another message in round 0.

    The server throws round 0 away; the states of the nodes are those after it.
    """
    federation = SecureFederation(folder, "scaffold", rounds=2)
    send = federation.transport.send

    def lying(outgoing):
        for address, data in outgoing.items():
            message = messages.decode(data)
            asked = (message.kind, message.round, message.client)
            send({address: change(data) if asked == ("round", 0, VICTIM) else data})

    federation.transport.send = lying  # pyright: ignore
    server = federation.server()
    server.step()
    first = server.down, server.server
    while server.round < 1:
        server.step()
    server.down, server.server = first
    while server.round < 2:
        server.step()
    return flatten(server.down.shared)


def test_a_lie_of_an_earlier_round_is_in_the_masks(tmp_path):
    """Of a client whose state came from another model the sum would be mostly its."""
    honest = after_a_lie(tmp_path / "honest", lambda data: data)
    found = after_a_lie(tmp_path / "lying", _other_model)
    assert np.abs(honest).max() < 10
    assert np.abs(found).min() > 1


def test_a_node_is_told_what_it_has_missed(lied):
    """Node 3 starts from round 0: between it and round 1 is nothing."""
    for missed in (None, "", ["a"], [3]):
        assert "what this node has missed" in refused(lied.ask("round", missed=missed))


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (partial(compress.top_k, 3), "entries of its own choice"),
        (partial(compress.rand_k, 3), "entries of its own choice"),
        (partial(compress.rand_k, 3, places="sent"), "entries of its own choice"),
    ],
)
def test_entries_that_differ_by_client_are_refused(build, line, tmp_path):
    federation = SecureFederation(tmp_path)
    federation.algorithm = fb.transforms.compressed(algorithm("fedavg"), build())
    with pytest.raises(ConfigError, match=line):
        federation.server()


def test_a_part_that_only_one_client_sends_is_refused(tmp_path):
    federation = SecureFederation(tmp_path)
    federation.algorithm = fb.transforms.perm_k(algorithm("fedavg"), clients=CLIENTS)
    with pytest.raises(ConfigError, match="entries that few others send"):
        federation.server()


def test_requests_that_tell_clients_apart_are_refused(tmp_path):
    federation = SecureFederation(tmp_path)
    work = fb.Work(0.1, steps=1, batch_size=2)
    federation.algorithm = fb.algorithms.agnostic(
        problem().loss, work, q_rate=0.1, clients=CLIENTS
    )
    with pytest.raises(ConfigError, match="ask for parts of the message"):
        federation.server()

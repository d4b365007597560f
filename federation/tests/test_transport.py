# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How long a server waits and how often it sends, by a clock of the test's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trials import Clock, Trial, clock

import fedblend as fb
from fedblend import compress
from fedblend.core import Wire
from fedblend.losses import cross_entropy
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.message import Message
from fedblend_federation.server.membership import Membership
from fedblend_federation.server.settings import RoundRules
from fedblend_federation.transport import Rejected, Replies, Reply, Timeouts, exchange
from loopback import LoopbackFederation

_ = clock
TIMEOUTS = Timeouts(deadline=20.0, resend=5.0, pause=2.0, poll=1.0, attempts=3)


class Timed:
    """A transport whose clients reply after so many seconds; None never does."""

    def __init__(self, clock: Clock, after: dict[int, float | None], errors: int = 0):
        self.clock, self.after, self.errors = clock, after, errors
        self.sent: list[tuple[float, int, int]] = []
        self.waiting: list[tuple[float, Reply]] = []

    def addresses(self) -> list[int]:
        return sorted(self.after)

    def send(self, outgoing) -> None:
        for address, data in outgoing.items():
            request, after = messages.decode(data), self.after[address]
            if request.kind == "describe":
                after, own = 0.0, request._replace(client=address)
                reply = Reply(address, messages.encode(own))
            else:
                self.sent.append((self.clock.now, address, request.attempt))
                reply = Reply(address, messages.encode(request.reply()))
                if self.errors > 0:
                    self.errors, reply = self.errors - 1, Reply(address, None, "lost")
            if after is not None:
                self.waiting.append((self.clock.now + after, reply))

    def receive(self) -> list[Reply]:
        due = [reply for at, reply in self.waiting if at <= self.clock.now]
        self.waiting = [one for one in self.waiting if one[0] > self.clock.now]
        return due


def exchanged(
    after: dict[int, float | None], errors=0, accept=lambda reply: 1, **more
) -> tuple[Replies, Timed, float]:
    time = Clock()
    transport = Timed(time, after, errors)
    invitation = Message("describe", "trial", messages.UNKNOWN)
    membership = Membership(transport, invitation, lambda *of: None, _quiet, time)  # pyright: ignore
    requests = {client: (Message("round", "trial", client, 0), ()) for client in after}
    replies = exchange(
        membership, requests, accept, TIMEOUTS, clock=time, sleep=time.sleep, **more
    )
    return replies, transport, time.now


def _quiet(event: str, **fields: Any) -> None:
    del event, fields


def test_who_replies_at_once_is_waited_for_no_longer():
    replies, transport, took = exchanged({0: 0.0, 1: 0.0})
    assert (replies.accepted, replies.silent, took) == ({0: 1, 1: 1}, [], 1.0)
    assert transport.sent == [(1.0, 0, 0), (1.0, 1, 0)]


def test_after_silence_the_request_is_sent_again_until_the_deadline():
    replies, transport, took = exchanged({0: 0.0, 1: None})
    assert (list(replies.accepted), replies.silent, took) == ([0], [1], 20.0)
    assert [sent for sent in transport.sent if sent[1] == 1] == [
        (1.0, 1, 0),
        (6.0, 1, 1),
        (11.0, 1, 2),
    ]


def test_after_an_error_the_request_is_sent_again_after_a_pause():
    replies, transport, took = exchanged({0: 0.0}, errors=2)
    assert transport.sent == [(1.0, 0, 0), (3.0, 0, 1), (5.0, 0, 2)]
    assert (replies.accepted, took) == ({0: 1}, 5.0)
    assert replies.strays == {"client 0: lost": 2}


class Leaving(Timed):
    """A transport whose client 1 loses its connection after 3 seconds."""

    def addresses(self) -> list[int]:
        return [0] if self.clock.now > 3.0 else [0, 1]


@pytest.mark.parametrize(
    ("least", "seconds"),
    [(None, 20.0), (2, 20.0), (1, 10.0)],
    ids=["all are needed", "it is needed", "it is not needed"],
)
def test_nobody_waits_for_a_client_that_has_lost_its_connection(least, seconds):
    time = Clock()
    transport = Leaving(time, {0: 0.0, 1: None})
    invitation = Message("describe", "trial", messages.UNKNOWN)
    membership = Membership(transport, invitation, lambda *of: None, _quiet, time)  # pyright: ignore
    requests = {client: (Message("round", "trial", client, 0), ()) for client in (0, 1)}
    replies = exchange(
        membership,
        requests,
        lambda reply: 1,
        TIMEOUTS._replace(absence=6.0),
        clock=time,
        sleep=time.sleep,
        least=least,
    )
    assert (list(replies.accepted), replies.silent) == ([0], [1])
    assert time.now == seconds


def test_attempts_come_to_an_end():
    replies, transport, took = exchanged({0: 0.0}, errors=9)
    assert (len(transport.sent), replies.silent, took) == (3, [0], 20.0)


def test_a_reply_to_an_earlier_attempt_is_accepted():
    replies, transport, took = exchanged({0: 8.0})
    assert [attempt for _, _, attempt in transport.sent] == [0, 1]
    assert (replies.accepted, took) == ({0: 1}, 9.0)


def test_enough_is_enough():
    slow: dict[int, float | None] = {0: 3.0, 1: 0.0, 2: None, 3: 1.0}
    replies, _, took = exchanged(slow, enough=2)
    assert (sorted(replies.accepted), replies.silent, took) == ([1, 3], [0, 2], 2.0)
    # Of those that come together only as many are taken as were wanted.
    replies, _, _ = exchanged(dict.fromkeys(range(4), 0.0), enough=2)
    assert list(replies.accepted) == [0, 1] and replies.silent == [2, 3]
    assert replies.strays == {
        "client 2: enough had replied": 1,
        "client 3: enough had replied": 1,
    }


def test_who_is_rejected_is_not_asked_again():
    def accept(reply: Message):
        if reply.client == 1:
            raise Rejected("no\nuse")
        return 1

    replies, transport, took = exchanged({0: 0.0, 1: 0.0}, accept=accept)
    assert (replies.rejected, len(transport.sent), took) == ({1: "no use"}, 2, 1.0)


def test_spare_members_make_up_for_silent_ones(tmp_path):
    trial = Trial(tmp_path, cohort=2, spare=2, rounds=2, every=2)
    away = {1000 + int(c) for c in (0, 3)}
    trial.transport.spoil = lambda at, data: (
        [] if at in away and messages.decode(data).kind == "round" else [data]
    )
    server = trial.complete(trial.server())
    assert server.bases.tolist() == [-1, 1, 1, -1]
    assert (server.records[-1].received, server.records[-1].dropped) == (4, 4)


def test_no_more_than_the_cohort_counts(tmp_path):
    trial = Trial(tmp_path, cohort=2, spare=2, rounds=2, every=2)
    server = trial.complete(trial.server())
    assert server.records[-1].received == 2 * 2
    assert (server.bases >= 0).sum() == 2


@pytest.mark.parametrize(("quorum", "cohort", "least"), [(0.55, 20, 11), (0.51, 4, 3)])
def test_a_quorum_is_rounded_up_and_no_further(quorum, cohort, least):
    assert RoundRules(rounds=1, cohort=cohort, quorum=quorum).least == least


def test_a_round_whose_state_is_gone_is_not_the_same(tmp_path):
    for round in (2, 5):
        states.write_state(tmp_path, round, {"a": np.ones(2)}, f"asked {round}")
    assert states.is_first_request(tmp_path, 5, "asked 5")
    assert not states.is_first_request(tmp_path, 5, "other")
    assert states.is_first_request(tmp_path, 6, "other")
    assert not states.is_first_request(tmp_path, 3, "other")


WIDE, HIDDEN = 300, 330
HEADER = 4096
"""Bytes of a message beyond its content, and two in a hundred."""


def _wide():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, WIDE)).astype(np.float32)
    federation = fb.federate(
        (rows, np.arange(6, dtype=np.int32) % 3), np.split(np.arange(6), 3)
    )

    def apply(params, inputs):
        return jnp.tanh(inputs @ params["in"]) @ params["out"]

    params = {
        "in": jnp.asarray(rng.standard_normal((WIDE, HIDDEN)), jnp.float32),
        "out": jnp.zeros((HIDDEN, 3), jnp.float32),
    }
    return (
        federation,
        fb.fedavg(cross_entropy(apply), fb.Work(0.1, steps=1, batch_size=2)),
        params,
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda fedavg: fedavg,
        lambda fedavg: fb.transforms.compressed(fedavg, compress.rand_k(5000)),
        lambda fedavg: fb.transforms.diana(fedavg, compress.rand_k(5000)),
    ],
    ids=["fedavg", "rand_k", "diana"],
)
def test_bytes_on_the_way_are_the_bits_that_are_counted(wrap, tmp_path):
    federation, fedavg, params = _wide()
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) >= 99_000
    loopback = LoopbackFederation(
        wrap(fedavg),
        params,
        federation,
        jax.random.key(0),
        tmp_path,
        rounds=1,
        cohort=3,
        every=1,
        timeouts=TIMEOUTS,
    )
    server = loopback.server()
    server.step()
    server.step()
    before = loopback.transport.sent, loopback.transport.received
    bits = server.ledger.down.sum(), server.ledger.up.sum()
    joined = server.ledger.sizes.params * 3
    server.step()
    sent, received = (
        loopback.transport.sent - before[0],
        loopback.transport.received - before[1],
    )
    down = (int(server.ledger.down.sum() - bits[0]) - joined) / 8
    up = int(server.ledger.up.sum() - bits[1]) / 8
    assert down <= sent <= 1.02 * down + 3 * HEADER
    assert up <= received <= 1.02 * up + 3 * HEADER


def test_an_update_that_decodes_to_no_number_is_rejected(tmp_path):
    """What travels is finite, what it stands for is not: its client stays behind."""
    federation, fedavg, params = _wide()

    def client(down, state, shard, key):
        up, after = fedavg.client(down, state, shard, key)
        size = jnp.where(shard.id == 1, 10.0, 1e-3)
        return up._replace(delta=jax.tree.map(lambda w: 0 * w + size, up.delta)), after

    def decode(up, sender):
        return up._replace(delta=jax.tree.map(lambda w: 1e38 * w, up.delta))

    loopback = LoopbackFederation(
        fedavg._replace(client=client, wire=Wire(decode=decode)),
        params,
        federation,
        jax.random.key(0),
        tmp_path,
        rounds=1,
        cohort=3,
        quorum=0.5,
        timeouts=TIMEOUTS,
    )
    server = loopback.server()
    while server.round < 1:
        server.step()
    assert server.bases.tolist() == [0, -1, 0]
    assert (server.interval["received"], server.interval["rejected"]) == (2, 1)

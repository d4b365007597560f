# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What was answered once is not computed again, and belongs to what was asked."""

from copy import copy

import jax
import numpy as np
import pytest
from trials import COUNTS, Trial, clock

from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.server.settings import BelowQuorum
from loopback import EXPERIMENT

_ = clock


class Counted(Trial):
    """A federation that counts what nodes compute, and keeps what they are asked."""

    def __init__(self, *arguments, **more):
        self.computed, self.asked = [], []
        super().__init__(*arguments, **more)
        send = self.transport.send

        def recording(outgoing):
            self.asked += outgoing.values()
            send(outgoing)

        self.transport.send = recording  # pyright: ignore

    def node(self, client):
        node = super().node(client)
        permissions = node.permissions()

        def counting(terms):
            executor = copy(permissions.executor(terms))  # shared with other trials
            enroll, train = executor.enroll, executor.update

            def enrolling(params):
                self.computed.append(("enroll", client))
                return enroll(params)

            def training(down, state):
                self.computed.append((int(down.round), client))
                return train(down, state)

            executor.enroll, executor.update = enrolling, training
            return executor

        own = permissions._replace(executor=counting)
        node.permissions = lambda: own
        return node

    def message(self, kind: str, round: int, client: int) -> bytes:
        found = [
            data
            for data in self.asked
            if (head := messages.decode(data)).kind == kind
            and (head.round, head.client) == (round, client)
        ]
        return found[-1]


def test_a_message_that_comes_again_is_not_computed_again(tmp_path):
    trial = Counted(tmp_path, "scaffold", rounds=2, every=2)
    trial.run()
    done = len(trial.computed)
    assert done == len(COUNTS) * 3
    data, node = trial.message("round", 1, 1), trial.node(1)
    first, again = node.reply(data), node.reply(data)
    assert first == again and len(trial.computed) == done
    # Damaged or lost, it is computed again, and is the same.
    place = tmp_path / "node1" / EXPERIMENT
    path = place / "reply-1"
    path.write_bytes(path.read_bytes()[:-1])
    other = messages.decode(node.reply(data))
    assert len(trial.computed) == done + 1
    for name, array in messages.decode(first).arrays.items():
        np.testing.assert_array_equal(other.arrays[name], array)


def test_after_another_history_of_its_state_a_round_is_computed_again(tmp_path):
    trial = Counted(tmp_path, "scaffold", rounds=2, every=2)
    trial.run()
    data, node, done = trial.message("round", 1, 1), trial.node(1), len(trial.computed)
    place = tmp_path / "node1" / EXPERIMENT
    template = node.permissions().executor({}).state
    state = states.read_state(place, 0, template)
    states.write_state(place, 0, jax.tree.map(lambda leaf: leaf + 1, state), "other")
    reply = messages.decode(node.reply(data))
    assert (reply.kind, len(trial.computed)) == ("round", done + 1)


def test_enrollment_goes_on_with_the_replies_when_one_was_silent(tmp_path):
    trial = Counted(tmp_path, "scaffold", rounds=1, every=1)
    server = trial.server()
    asked = np.arange(len(COUNTS))
    missing = trial.transport.nodes.pop(1002)
    server._enroll(asked)
    assert sorted(trial.computed) == [("enroll", c) for c in (0, 1, 3)]
    server.bases[:] = messages.UNKNOWN
    trial.transport.nodes[1002] = missing
    replies = server._enroll(asked)
    assert sorted(replies.accepted) == [0, 1, 2, 3]
    assert sorted(trial.computed) == [("enroll", c) for c in range(4)]


def test_a_reply_to_another_message_of_the_same_round_is_a_stray(tmp_path):
    """As from the time before a server went back to an older checkpoint."""
    trial = Counted(tmp_path, "fedavg", rounds=2, every=2, quorum=1.0)
    trial.run(rounds=1)
    (before,) = {trial.transport.nodes[1001].reply(trial.message("round", 0, 1))}
    again = Trial(tmp_path / "again", "fedavg", rounds=1, every=1)
    again.params = jax.tree.map(lambda leaf: leaf + 1, again.params)
    again.transport.spoil = lambda at, data: (
        [before] if at == 1001 and messages.decode(data).kind == "round" else [data]
    )
    server = again.server()
    with pytest.raises(BelowQuorum, match="client 1 silent"):
        again.complete(server)
    assert "round of round 0, late or replayed" in str(again.events("stray"))

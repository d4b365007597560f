# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limits on what else a client sends: gradients in a round, models at enrollment."""

import jax
import pytest

import fedblend as fb
from fedblend.deploy.server.settings import BelowQuorum
from loopback import LoopbackFederation
from problems import classes

COUNTS = (3, 1, 4)


def _longer(algorithm, part: str):
    """An algorithm whose client 1 sends a part of its reply a million times as long."""

    def longer(tree, shard):
        by = 1.0 + (shard.id == 1) * 1e6
        return jax.tree.map(lambda leaf: leaf * by, tree)

    def enroll(params, shard, key):
        join, state = algorithm.enroll(params, shard, key)
        return (longer(join, shard) if part == "join" else join), state

    def client(down, state, shard, key):
        up, after = algorithm.client(down, state, shard, key)
        extra = longer(up.extra, shard) if part == "extra" else up.extra
        return up._replace(extra=extra), after

    return algorithm._replace(enroll=enroll, client=client)


def _loopback(algorithm, folder, longest_rest):
    on = classes(COUNTS)
    return LoopbackFederation(
        algorithm(on),
        on.params,
        on.federated_data,
        jax.random.key(0),
        folder,
        rounds=1,
        cohort=len(COUNTS),
        quorum=0.5,
        longest_update=1e3,
        longest_rest=longest_rest,
    )


@pytest.mark.parametrize(("longest_rest", "counted"), [(None, 3), (1e3, 2)])
def test_extras_of_a_round_may_be_too_long(longest_rest, counted, tmp_path):
    def longer(on):
        return _longer(
            fb.scaffold(on.loss, fb.Work(0.1, steps=2, batch_size=2)), "extra"
        )

    loopback = _loopback(longer, tmp_path, longest_rest)
    server = loopback.server()
    while server.round < 1:
        server.step()
    assert (server.interval["received"], server.interval["rejected"]) == (
        counted,
        3 - counted,
    )


def test_what_is_sent_at_enrollment_may_be_too_long(tmp_path):
    def longer(on):
        flix = fb.flix(
            on.loss,
            lambda mixed: fb.fedavg(mixed, fb.Work(0.1, steps=1, batch_size=None)),
            alpha=0.5,
            local=fb.solvers.gradient_descent(on.loss, 10.0, most=5),
        )
        return _longer(flix, "join")

    with pytest.raises(
        BelowQuorum, match=r"client 1 rejected: its norm is .* at most 1000"
    ):
        _loopback(longer, tmp_path, 1e3).server().step()

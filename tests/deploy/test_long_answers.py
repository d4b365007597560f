# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What else a client says is bounded, too: gradients in a round, models at first."""

import jax
import pytest

import fedblend as fb
from fedblend.deploy.server.settings import BelowQuorum
from loopback import Wired
from problems import classes

COUNTS = (3, 1, 4)


def _longer(algorithm, part: str):
    """An algorithm whose client 1 says a part of its answer a million times as loud."""

    def louder(tree, shard):
        by = 1.0 + (shard.id == 1) * 1e6
        return jax.tree.map(lambda leaf: leaf * by, tree)

    def enroll(params, shard, key):
        join, state = algorithm.enroll(params, shard, key)
        return (louder(join, shard) if part == "join" else join), state

    def client(down, state, shard, key):
        up, after = algorithm.client(down, state, shard, key)
        extra = louder(up.extra, shard) if part == "extra" else up.extra
        return up._replace(extra=extra), after

    return algorithm._replace(enroll=enroll, client=client)


def _wired(algorithm, folder, longest_rest):
    on = classes(COUNTS)
    return Wired(
        algorithm(on),
        on.params,
        on.federated_data,
        jax.random.key(0),
        folder,
        rounds=1,
        cohort=len(COUNTS),
        quorum=0.5,
        longest=1e3,
        longest_rest=longest_rest,
    )


@pytest.mark.parametrize(("longest_rest", "heard"), [(None, 3), (1e3, 2)])
def test_what_else_is_said_in_a_round_may_be_too_long(longest_rest, heard, tmp_path):
    def louder(on):
        return _longer(
            fb.scaffold(on.loss, fb.Work(0.1, steps=2, batch_size=2)), "extra"
        )

    wired = _wired(louder, tmp_path, longest_rest)
    server = wired.server()
    while server.round < 1:
        server.step()
    assert (server.news.received, server.news.rejected) == (heard, 3 - heard)


def test_what_is_said_first_may_be_too_long(tmp_path):
    def louder(on):
        flix = fb.flix(
            on.loss,
            lambda mixed: fb.fedavg(mixed, fb.Work(0.1, steps=1, batch_size=None)),
            alpha=0.5,
            local=fb.solvers.gradient_descent(on.loss, 10.0, most=5),
        )
        return _longer(flix, "join")

    with pytest.raises(BelowQuorum, match=r"client 1 rejected: it is .* at most 1000"):
        _wired(louder, tmp_path, 1e3).server().step()

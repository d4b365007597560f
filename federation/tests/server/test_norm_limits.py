# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limits on what a client sends: updates, gradients, models, numbers of rows."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend_federation.server.aggregation import NormHistory
from fedblend_federation.server.checkpoint import ServerCheckpoint
from fedblend_federation.server.coordinator import Coordinator
from fedblend_federation.server.settings import BelowQuorum
from fedblend_federation.transport import Rejected
from loopback import LoopbackFederation
from problems import classes

COUNTS = (3, 1, 4)


def _longer(algorithm, part: str, times: float = 1e6):
    """An algorithm whose client 1 sends a part of its reply so many times as long."""

    def longer(tree, shard):
        by = 1.0 + (shard.id == 1) * times
        return jax.tree.map(lambda leaf: leaf * by, tree)

    def enroll(params, shard, key):
        join, state = algorithm.enroll(params, shard, key)
        return (longer(join, shard) if part == "join" else join), state

    def client(down, state, shard, key):
        up, after = algorithm.client(down, state, shard, key)
        extra = longer(up.extra, shard) if part == "extra" else up.extra
        delta = longer(up.delta, shard) if part == "delta" else up.delta
        return up._replace(extra=extra, delta=delta), after

    return algorithm._replace(enroll=enroll, client=client)


def _loopback(algorithm, folder, longest_rest=None, norm_ratio=None):
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
        norm_ratio=norm_ratio,
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


WORK = fb.Work(0.1, steps=2, batch_size=2)


@pytest.mark.parametrize("part", ["delta", "extra", "join"])
def test_what_is_a_million_times_as_long_as_usual_does_not_count(part, tmp_path):
    def longer(on):
        if part == "join":
            return _longer(
                fb.flix(
                    on.loss,
                    lambda mixed: fb.fedavg(mixed, WORK),
                    alpha=0.5,
                    local=fb.solvers.gradient_descent(on.loss, 10.0, most=5),
                ),
                part,
            )
        return _longer(fb.scaffold(on.loss, WORK), part)

    loopback = _loopback(longer, tmp_path, norm_ratio=100.0)
    loopback.rules = loopback.rules._replace(longest_update=None)
    server = loopback.server()
    if part == "join":
        with pytest.raises(BelowQuorum, match=r"client 1 rejected: .* 100 times the"):
            server.step()
        return
    while server.round < 1:
        server.step()
    counts = server.interval["received"], server.interval["rejected"]
    assert counts == (2, 1)


def test_the_limit_follows_the_norms_that_counted():
    history = NormHistory(10.0)
    assert history.settle({0: (1.0,), 1: (2.0,), 2: (1e30,)}).keys() == {2}
    assert history.norms == [(1.0,), (2.0,)]
    assert history.settle({0: (0.0,), 1: (9.0,), 2: (5.0,)}) == {}
    history.check((19.0,))
    with pytest.raises(Rejected, match=r"21, more than 10 times the median 2 "):
        history.check((21.0,))
    assert NormHistory(None).settle({0: (1.0,), 1: (1e30,)}) == {}


def test_the_norms_that_counted_outlive_the_server(tmp_path):
    loopback = _loopback(lambda on: fb.fedavg(on.loss, WORK), tmp_path / "nodes")
    first, second = loopback.server(), loopback.server()
    checkpoint = ServerCheckpoint(tmp_path / "server")
    while first.round < 1:
        first.step()
    checkpoint.save(first, {})
    saved = checkpoint.read()
    checkpoint.close()
    assert saved is not None
    saved.restore(second)
    assert second.norm_history.norms == first.norm_history.norms
    assert len(first.norm_history.norms) == 3


def test_a_claim_of_many_rows_makes_no_dictator(tmp_path):
    loopback = _loopback(lambda on: fb.fedavg(on.loss, WORK), tmp_path)
    server = loopback.server()
    counts = {"train": np.array([30, 2**31 - 1, 40])}
    setup = server.setup._replace(counts=counts)
    assert Coordinator(setup, server.peers, server.rules).weights.tolist() == [
        30,
        120,
        40,
    ]
    assert ("weight limited", {"client": 1, "rows": 2**31 - 1, "counted": 120}) in (
        loopback.notes
    )
    believing = server.rules._replace(weight_ratio=None)
    weights = Coordinator(setup, server.peers, believing).weights
    assert weights.tolist() == counts["train"].tolist()


def _tenth(folder, times: float, how=fb.fedavg, **rules):
    """The length of a round's step, and notes; one of ten sends a longer update."""
    on = classes((4,) * 10)
    loopback = LoopbackFederation(
        _longer(how(on.loss, WORK), "delta", times),
        on.params,
        on.federated_data,
        jax.random.key(0),
        folder,
        rounds=1,
        cohort=10,
        **rules,
    )
    server = loopback.server()
    while server.round < 1:
        server.step()
    moves = jax.tree.map(lambda new, old: new - old, server.shared, on.params)
    length = float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(moves))))
    return length, [fields for event, fields in loopback.notes if event == "clipped"]


def test_one_of_ten_is_clipped_and_named(tmp_path):
    honest, _ = _tenth(tmp_path / "honest", 0.0, clip_ratio=3.0)
    alone, unseen = _tenth(tmp_path / "alone", 80.0)
    clipped, noted = _tenth(tmp_path / "clipped", 80.0, clip_ratio=3.0)
    assert alone > 5 * honest and not unseen
    assert clipped < 1.5 * honest
    (about,) = noted
    assert about["client"] == 1 and about["norm"] > 20 * about["counted"]


def test_what_memories_must_agree_on_is_not_clipped(tmp_path):
    plain, _ = _tenth(tmp_path / "plain", 10.0, fb.scaffold)
    same, noted = _tenth(tmp_path / "same", 10.0, fb.scaffold, clip_ratio=3.0)
    assert plain == same and not noted


def test_the_bound_follows_the_newest_norms():
    history = NormHistory(None, clip=3.0)
    first = {0: (1.0,), 1: (9.0,)}
    assert not history.settle(first) and not history.bounds(first)  # too few to tell
    second = {0: (1.0,), 1: (4.0,), 2: (3.0,)}
    assert not history.settle(second) and history.bounds(second) == {}
    many = {client: (0.1,) for client in range(11)} | {11: (1.0,)}
    history.settle(many)
    assert history.bounds(many) == {11: pytest.approx(0.3)}

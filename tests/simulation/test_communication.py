# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who sent and received how many bits, by hand, and what a client computes."""

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
import problems
from fedblend.core import Wire
from fedblend.simulation.aggregators import DROPPED, PADDING, RECEIVED, REJECTED
from fedblend.simulation.communication import CommunicationLog, Sizes
from fedblend.simulation.sampling import cohorts

on = problems.quadratics()
MODEL = 3 * 32
"""Bits of the three float32 parameters."""


def test_a_block_by_hand():
    ledger = CommunicationLog(4, Sizes(up=10, down=100, join=1, params=1000))
    ids = np.array([[0, 1, 2], [1, 3, 0]])
    status = np.array([[RECEIVED, DROPPED, REJECTED], [RECEIVED, RECEIVED, PADDING]])
    assert ledger.enter(ids, status, None, None) == (3, 1, 1)
    # Client 0: one round. 1: dropped once, heard once. 2: rejected, but it sent.
    assert ledger.up.tolist() == [11, 11, 11, 11]
    assert ledger.down.tolist() == [1100, 1200, 1100, 1100]
    assert ledger.enter(ids, status, None, None) == (3, 1, 1)
    assert ledger.up.tolist() == [21, 21, 21, 21]


def test_ragged_parts_count_where_they_were_sent():
    ledger = CommunicationLog(3, Sizes(up=10, down=0, join=0, params=0))
    ids, status = np.array([[0, 1, 2]]), np.array([[RECEIVED, DROPPED, PADDING]])
    ledger.enter(ids, status, np.array([[5, 6, 7]]), np.array([[50, 60, 70]]))
    assert ledger.up.tolist() == [15, 0, 0]
    assert ledger.down.tolist() == [50, 60, 0]


def test_totals_do_not_overflow():
    ledger = CommunicationLog(1, Sizes(up=2**40, down=2**40, join=0, params=0))
    ids, status = np.zeros((64, 1), int), np.full((64, 1), RECEIVED)
    ledger.enter(ids, status, np.full((64, 1), 2**31 - 1, np.int32), None)
    assert int(ledger.up.sum()) == 64 * (2**40 + 2**31 - 1)


def test_a_snapshot_takes_the_books_back():
    sizes = Sizes(1, 2, 3, 4)
    ledger, other = CommunicationLog(2, sizes), CommunicationLog(2, sizes)
    ledger.join(np.array([1]))
    other.restore(ledger.snapshot())
    other.join(np.array([1]))
    assert other.up.tolist() == [0, 3]
    assert other.down.tolist() == [0, 4]


def run(algorithm, rounds=4, cohort: int | fb.Cohort = 3, **settings):
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(1),
        rounds=rounds,
        cohort=cohort,
        **settings,
    ).complete()


def appearances(done) -> np.ndarray:
    ids = cohorts(done.key, range(done.rounds), 7, done.cohort)
    return np.bincount(ids.ravel(), minlength=7)


def test_fedavg_sends_the_model_both_ways():
    done = run(fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None)), chunk=2)
    np.testing.assert_array_equal(done.bits().up, MODEL * appearances(done))
    np.testing.assert_array_equal(done.bits().down, MODEL * appearances(done))
    bits = done.summary()["bits"]
    assert bits["up"] == bits["down"] == MODEL * 12
    assert bits["last_broadcast"] == MODEL * 7


def test_scaffold_sends_twice_as_much_and_the_first_model_once():
    done = run(fb.scaffold(on.loss, fb.Work(0.1, steps=1, batch_size=None)))
    times = appearances(done)
    np.testing.assert_array_equal(done.bits().up, 2 * MODEL * times)
    joined = MODEL * (times > 0)
    np.testing.assert_array_equal(done.bits().down, 2 * MODEL * times + joined)


def test_local_only_sends_nothing():
    done = run(fb.local_only(on.loss, fb.Work(0.1, steps=1, batch_size=None)))
    assert done.summary()["bits"]["up"] == done.summary()["bits"]["down"] == 0
    assert done.summary()["bits"]["last_broadcast"] == 0


def test_half_precision_counts_half():
    params = on.params.astype(jnp.bfloat16)
    algorithm = fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None))
    done = fb.simulate(
        algorithm, params, on.federated_data, jax.random.key(0), rounds=1
    )
    assert done.complete().summary()["bits"]["up"] == 7 * MODEL // 2


def test_a_dropped_client_receives_and_sends_nothing():
    done = run(
        fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None)),
        cohort=fb.Cohort(3, dropout=0.5),
    )
    heard = sum(record.received for record in done.records)
    assert 0 < heard < 12
    bits = done.summary()["bits"]
    assert (bits["up"], bits["down"]) == (MODEL * heard, MODEL * 12)


def ragged_fedavg():
    """FedAvg that also sends id + 1 numbers of five, and is told as many bytes."""
    inner = fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None))

    def client(down, client, shard, key):
        up, client = inner.client(down._replace(extra={}), client, shard, key)
        return up._replace(extra={"own": fb.Ragged(jnp.ones(9), shard.id + 1)}), client

    def ask(client, shard):
        return shard.id

    def tell(down, request):
        buffer = jnp.zeros(20, jnp.uint8)
        return down._replace(extra={"own": fb.Ragged(buffer, 2 * request)})

    def decode(up, sender):
        return up._replace(extra={})

    return inner._replace(client=client, wire=Wire(ask, tell, decode))


def test_of_a_ragged_message_the_used_part_counts():
    done, ids = run(ragged_fedavg(), chunk=2), np.arange(7)
    times = appearances(done)
    np.testing.assert_array_equal(done.bits().up, times * (MODEL + 32 * (ids + 1)))
    np.testing.assert_array_equal(done.bits().down, times * (MODEL + 8 * 2 * ids))
    plain = run(fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None)), chunk=2)
    np.testing.assert_array_equal(done.shared, plain.shared)


def test_ragged_messages_of_lanes_are_counted_apart():
    keys = jnp.stack([jax.random.key(1), jax.random.key(2)])
    swept = fb.simulate(
        ragged_fedavg(), on.params, on.federated_data, keys, rounds=4, cohort=3
    ).complete()
    done = run(ragged_fedavg())
    np.testing.assert_array_equal(swept.bits().up, done.bits().up)
    assert not np.array_equal(swept.bits().up, swept.bits(1).up)

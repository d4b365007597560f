# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs that only show where several arguments meet: one clear line each."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.config.config import check
from fedblend.errors import InputError
from fedblend.transforms import central_loss
from tiny_config import TINY

LOSS = fb.datasets.quadratic_loss
FEDERATION, _ = fb.datasets.quadratics(clients=3, dim=2)
WORK = fb.Work(0.1, steps=1, batch_size=None)
PLAIN = fb.fedavg(LOSS, WORK)
OWN = fb.shard_of(FEDERATION.train.rows(0))
ROWS = np.zeros((4, 2)), np.arange(4)
CENTRAL = central_loss.row_loss(LOSS)


def federated(partition: Any = ((0, 1), (2,)), rows: Any = ROWS, **more: Any):
    return fb.federate(rows, partition, **more)


def simulated(algorithm: Any = PLAIN, params: Any = None, **more: Any):
    start = jnp.zeros(2) if params is None else params
    key = jax.random.key(0)
    return fb.simulate(algorithm, start, FEDERATION, key, **{"rounds": 1, **more})


def locodl(**more: Any):
    rand = fb.compress.rand_k(1)
    return fb.locodl(LOSS, WORK, compressor=rand, clients=3, moved=0.1, **more)


def scafflix(rate: Any):
    return fb.scafflix(
        LOSS,
        fb.Work(rate, steps=2, batch_size=None),
        alpha=0.5,
        personal=fb.solvers.newton(LOSS),
        longer=True,
        smooth=1.0,
        convex=0.5,
    )


def with_loss(loss: Any):
    return simulated(fb.fedavg(loss, WORK))


def private(loss: Any):
    return with_loss(fb.transforms.row_noise(loss, clip=1.0, noise=1.0))


WRONG = {
    "federate: partition: row 1 is listed for client 0 and again for client 1; a row":
        lambda: federated([[0, 1], [1, 2]]),
    "federate: partition: row 3 is listed for client 1 and again for client 1; a row":
        lambda: federated([[0], [3, 3]]),
    "federate: partition: row 4 of client 1 is not in [0, 3], the rows there are":
        lambda: federated([[0], [3, 4]]),
    "federate: partition: row -1 of client 0 is not in [0, 3]":
        lambda: federated([[-1], [3]]),
    "federate: partition: [0.5] of client 0 is not a list of row numbers":
        lambda: federated([[0.5]]),
    "federate: partition: [True, False] of client 0 is not a list of row numbers":
        lambda: federated([np.array([True, False])]),
    "federate: partition: 0 of client 0 is not a list": lambda: federated([0, 1]),
    "federate: partition: 2 is not a list with": lambda: federated(2),
    "federate: partition: [] is not a list with": lambda: federated([]),
    "federate: rows: arrays of shapes (4, 2), (3,) is not a tree of arrays over all":
        lambda: federated(rows=(np.zeros((4, 2)), np.zeros(3))),
    "federate: names: ('a',) is not one name for each of the 2 clients":
        lambda: federated(names=["a"]),
    "federate: test_rows and test_partition need each other":
        lambda: federated(test_rows=ROWS),
    "federate: test_partition: row 9 of client 1 is not in [0, 3]":
        lambda: federated(test_rows=ROWS, test_partition=[[0], [9]]),
    "federate: test_partition: 1 is not of the 2 clients of partition":
        lambda: federated(test_rows=ROWS, test_partition=[[0]]),
    "central: this algorithm has no use for rows of the server":
        lambda: simulated(central=OWN),
    "central: 3 is not a Shard of the server's rows": lambda: simulated(central=3),
    "loss: fails on parameters [(3,)] and rows [(1, 2, 2), (1, 2)]: ValueError: ":
        lambda: simulated(params=jnp.zeros(3)),
    "loss: returns float32[] of parameters [(2,)] and rows [(1, 2, 2), (1, 2)], not":
        lambda: with_loss(lambda params, rows: params.sum()),
    "loss: returns float32[7] of": lambda: with_loss(
        lambda params, rows: params.sum() * jnp.ones(7)),
    "loss: fails on parameters [(2,)] and rows [(1, 2, 2), (1, 2)]: TypeError: ":
        lambda: with_loss(lambda params: params),
    "loss: returns int32[1] of": lambda: with_loss(
        lambda params, rows: rows[1][:, 0].astype(int)),
    "loss: returns tuple of": lambda: with_loss(lambda params, rows: (rows[1][:, 0],)),
    "loss: gets no 'Key' after parameters and rows; did you mean 'key'?":
        lambda: with_loss(lambda params, rows, Key: LOSS(params, rows)),
    "loss: returns float32[1, 1] of": lambda: private(
        lambda params, rows: LOSS(params, rows)[:, None]),
    "params: 'zeros' is not a tree of arrays of floats":
        lambda: simulated(params="zeros"),
    "params: [0, 0] is not a tree of arrays of floats":
        lambda: simulated(params=np.zeros(2, int)),
    "params: () is not a tree of arrays of floats": lambda: simulated(params=()),
    "splits: 'train' is not a list of names of splits":
        lambda: simulated(splits="train"),
    "local: 3 is not a Run of local_only": lambda: simulated(local=3),
    "over: 3 is not a tree of arrays": lambda: simulated(lambda rate: PLAIN, over=3),
    "over: [] is not a tree of arrays":
        lambda: simulated(lambda rate: PLAIN, over=jnp.zeros(0)),
    "algorithm: what it builds: None is not an Algorithm":
        lambda: simulated(lambda rate: None, over=jnp.ones(2)),
    'scafflix: longer: True is not False unless rate is "theory"':
        lambda: scafflix(0.1),
    "locodl: central: 1 is not a function": lambda: locodl(central=1),
    "locodl: weights: (0.3, 0.7) is not left out where there is no central loss":
        lambda: locodl(weights=(0.3, 0.7)),
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_it_is_refused_in_one_line(line):
    with pytest.raises(InputError, match=f"^{re.escape(line)}") as caught:
        WRONG[line]()
    assert "\n" not in str(caught.value)


def test_what_is_near_passes():
    """Shared test rows, rows that no client has, and central rows that are read."""
    found = federated(test_rows=ROWS, test_partition=[[0, 1], [0, 1]])
    assert found.test is not None and found.test.total == 4
    mixed = fb.transforms.mixed_fl(PLAIN, CENTRAL, how="parallel")
    assert simulated(mixed, central=OWN).rounds == 1
    locodl(central=CENTRAL, weights=(0.3, 0.7))
    scafflix("theory")


def tables(**algorithm: Any) -> dict[str, Any]:
    own = {"name": "locodl", "rate": "theory", "batch_size": "all", **algorithm}
    return TINY | {"algorithm": own, "model": {"name": "softmax", "l2": 0.1}}


def test_the_key_of_a_table_inside_the_algorithm_is_named():
    content = tables(steps="theory", compressor={"name": "rand_k", "k": 9})
    options: Any = check(content, "here").algorithm
    known = fb.theory.constants.quadratics(FEDERATION)
    with pytest.raises(InputError, match=r"^algorithm\.compressor\.k: 9 is not"):
        options.local_training(known, 5)


def test_longer_steps_need_the_rate_of_theory_in_a_configuration():
    own = {"name": "scafflix", "alpha": 0.5, "longer": True, "steps": 2}
    own["personal"] = {"solver": "newton"}
    check(tables(**own), "here")
    with pytest.raises(InputError, match=r"algorithm\.longer: True is not False"):
        check(tables(**own, rate=0.1), "here")


def test_a_summary_counts_all_rounds_and_answers():
    run = simulated(rounds=3, every=2).complete()
    found = run.summary()
    assert (found["round"], found["rounds"], found["received"]) == (3, 3, 9)

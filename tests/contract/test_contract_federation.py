# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every algorithm on nodes with disks, messages and a server comes to the simulator's
numbers: shared and personal models, states, bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import CASES, others_later

import fedblend as fb
from fedblend.simulation.serialize import build_tree, name_leaves, unpack
from fedblend.transforms.central_loss import row_loss
from loopback import EXPERIMENT, LoopbackFederation
from runs import CLIENTS, SETTINGS, close, cohort_of, problem, states, usual_run

ENCODED = ("compressed(fedavg)", "scafflix")
"""Messages of other kinds: encoded, with a drawn number of steps."""


@pytest.mark.parametrize("name", others_later(CASES, ENCODED))
def test_a_loopbackcomes_to_the_simulators_numbers(name, tmp_path):
    on, run = problem(name), usual_run(name)
    loopback = LoopbackFederation(
        CASES[name](on),
        on.params,
        on.federated_data,
        jax.random.key(0),
        tmp_path,
        rounds=SETTINGS["rounds"],
        cohort=cohort_of(name),
        every=SETTINGS["rounds"],
    )
    server = loopback.complete(loopback.server())
    close(jax.device_get((server.down, server.server)), _both_sides(run))
    for client, model in enumerate(loopback.personal(server)):
        close(model, name_leaves(run.personal(client)))
    for client, (base, state) in enumerate(zip(server.bases, states(run), strict=True)):
        place = tmp_path / f"node{client}" / EXPERIMENT / f"state-{base}"
        arrays, _ = unpack(place.read_bytes())
        close(build_tree(arrays, state), state)
    np.testing.assert_array_equal(server.ledger.up, run.bits().up)
    np.testing.assert_array_equal(server.ledger.down, run.bits().down)
    assert server.bases.shape == (CLIENTS,)


def _both_sides(run):
    return jax.device_get((run.down, run.server))


class Table(NamedTuple):
    """Parameters of which a client uses some rows."""

    rows: jax.Array
    all: jax.Array


def _table_loss(params: Table, examples):
    number, target = examples
    return ((params.rows[number] + params.all[None] - target) ** 2).sum(axis=1) / 2


def _numbers():
    draws = np.random.default_rng(0)
    number = draws.integers(0, 6, 12).astype(np.int32)
    return number, draws.normal(size=(12, 2)).astype(np.float32)


def _private(algorithm, federated_data):
    del federated_data
    return fb.transforms.dp_fedavg(
        algorithm, clip=0.05, noise=1.0, cohort=2, noise_from="seed"
    )


def _correlated(algorithm, federated_data):
    del federated_data
    options = {"noise": 1.0, "cohort": 2, "noise_from": "seed"}
    strategy = fb.theory.blt.Blt((0.75,), (0.6,))
    return fb.transforms.dp_blt(algorithm, clip=0.05, strategy=strategy, **options)


def _mixed(how):
    return lambda algorithm, federated_data: fb.transforms.mixed_fl(
        algorithm, row_loss(_table_loss), how=how
    )


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(_private, id="private"),
        pytest.param(_mixed("two_way"), id="two_way"),
        pytest.param(_correlated, id="by_tree", marks=pytest.mark.slow),
        pytest.param(_mixed("parallel"), id="parallel", marks=pytest.mark.slow),
        pytest.param(_mixed("one_way"), id="one_way", marks=pytest.mark.slow),
    ],
)
def test_noise_and_rows_of_the_server_are_the_simulators(wrap, tmp_path):
    federated_data = fb.federate(_numbers(), np.split(np.arange(12), [3, 4, 8]))
    params = Table(jnp.zeros((6, 2), jnp.float32), jnp.ones(2, jnp.float32))
    plain = fb.fedavg(_table_loss, fb.Work(0.1, steps=2, batch_size=2))
    algorithm, key = wrap(plain, federated_data), jax.random.key(3)
    without = (_private, _correlated)
    central = None if wrap in without else fb.shard_of(_numbers())
    what = (algorithm, params, federated_data, key)
    settings: dict[str, Any] = {"rounds": 3, "cohort": 2}
    run = fb.simulate(*what, **settings, chunk=1, central=central).complete()
    loopback = LoopbackFederation(*what, tmp_path, **settings, every=3, central=central)
    server = loopback.complete(loopback.server())
    close(jax.device_get((server.down, server.server)), _both_sides(run))
    for client, model in enumerate(loopback.personal(server)):
        close(model, name_leaves(run.personal(client)))
    np.testing.assert_array_equal(server.ledger.up, run.bits().up)
    np.testing.assert_array_equal(server.ledger.down, run.bits().down)

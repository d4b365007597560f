# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients deploy after a choice, as a run: measured, and written like any other.

Its clients are given their models and never train.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.core import Algorithm, PyTree, Up, from_params
from fedblend.errors import ConfigError
from fedblend.mixing import Blend, outputs
from fedblend.selection.average_arms import can_average
from fedblend.selection.choose import Choice
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import RunSpec, set_up


def deploy(found: Choice, spec: RunSpec) -> Run:
    """The models that clients deploy as a completed run, measured on test rows.

    Its rounds are those of an arm, its bits those of all arms and folds. The first arm
    is training alone, the last the shared model.

    Args:
        found: the choice.
        spec: of the runs of its arms.
    """
    shared, alone = found.arms[-1], found.arms[0].run
    models = map(found.personal, range(found.federated_data.clients))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *_alike(list(models)))
    tested = [] if found.test is None else ["test"]
    own = dataclasses.replace(
        spec,
        algorithm=_given(stacked),
        params=trees.take(shared.run.shared, shared.replica),
        federated_data=found.federated_data,
        rounds=0,
        every=1,
        splits=tested,
        measure=spec.measure if tested else {},
        measure_on=range(found.federated_data.clients),
        local=alone if tested else None,
    )
    run = set_up(own).complete()
    runs = {id(of): of for arm in found.arms for of in (arm.run, arm.crossed) if of}
    sent = [of.bits(at) for of in runs.values() for at in range(of.replicas or 1)]
    snapshot = run.snapshot()
    (log,) = snapshot["communication"]
    log |= {way: sum(getattr(bits, way) for bits in sent) for way in ("up", "down")}
    up, down = (int(log[way].sum()) for way in ("up", "down"))
    last = dataclasses.replace(
        run.records[-1], round=shared.run.round, bits_up=up, bits_down=down
    )
    run.restore(snapshot, shared.run.round, [last])
    return run


def _alike(models: list[PyTree]) -> list[PyTree]:
    """Models as trees of one kind: where some mix outputs, all do."""
    if any(isinstance(one, Blend) for one in models):
        models = [
            one if isinstance(one, Blend) else outputs(0.0, one, one) for one in models
        ]
    if not can_average(models):
        raise ConfigError(
            "algorithm.mix: gives clients models of different shapes, which one folder "
            'cannot hold; algorithm.mix="parameters" gives all the same'
        )
    return models


def _given(models: PyTree) -> Algorithm:
    """Clients that deploy these models, leaves [clients, ...], and never train."""
    return Algorithm(
        enroll=lambda params, shard, key: ((), trees.take(models, shard.id)),
        start=from_params,
        client=lambda down, client, shard, key: (Up(delta=None), client),
        server=lambda aggregate, down, server, central, key: (down, server),
        personal=lambda down, client, shard, key: client,
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local only: every client its own model, and silence."""

import jax
import numpy as np

import fedblend as fb
import problems

on = problems.classes()
run = fb.simulate(
    fb.local_only(on.loss, fb.Work(0.2, steps=2, batch_size=2)),
    on.params,
    on.federated_data,
    jax.random.key(0),
    rounds=3,
    cohort=3,
    measure={"loss": fb.metrics.mean_loss(on.loss)},
)


def test_the_shared_model_stays_and_nothing_is_said():
    run.complete()
    for now, before in zip(run.shared, on.params, strict=True):
        np.testing.assert_array_equal(now, before)
    assert not jax.tree.leaves((run.shapes.message.shared, run.shapes.up))


def test_there_is_no_shared_model_to_measure():
    measures = run.complete().records[-1].measures
    assert set(measures["train"]) == {"personal"}


def test_clients_that_never_took_part_are_where_they_began():
    run.complete()
    still = [np.array_equal(run.personal(i).weight, on.params.weight) for i in range(7)]
    joined = run._logs[0].joined
    assert still == (~joined).tolist()

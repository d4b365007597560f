# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is not finite is said, with the first round and the number of clients."""

from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.metrics import client_spread, make_metrics
from fedblend.simulation.result import Record, each_metric, not_finite, spreads

COUNTS = np.array([3, 2, 4, 0])
NAN, INF = float("nan"), float("inf")
FINE = [0.5, 0.7, 0.6, NAN]
"""The last client has no rows to be measured on."""


def record(round: int, rejected: int = 0, **measures) -> Record:
    tree = each_metric(
        {"test": {"personal": measures}},
        lambda split, name, values: client_spread(np.array(values), COUNTS, False),
    )
    return Record(round, 1, 0.0, 4 - rejected, 0, rejected, 0, 0, tree)


def said(*records: Record, shared: Any = 0.5, **measures) -> list[str]:
    last = {name: np.array(values) for name, values in measures.items()}
    measured = {"test": {"personal": last}}
    return not_finite(records, measured, {"test": COUNTS}, np.array(shared))


def test_nothing_is_said_of_a_run_that_is_fine():
    one_class = [NAN, 0.5, 0.6, NAN]
    fine: Any = {"loss": FINE, "auc": one_class}
    assert said(record(0, **fine), record(1, **fine), **fine) == []
    assert said(record(0), record(1)) == []


@pytest.mark.parametrize("broken", [NAN, INF])
def test_the_first_round_and_the_clients_are_named(broken):
    bad = [0.5, broken, broken, NAN]
    (line,) = said(
        record(0, loss=FINE), record(2, loss=bad), record(4, loss=bad), loss=bad
    )
    assert line == (
        "test loss of the personal models: not finite, first in round 2, at the end "
        "for 2 of 3 clients"
    )


def test_a_loss_that_never_was_finite_is_named_too():
    bad = [NAN] * 4
    (line,) = said(record(0, loss=bad), record(1, loss=bad), loss=bad)
    assert "first in round 0, at the end for 3 of 3 clients" in line


def test_a_measure_that_comes_and_goes_is_named():
    (line,) = said(
        record(0, auc=FINE), record(1, auc=[NAN] * 4), record(2, auc=FINE), auc=FINE
    )
    assert "test auc" in line
    assert "first in round 1, at the end for 0 of 3" in line


def test_answers_and_parameters_are_named():
    assert said(record(0), record(1), record(2, 3), record(3, 4)) == [
        "7 of 16 answers of clients were not finite and left out, the first in round 2"
    ]
    assert said(record(0), shared=[1, NAN, INF]) == [
        "2 of 3 parameters of the shared model are not finite"
    ]


def test_a_simulation_that_diverges_says_so():
    on = problems.quadratics()
    run = fb.simulate(
        fb.local_only(on.loss, fb.Work(1e20, steps=1, batch_size=None)),
        on.params,
        on.federated_data,
        jax.random.key(0),
        rounds=4,
        every=1,
        measure={"loss": fb.metrics.mean_loss(on.loss)},
    )
    (line,) = run.summary()["warnings"]
    assert line.startswith("train loss of the personal models: not finite, first in ro")
    assert line.endswith("at the end for 7 of 7 clients")


def test_metrics_stay_in_the_order_in_which_they_were_asked_for():
    """JAX sorts the keys of what it returns; the first metric is the main one."""
    metrics = make_metrics(dict.fromkeys(("mse", "mae", "loss"), lambda m, b: b.rows))
    sorted_by_jax = {name: np.ones(2) for name in sorted(metrics)}
    measured = {"test": {"personal": sorted_by_jax}}
    found = spreads(measured, {"test": np.ones(2)}, metrics)
    assert list(found["test"]["personal"]) == ["mse", "mae", "loss"]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that join after APFL's training."""

from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.apfl import new_client_runs, new_clients


def test_equation_17_is_fine_tuning_at_a_smaller_rate():
    this = new_client_runs.Joining(True, 0.5, 0)
    loss = this.loss
    work: dict[str, Any] = {"steps": 1, "batch_size": 20}
    run = fb.simulate(
        fb.fedavg(loss, fb.Work(0.1, **work)),
        this.model.init,
        this.seen,
        this.key,
        rounds=2,
    )
    down = run.complete().down

    def joined(alpha, rate):
        algorithm = fb.apfl(loss, fb.Work(rate, **work), alpha=alpha, learn="fixed")
        return fb.personalize(algorithm, down, this.unseen, this.key, visits=7)

    mixed, tuned = joined(0.5, 0.4).models, joined(0.0, 0.1).models
    for one, other in zip(*map(jax.tree.leaves, (mixed, tuned)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.slow
def test_new_clients_gain_from_their_rows(tmp_path):
    finding = new_clients.check(True, tmp_path)
    (found,) = finding.numbers["found"].values()
    curves = found["curves"]
    assert set(curves) == set(new_client_runs.LABELS)
    # The more weight the shared model has, the less of a step is left.
    losses = [curves[f"APFL, alpha {a}"]["train loss"][0][0] for a in (0.5, 0.75)]
    assert losses[0] < losses[1]
    assert set(finding.figures) == {"epochs"}

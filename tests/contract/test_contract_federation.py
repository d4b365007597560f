# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every algorithm on nodes with disks, letters and a server comes to the simulator's
numbers: shared and personal models, states, bits."""

import jax
import numpy as np
import pytest
from registry import CASES
from runs import CLIENTS, SETTINGS, close, cohort_of, problem, states, usual_run

from fedblend.runtime.wire import as_tree, named_leaves, unpack
from loopback import EXPERIMENT, Wired


@pytest.mark.parametrize("name", CASES)
def test_a_federation_comes_to_the_simulators_numbers(name, tmp_path):
    on, run = problem(), usual_run(name)
    wired = Wired(
        *(CASES[name](on), on.params, on.federation, jax.random.key(0), tmp_path),
        rounds=SETTINGS["rounds"],
        cohort=cohort_of(name),
        every=SETTINGS["rounds"],
    )
    server = wired.complete(wired.server())
    close(jax.device_get((server.down, server.server)), _both_sides(run))
    for client, model in enumerate(wired.personal(server)):
        close(model, named_leaves(run.personal(client)))
    for client, (base, state) in enumerate(zip(server.bases, states(run), strict=True)):
        place = tmp_path / f"node{client}" / EXPERIMENT / f"state-{base}"
        arrays, _ = unpack(place.read_bytes())
        close(as_tree(arrays, state), state)
    np.testing.assert_array_equal(server.ledger.up, run.ledgers[0].up)
    np.testing.assert_array_equal(server.ledger.down, run.ledgers[0].down)
    assert server.bases.shape == (CLIENTS,)


def _both_sides(run):
    return jax.device_get((run.down, run.server))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every algorithm and transform over a model with adapters of a frozen base.

Each run is compared with one whose loss has the merged weights written out; ``test_
contract_shapes`` has the whole product by shapes.
"""

import jax
import numpy as np
import pytest
from registry import CASES, formed

import problems
from fedblend import checkpoint, trees
from fedblend.losses import cross_entropy
from fedblend.simulation import compile
from runs import close, differ, new_run, outcome

NOW = ("apfl",)
"""Cases of the quick suite."""


@pytest.fixture(autouse=True)
def _all_constants_are_arguments(monkeypatch):
    """Also those of a small base."""
    monkeypatch.setattr(compile, "LARGE", 1)


def written_out():
    """The same problem, whose loss forms W + BA."""

    def apply(adapter, inputs):
        return problems.network(problems.merged(adapter), inputs)

    return problems.adapted()._replace(loss=cross_entropy(apply))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NOW else pytest.mark.slow)
        for name in CASES
        # Newton's systems are nearly singular over factors, and magnify rounding.
        if name != "hierarchical"
    ],
)
def test_a_run_over_adapters_is_that_over_merged_weights(name):
    runs = [
        new_run(name, on=formed(name, on), compile_anew=True).complete()
        for on in (problems.adapted(), written_out())
    ]
    found, expected = map(outcome, runs)
    assert differ(runs[0].down.shared, runs[0].params) or "local" in name
    close(found, expected)
    assert runs[0].records[-1].bits_up == runs[1].records[-1].bits_up


def test_bits_are_those_of_the_adapter():
    on = problems.adapted()
    run = new_run("fedavg", on=on, compile_anew=True).complete()
    entries = trees.size(on.params)
    assert entries == 2 * (2 + 4) + 2 * (4 + 3)
    assert run.records[-1].bits_up == run.rounds * run.cohort * 32 * entries
    assert run.records[-1].bits_down == run.rounds * run.cohort * 32 * entries


@pytest.mark.slow
def test_a_checkpoint_has_no_base_and_goes_on(tmp_path):
    on = problems.adapted()
    whole = new_run("apfl", on=on, compile_anew=True).complete()
    first = new_run("apfl", on=on, compile_anew=True)
    next(iter(first))
    file = tmp_path / "saved"
    checkpoint.save(file, first)
    base = problems.network_base()
    held = file.read_bytes()
    assert not any(np.asarray(leaf).tobytes() in held for leaf in base)
    again = new_run("apfl", on=on, compile_anew=True)
    checkpoint.restore(file, again)
    jax.tree.map(
        np.testing.assert_array_equal, outcome(again.complete()), outcome(whole)
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters on real processes: a link and three nodes, each with the base on its disk.

``pytest -n 0 -m slow -s federation/tests/test_bases_on_flower.py``; a minute on two
idle cores.
"""

import os
import shutil

import jax
import numpy as np
import pytest
from configured import (
    POLICY,
    federated,
    largest_gap,
    newest,
    simulated,
    simulation,
    write_rows,
)
from safetensors.numpy import save_file

import fedblend as fb
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.errors import RunError
from fedblend.trees import leaves_by_path
from fedblend_federation.ops import experiments
from fedblend_federation.ops.local_cluster import local_cluster, processes_of

pytestmark = pytest.mark.slow
NAMES = ("alice", "bob", "carol")
DEADLINE = 900.0
"""Seconds: the machine may be busy."""
MODEL = fb.models.mlp(6, 3, hidden=(400, 300))
METHOD = (
    '[model]\nname = "mlp"\nhidden = [400, 300]\n'
    '[adapt]\nrank = 2\nbase = "{base}"\n'
    '[algorithm]\nname = "apfl"\nalpha = 0.5\nmix = "products"\n'
    "rate = 0.1\nsteps = 3\nbatch_size = 8\n"
    "[run]\nrounds = 3\nevery = 3\nchunk = 1\nseed = 5\n[measure]\nlocal = false\n"
)


def write_base(file, seed):
    base = MODEL.init(jax.random.key(seed))
    arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_path(base).items()}
    save_file(arrays, file)
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "own.safetensors", 7)


@pytest.fixture(scope="module")
def federation(place, base, tmp_path_factory):
    rows = {
        name: dict(np.load(place / f"rows{client}.npz"))
        for client, name in enumerate(NAMES)
    }
    folder = tmp_path_factory.mktemp("flower") / "federation"
    os.nice(5)
    with local_cluster(folder, rows, policy=POLICY) as made:
        for name in NAMES:
            shutil.copy(base, made.home(name) / "bases")
        yield made
    assert processes_of(folder) == []


def run(federation, out, how, deadline=DEADLINE):
    config = check(toml.parse(federated(how, deadline), "test"), "test")
    experiments.open_folder(out, config, federation.settings, resume=False)
    experiments.run_experiment(federation.settings, out)


def test_adapters_come_to_the_simulators_numbers(federation, place, base, tmp_path):
    """They are also a small part of the base, on the wire and on the nodes' disks."""
    how, out = METHOD.format(base=base), tmp_path / "out"
    run(federation, out, how)
    homes = [federation.home(name) for name in NAMES]
    there = simulation(simulated(how, place))
    # Programs of server, nodes and simulator round differently; see test_on_flower.
    assert largest_gap(out, homes, there) <= 1e-6
    size, sent = base.stat().st_size, there.message_bits.up / 8
    kept = newest(homes[0]).stat().st_size
    print(f"base {size} bytes, an update {sent:.0f}, a node's own adapter {kept}")
    assert max(sent, kept) < size / 20


def test_nodes_without_the_base_say_so(federation, tmp_path):
    """A minute is the time in which nodes may still join."""
    other = write_base(tmp_path / "other.safetensors", 8)
    with pytest.raises(RunError) as failed:
        run(federation, tmp_path / "out", METHOD.format(base=other), 60.0)
    assert "adapt.base: this node has no base with the sha256" in str(failed.value)

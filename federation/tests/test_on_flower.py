# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Real Flower on loopback: a link and three nodes, up once, come to the simulator's
numbers in one experiment after the other.

An experiment takes half a minute on two idle cores, so choose some with ``-k``:
``pytest -n 0 -m slow federation/tests/test_on_flower.py -k "apfl or diana"``.

With the compiler's own settings, which users have, numbers are equal to the bit::

    JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS=--xla_cpu_use_fusion_emitters=true \\
        pytest -n 0 -m slow federation/tests/test_on_flower.py -k scafflix

Those of ``conftest.py`` compile faster. They join a product and a sum into one rounding
or not, depending on the rest of the program: the simulator has all of a round in one
program, nodes and server have one each.
"""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from configured import (
    CASES,
    CLIENTS,
    POLICY,
    federated,
    largest_gap,
    method,
    simulated,
    simulation,
    write_rows,
)

import example_arguments as examples
from fedblend.config import toml
from fedblend.config.config import check
from fedblend_federation.ops import experiments
from fedblend_federation.ops.local_cluster import local_cluster, processes_of
from fedblend_federation.ops.registration import members

pytestmark = pytest.mark.slow
NAMES = ("alice", "bob", "carol")
DEADLINE = 900.0
"""Seconds: the machine may be busy."""
OPTIMIZED = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
TOLERANCE = 0.0 if OPTIMIZED else 1e-6
"""A dozen roundings of float32, where programs round differently; see above."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def federation(place, tmp_path_factory):
    """A link and three nodes; afterwards nothing is left of them."""
    rows = {
        name: dict(np.load(place / f"rows{client}.npz"))
        for client, name in enumerate(NAMES)
    }
    folder = tmp_path_factory.mktemp("flower") / "federation"
    os.nice(5)
    with local_cluster(folder, rows, policy=POLICY) as made:
        yield made
    assert processes_of(folder) == []


def test_every_algorithm_has_a_case():
    assert {*examples.DISTINCT} - {*examples.ON_ADAPTERS} <= set(CASES)


def test_all_nodes_are_there(federation):
    found = members(federation.settings)
    assert [(one.name, one.clients) for one in found] == [
        (name, (client,)) for client, name in enumerate(NAMES)
    ]
    assert {one.status for one in found} == {"online"}


def open_ports(numbers: list[int]) -> list[str]:
    """The ports at which these processes listen."""
    own = set()
    for number in numbers:
        for file in Path(f"/proc/{number}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            waits = state == "0A" or table.startswith("udp")
            found += [local] if waits and f"socket:[{inode}]" in own else []
    return found


def test_nodes_open_no_port(federation):
    """Whoever shares a machine with a node finds nothing to connect to."""
    for name in NAMES:
        numbers = processes_of(federation.home(name))
        assert numbers and open_ports(numbers) == []
    link = processes_of(federation.folder / "server")
    assert len(open_ports(link)) == 1  # the same look finds the link's


def gap_to_the_simulation(how: str, federation, place, out) -> float:
    """Of what an experiment on the nodes comes to."""
    how += "[measure]\nlocal = false\n"
    config = check(toml.parse(federated(how, DEADLINE), "test"), "test")
    experiments.open_folder(out, config, federation.settings, resume=False)
    experiments.run_experiment(federation.settings, out)
    homes = [federation.folder / "nodes" / name for name in NAMES[:CLIENTS]]
    return largest_gap(out, homes, simulation(simulated(how, place)))


@pytest.mark.parametrize("name", CASES)
def test_flower_comes_to_the_simulators_numbers(name, federation, place, tmp_path):
    how = method(name, place, rounds=5)
    gap = gap_to_the_simulation(how, federation, place, tmp_path / "out")
    print(f"{name}: {'equal to the bit' if gap == 0 else f'within {gap:.1e}'}")
    assert gap <= TOLERANCE


def test_flix_with_its_own_rate_comes_to_them(federation, place, tmp_path):
    """A linear model: nodes describe their constants of smoothness."""
    how = (
        '[model]\nname = "softmax"\nl2 = 0.05\n'
        '[algorithm]\nname = "flix"\nalpha = [0.3, 0.5, 0.9]\nrate = "theory"\n'
        'steps = 1\nbatch_size = "all"\n'
        'personal = { solver = "gradient_descent", tolerance = 1e-3, most = 50 }\n'
        "[run]\nrounds = 5\nevery = 5\nchunk = 1\nseed = 5\n"
    )
    gap = gap_to_the_simulation(how, federation, place, tmp_path / "out")
    print(f"flix, linear: within {gap:.1e}")
    assert gap <= TOLERANCE

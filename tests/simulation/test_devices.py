# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The same bits on any number of devices. Processes of their own have eight of them."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from fedblend import cpu_devices
from fedblend.errors import InputError, UserError
from fedblend.simulation import aggregators, devices
from fedblend.simulation.devices import Cut, chunk_size

CASES = ("fedavg", "scaffold", "apfl", "flix_diana", "two_way")
FEW = ("scaffold", "flix_diana", "two_way")
"""States, messages with memories, a loss at the server: the others have less."""
SCRIPT = Path(__file__).with_name("devices_alike.py")


def begin(*arguments: str, **environment: str) -> subprocess.Popen:
    """The script in a process with eight devices."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "FEDBLEND_DEVICES": "8", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests_of(process: subprocess.Popen) -> dict[str, list[str]]:
    """What the script prints, by case."""
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-2000:]
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('["')]
    return {name: found for name, *found in lines}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """The digests of cases on one and on eight devices, and of one that stopped."""
    folder = str(tmp_path_factory.mktemp("interrupted"))
    return digests_of(begin(",".join(FEW), "1,8", "scaffold", "8,2", folder))


def test_one_and_eight_devices_give_the_same_bits(found):
    assert list(found) == [*FEW, "interrupted"]
    for name in FEW:
        one, eight = found[name]
        assert one == eight, name


def test_a_run_interrupted_on_eight_devices_goes_on_with_two(found):
    eight, two = found["interrupted"]
    assert eight == two == found["scaffold"][0]


def test_a_simulation_that_several_processes_share_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="simulate: runs in one process, and JAX has"):
        devices.usable_devices(None)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--xla_cpu_use_fusion_emitters=true"])
def test_any_number_of_devices_gives_the_same_bits(options):
    """With the quick compilation of the tests, and as users compile."""
    usual = {"XLA_FLAGS": options, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    process = begin(",".join(CASES), "1,2,4,8", **usual if options else {})
    for name, four in digests_of(process).items():
        assert len(four) == 4
        assert len(set(four)) == 1, name


@pytest.mark.parametrize("pieces", range(1, 20))
def test_groups_are_even_and_a_power_of_two(pieces):
    edges = aggregators.group_edges(pieces)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, pieces)
    assert len(sizes) in (1, 2, 4, 8)
    assert len(sizes) >= min(pieces, 8)
    assert sizes.max() - sizes.min() <= 1


def test_the_tree_adds_neighbors_first():
    """Beside 1 the small numbers vanish one by one, and two of them do not."""
    small = np.float32(2.0**-24)
    sums = np.array([small, small, 1, 0], np.float32)
    assert float(aggregators.tree_sum(sums)) == 1 + 2.0**-23
    assert float(aggregators.tree_sum(sums[[2, 0, 1, 3]])) == 1


@pytest.mark.parametrize(("clients", "chunk"), [(19, 2), (5, 1), (7, 7), (100, 5)])
def test_every_client_has_one_place(clients, chunk):
    cut = Cut(clients, chunk)
    arranged = cut.arrange(np.arange(clients), -1)
    assert arranged.shape == (cut.groups, cut.turns.max(), chunk)
    flat = arranged.reshape(-1)
    np.testing.assert_array_equal(flat[flat >= 0], np.arange(clients))
    reached = np.arange(cut.turns.max()) < cut.turns[:, None]
    np.testing.assert_array_equal(reached, (arranged >= 0).any(axis=-1))


def test_chunks_on_a_cpu_divide_evenly_and_do_not_depend_on_devices():
    """100 clients of a softmax; of a perceptron, of whom two fit; few; one."""
    cases = {(100, 7850): 5, (100, 199210): 2, (10, 7850): 2, (1, 10): 1}
    for (cohort, entries), chunk in cases.items():
        for devices_ in (1, 2, 8):
            assert chunk_size(None, cohort, entries, devices_) == chunk


def test_replicas_come_first_on_a_mesh():
    eight = [object()] * 8
    shapes = {
        (None, 8): (1, 8),
        (3, 8): (1, 8),
        (2, 8): (2, 4),
        (16, 8): (8, 1),
        (None, 2): (1, 2),
    }
    for (replicas, groups), shape in shapes.items():
        found = devices.mesh_shape(len(eight), replicas, groups)
        assert found == shape


def test_states_travel_as_they_are():
    """Bits of minus zero, NaN and half precision survive the way over whole numbers."""
    for dtype in (np.float32, jax.numpy.bfloat16, np.int8, bool):
        leaf = jax.numpy.asarray([-0.0, np.nan, 3.0, 0.0]).astype(dtype)
        back = devices.decode_bits(devices.encode_bits(leaf), leaf.dtype)
        assert back.dtype == leaf.dtype
        assert np.asarray(back).tobytes() == np.asarray(leaf).tobytes()


def test_a_user_whose_jax_had_started_is_told_once(monkeypatch):
    monkeypatch.setattr(cpu_devices, "_missed", 4)
    with pytest.warns(UserWarning, match="uses 1 of 4 cores; import fedblend first"):
        devices.usable_devices(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices.usable_devices(None)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"FEDBLEND_DEVICES": "3"}, "3"),
        ({"FEDBLEND_DEVICES": "3", "JAX_NUM_CPU_DEVICES": "2"}, "3"),
        ({"JAX_NUM_CPU_DEVICES": "2"}, "2"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, None),
    ],
)
def test_the_environment_has_its_say(given, told, monkeypatch):
    """JAX reads its variable when it is imported, which is not yet done."""
    for name in ("FEDBLEND_DEVICES", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "jax")
    cpu_devices.set_up()
    assert os.environ.get("JAX_NUM_CPU_DEVICES") == told


def test_a_cpu_has_a_device_for_each_core_it_may_use(monkeypatch):
    monkeypatch.delenv("FEDBLEND_DEVICES")
    assert cpu_devices.count_devices() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("FEDBLEND_DEVICES", "none")
    with pytest.raises(UserError, match="FEDBLEND_DEVICES: 'none' is not a whole"):
        devices.usable_devices(None)


def test_a_wrong_number_of_devices_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "fedblend", "list"],
        env={**os.environ, "FEDBLEND_DEVICES": "zero"},
        capture_output=True,
        text=True,
    )
    line = "error: FEDBLEND_DEVICES: 'zero' is not a whole number of at least 1\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


NOISY = """
import fedblend as fb  # before JAX, whose devices it sets
import jax, jax.numpy as jnp, numpy as np
from fedblend.simulation import devices
from fedblend.transforms import noise

drawn, alike, draw, local = [], [], noise.RAND_bytes, devices.first_copy


def counted(size):
    drawn.append(1)
    return draw(size)


def compared(tree):
    for leaf in jax.tree.leaves(tree):
        parts = [np.asarray(part.data) for part in leaf.addressable_shards]
        alike.append(all((part == parts[0]).all() for part in parts))
    return local(tree)


noise.RAND_bytes, devices.first_copy = counted, compared
data, _ = fb.datasets.quadratics(clients=16, dim=3)
work = fb.Work(0.1, steps=2, batch_size=None)
plain = fb.fedavg(fb.datasets.quadratic_loss, work)
private = fb.transforms.dp_fedavg(plain, clip=1.0, noise=1.0, cohort=16)
run = fb.simulate(private, jnp.zeros(3), data, jax.random.key(0), rounds=4, chunk=2)
run.complete()
print(len(jax.devices()), len(drawn), int(all(alike)))
"""


def test_private_noise_is_drawn_once_for_all_devices():
    """Two noises for one sum reveal more of it than was accounted for."""
    done = subprocess.run(
        [sys.executable, "-c", NOISY],
        env={**os.environ, "FEDBLEND_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["2", "4", "1"], done.stderr[-2000:]

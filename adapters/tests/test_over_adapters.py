# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Privacy, compression and secure sums over adapters: what travels is the adapter."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend import compress, trees
from fedblend.config.config import check
from fedblend.runs.run import run_config
from fedblend.theory import privacy
from fedblend_federation.secure.flatten import FixedPoint
from tiny_config import TINY

KEY = jax.random.key(3)
CLIENTS, PATH = 4, "hidden/0/weight"
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(CLIENTS * 5, 6)).astype(np.float32)
DATA = fb.federate(
    (INPUTS, RNG.integers(0, 3, len(INPUTS))), np.arange(len(INPUTS)).reshape(-1, 5)
)
MODEL = fb.adapt.adapt(
    fb.models.mlp(6, 3, hidden=(7,)), how=fb.adapt.lora(2), inputs=INPUTS
)
LOSS = fb.losses.cross_entropy(MODEL.apply)
PARAMS = MODEL.init(KEY)
SIZE_A, SIZE_B = 2 * 6, 7 * 2
WORK = fb.Work(0.3, steps=2, batch_size=None)


def run(algorithm, rounds=3, **settings):
    settings = {"weights": "uniform", "every": rounds} | settings
    given = (algorithm, PARAMS, DATA, KEY)
    return fb.simulate(*given, rounds=rounds, **settings).complete()


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("fedsa_lora", SIZE_A),
        pytest.param("fedavg", SIZE_A + SIZE_B, marks=pytest.mark.slow),
        pytest.param("ffa_lora", SIZE_B, marks=pytest.mark.slow),
    ],
)
def test_a_compressor_counts_the_entries_of_the_factors_that_travel(name, entries):
    """A seed says which entries: k numbers of 32 bits; natural ones have 9 bits."""
    algorithm = getattr(fb.algorithms, name)(LOSS, WORK)
    few = run(fb.transforms.compressed(algorithm, compress.rand_k(5)))
    assert few.message_bits.up == 5 * 32
    assert few.message_bits.down == entries * 32
    told = run(fb.transforms.diana(algorithm, compress.natural()))
    assert told.message_bits.up == 8 * math.ceil(9 * entries / 8)
    assert trees.is_finite(told.shared)


@pytest.mark.slow
def test_diana_with_everything_sent_is_the_method_itself():
    plain, memory = (
        run(one(fb.algorithms.fedsa_lora(LOSS, WORK)))
        for one in (
            lambda own: own,
            lambda own: fb.transforms.diana(own, compress.identity()),
        )
    )
    # Sums with a memory that is added and subtracted again, of numbers of size 1.
    np.testing.assert_allclose(
        memory.shared[PATH]["a"], plain.shared[PATH]["a"], rtol=0, atol=1e-6
    )


def test_noise_of_privacy_is_on_what_travels_and_on_nothing_else():
    """Without steps to speak of: z C / K on every entry, within 4 deviations of it."""
    still = WORK._replace(optimizer=1e-9)
    found = {}
    for name in ("fedavg", "ffa_lora"):
        algorithm = fb.transforms.dp_fedavg(
            getattr(fb.algorithms, name)(LOSS, still),
            clip=0.5,
            noise=2.0,
            cohort=CLIENTS,
            noise_from="seed",
        )
        done = run(algorithm, rounds=40)
        found[name] = trees.subtract(done.shared, PARAMS)[PATH]
    deviation = 2.0 * 0.5 / CLIENTS * np.sqrt(40)
    for name, letters in (("fedavg", "ab"), ("ffa_lora", "b")):
        moved = np.concatenate([np.ravel(found[name][letter]) for letter in letters])
        spread = np.sqrt(np.mean(moved**2)) / deviation
        assert abs(spread - 1) < 4 / np.sqrt(2 * moved.size)
    assert not np.any(found["ffa_lora"]["a"])


def test_noise_of_privacy_leaves_the_factor_that_rests():
    """RoLoRA trains B in the first round; noise that later rounds cancel is refused."""
    algorithm, options = fb.algorithms.rolora(LOSS, WORK), {"clip": 0.5, "noise": 2.0}
    private = fb.transforms.dp_fedavg(
        algorithm, cohort=CLIENTS, noise_from="seed", **options
    )
    moved = trees.subtract(run(private, rounds=1).shared, PARAMS)
    assert not np.any(moved[PATH]["a"]) and np.all(moved[PATH]["b"])
    with pytest.raises(ValueError, match=r"^dp_blt: .* in some rounds only"):
        fb.transforms.dp_blt(
            algorithm, clip=0.5, noise=2.0, cohort=CLIENTS, strategy=fb.theory.blt.Blt()
        )


@pytest.mark.slow
def test_the_epsilon_of_a_configuration_with_adapters(tmp_path):
    """That of the noise, cohort and rounds, however few entries have it."""
    content = json.loads(json.dumps(TINY))
    content |= {"model": {"name": "mlp", "hidden": [4]}, "adapt": {"rank": 2}}
    content["algorithm"]["name"] = "ffa_lora"
    content["privacy"] = {"clip": 0.5, "noise": 1.3, "delta": 1e-3}
    found = run_config(check(content, "here"), tmp_path / "out")["privacy"]
    wanted = privacy.cohort_cost(noise=1.3, cohort=3, clients=6, rounds=4, delta=1e-3)
    assert found["epsilon"] == pytest.approx(wanted.epsilon)


def test_a_secure_sum_of_adapters_is_their_mean():
    """Whole numbers, in which masks cancel: off by the error that is stated."""
    algorithm = fb.algorithms.rolora(LOSS, WORK)
    down = fb.Down(PARAMS, jnp.zeros((), jnp.int32))
    encoding = FixedPoint(32, 1.0, CLIENTS)
    total = np.zeros(SIZE_A + SIZE_B, encoding.dtype)
    for client in range(CLIENTS):
        shard = DATA.train.shard(client)
        up, _ = algorithm.client(down, (), shard, KEY)
        vector, layout = trees.ravel(up.delta)
        assert encoding.count_clipped(np.asarray(vector), 1 / CLIENTS) == 0
        total += encoding.encode(np.asarray(vector), 1 / CLIENTS)
    mean = trees.unravel(jnp.asarray(encoding.decode(total)), layout)
    after = run(algorithm, rounds=1).shared
    gap = trees.subtract(trees.add(PARAMS, mean), after)
    # Beside it the rounding of float32 of numbers of size 1.
    assert trees.largest(gap) <= encoding.error + 1e-6
    assert trees.largest(mean) > 1e-3

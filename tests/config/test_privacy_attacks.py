# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Attacks on private runs by those who have the model, its folder, or guess the seed.

The same attacks succeed where the noise is drawn from the seed, as it once was always.
"""

import re
from itertools import count, islice
from math import exp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest

import fedblend as fb
from fedblend import keys
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.runs.run import run_config
from fedblend.simulation.sampling import cohorts
from fedblend.simulation.serialize import unpack
from fedblend.theory.privacy import cohort_cost
from fedblend.transforms.noise import add_noise

CLIP, NOISE, CLIENTS, SEED = 0.5, 2.0, 6, 1234
STD = CLIP * NOISE / CLIENTS
both_sources = pytest.mark.parametrize("source", ["system", "seed"])


@pytest.fixture
def published(tiny, tmp_path):
    """The folder of a run of one round, and its initial model."""

    def make(source: str, **more: Any):
        content = {**tiny, "run": {"rounds": 1, "seed": SEED}}
        content["privacy"] = {"clip": CLIP, "noise": NOISE, "delta": 1e-3, **more}
        content["privacy"]["noise_from"] = source
        content["measure"] = {"metrics": ["loss"], "splits": ["test"], "local": False}
        config = check(content, "attacked")
        made = build(config)
        initial = made.model.init(jax.random.key(SEED))
        run_config(config, tmp_path / "run")
        return tmp_path / "run", initial

    return make


def change_of(folder, initial) -> dict[str, np.ndarray]:
    """How far the round moved each parameter."""
    after, _ = unpack((folder / "model.safetensors").read_bytes())
    before = by_name(initial)
    assert set(before) == set(after)
    return {name: now - before[name] for name, now in after.items()}


def by_name(params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def of_round(key):
    """The key of the noise on the first round's sum."""
    return keys.named(keys.named(keys.derive(key, "server", 0), "privacy"), "sum")


def left_over(change, initial, key):
    """The norm of what is left when the noise of a key is subtracted.

    Clipped updates have a mean of at most CLIP; noise has STD in every entry.
    """
    zeros = jax.tree.map(jnp.zeros_like, initial)
    noise = by_name(add_noise(zeros, STD, of_round(key)))
    squares = [((change[name] - drawn) ** 2).sum() for name, drawn in noise.items()]
    return jnp.sqrt(sum(squares))


def stripped(norm: jax.Array) -> bool:
    """Whether this is the mean of clipped updates, without noise."""
    return bool(norm <= CLIP * 1.001)


@both_sources
def test_the_seed_in_the_file_of_the_model_subtracts_no_noise(source, published):
    folder, initial = published(source)
    _, words = unpack((folder / "model.safetensors").read_bytes())
    key = jax.random.key(int(words["seed"]))
    rest = left_over(change_of(folder, initial), initial, key)
    assert stripped(rest) == (source == "seed")


@both_sources
@pytest.mark.parametrize("more", [{}, {"buffers": 0}])
def test_nothing_in_the_folder_subtracts_the_noise(more, source, published):
    """Every number of every file, and every pair of words in every array, as a key."""
    folder, initial = published(source, **more)
    data = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    found = re.findall(rb"\b\d{1,10}\b", b"\n".join(data))
    numbers = {int(number) for number in found if int(number) < 2**32}
    candidates = [jax.random.key_data(jax.random.key(n)) for n in sorted(numbers)]
    for path in (folder / "model.safetensors", *folder.rglob("*checkpoint*")):
        for array in unpack(path.read_bytes())[0].values():
            words = np.frombuffer(array.tobytes(), np.uint8)
            words = words[: words.size // 8 * 8].view(np.uint32)
            candidates += list(words.reshape(-1, 2))
    tried = jax.random.wrap_key_data(jnp.asarray(np.array(candidates)))
    change = change_of(folder, initial)
    rest = jax.vmap(lambda key: left_over(change, initial, key))
    rests = jax.jit(rest)(tried)
    assert len(tried) > 300
    assert stripped(rests.min()) == (source == "seed")


@both_sources
def test_no_seed_that_can_be_guessed_subtracts_the_noise(source, published):
    folder, initial = published(source)
    change = change_of(folder, initial)

    @jax.jit
    @jax.vmap
    def rest(seed):
        return left_over(change, initial, jax.random.key(seed))

    found = rest(jnp.arange(2000))
    assert stripped(found.min()) == (source == "seed")
    assert (found.argmin() == SEED) == (source == "seed")


def world(number: int, clients: int):
    """Client 0 pulls the model up or down as far as its clip lets it; others do not."""
    rows = np.zeros((clients, 1), np.float32)
    rows[0] = (-9.0, 9.0)[number]
    return fb.federate((rows,), [np.array([client]) for client in range(clients)])


def loss(params, rows):
    return ((params[None] - rows[0]) ** 2).sum(axis=1) / 2


def models(number, seeds, clients, cohort, noise, rounds, source):
    """The last model of each seed, in this world."""
    plain = fb.fedavg(loss, fb.Work(1.0, steps=1, batch_size=None))
    private = fb.transforms.dp_fedavg(
        plain, clip=1.0, noise=noise, cohort=cohort, noise_from=source
    )
    key = jnp.stack([jax.random.key(int(seed)) for seed in seeds])
    run = fb.simulate(
        private,
        jnp.zeros(1),
        world(number, clients),
        key,
        rounds=rounds,
        cohort=cohort,
        every=rounds,
    )
    return np.asarray(run.complete().shared).ravel()


def right_guesses(source, attack, seeds, clients, cohort, noise, rounds) -> int:
    """How often the nearer of two models tells which world a model is from.

    "recompute" compares with both worlds under the same seed and its noise,
    "likelihood" with both without noise, which is the best test if noise is secret.
    """
    known = noise if attack == "recompute" else 0.0
    down, up = (
        models(number, seeds, clients, cohort, known, rounds, "seed")
        for number in (0, 1)
    )
    right = 0
    for number in (0, 1):
        seen = models(number, seeds, clients, cohort, noise, rounds, source)
        guess = np.abs(seen - up) < np.abs(seen - down)
        right += int((guess == bool(number)).sum())
    return right


GAMES: dict[str, dict[str, Any]] = {
    "everyone": {"clients": 3, "cohort": 3, "noise": 2.0, "rounds": 1},
    "sampled": {"clients": 10, "cohort": 1, "noise": 0.6, "rounds": 1},
    "three rounds": {"clients": 4, "cohort": 2, "noise": 3.0, "rounds": 3},
}
DELTA = {"everyone": 0.1, "sampled": 0.08, "three rounds": 0.15}
"""At which a guarantee says much about the rate of right guesses."""


@pytest.mark.parametrize(
    ("name", "games"),
    [
        ("sampled", 60),
        *(pytest.param(name, 400, marks=pytest.mark.slow) for name in GAMES),
    ],
)
def test_neighbors_are_told_apart_no_more_often_than_epsilon_allows(name, games):
    """By each seed client 0 takes part in every round: what it says must not matter."""
    game = GAMES[name]
    clients, cohort, rounds = game["clients"], game["cohort"], range(game["rounds"])
    chosen = (
        seed
        for seed in count()
        if not cohorts(jax.random.key(seed), rounds, clients, cohort)[:, 0].any()
    )
    seeds = list(islice(chosen, games // 2))
    epsilon = cohort_cost(**game, delta=DELTA[name]).epsilon
    assert epsilon is not None
    # Of two worlds that are equally likely, with the best of all tests.
    most = (exp(epsilon) + DELTA[name]) / (1 + exp(epsilon))
    assert most < 0.8
    for attack in ("recompute", "likelihood"):
        right = right_guesses("system", attack, seeds, **game)
        rate = binomtest(right, 2 * len(seeds)).proportion_ci(0.999, "exact")
        assert rate.low <= most, (attack, right)
    told = right_guesses("seed", "recompute", seeds, **game)
    assert told == 2 * len(seeds)
    assert binomtest(told, told).proportion_ci(0.999, "exact").low > most

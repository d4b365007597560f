# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tree noise against NumPy, its size, the same bits again, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend import keys
from fedblend.core import Aggregate, Up
from fedblend.simulation.sampling import deal
from fedblend.trees import precision
from fedblend_reproductions.dp_ftrl import dp_ftrl

CLIP, NOISE, COHORT, RATE, TREE = 0.15, 1.5, 2, 0.2, 3
on = problems.quadratics()
full: dict[str, Any] = {"steps": 1, "batch_size": None}
descent = fb.fedavg(on.loss, fb.Work(RATE, **full))


def by_tree(algorithm=descent, **changed):
    chosen = {"clip": CLIP, "noise": NOISE, "cohort": COHORT, "tree": TREE} | changed
    return dp_ftrl(algorithm, **chosen)


def dealt_out(dropout=0.0) -> fb.Cohort:
    return fb.Cohort(COHORT, epoch=3, dropout=dropout)


def begin(algorithm, key=0, params=on.params, **settings):
    usual: dict[str, Any] = {"rounds": 11, "cohort": dealt_out(), "every": 4}
    return fb.simulate(
        algorithm, params, on.federated_data, jax.random.key(key), **usual | settings
    )


class Nodes:
    """The noise of a tree's nodes, by the leaves that they are over."""

    def __init__(self, seed, number):
        self.key = keys.derive(jax.random.wrap_key_data(seed), "tree", number)

    def draw(self, first: int, last: int) -> np.ndarray:
        """Of the node over the leaves ``first`` to ``last``, counted from 1."""
        size = last - first + 1
        key = keys.derive(self.key, "node", size.bit_length() - 1, last // size)
        (own,) = jax.random.split(key, 1)
        return np.asarray(jax.random.normal(own, on.params.shape, float))

    def before(self, leaves: int) -> np.ndarray:
        """The noise on the sum of so many leaves: the largest nodes that fit, in turn.

        A recursion over halves, with no binary digits.
        """
        total, first, size = np.zeros(on.params.shape), 1, 1 << 20
        while first <= leaves:
            while first + size - 1 > leaves:
                size //= 2
            total = total + self.draw(first, first + size - 1)
            first += size
        return total


@pytest.mark.parametrize(("key", "empty"), [(1, []), (47, [0, 7])])
def test_it_is_the_sums_of_a_tree_in_numpy_in_float64(key, empty):
    """Eleven rounds: three whole trees of three, and two rounds of a fourth.

    Clients drop out. With the second key no client answers in the first round, which
    leaves the seed to the next, and in another one in the middle of a tree.
    """
    dropout = 0.45
    with precision("float64"):
        params = np.linspace(0, 0.5, 3)
        run = begin(by_tree(), key, params, cohort=dealt_out(dropout), every=1)
        matrices, vectors = problems.client_matrices(on)
        root, shared, models, seed, found = run.key, params, [], None, []
        for number, members in enumerate(deal(root, range(11), 7, COHORT, epoch=3)):
            place = number % TREE + 1
            if place == 1:
                begun, total, lost = shared, np.zeros(3), np.zeros(3)
            aggregate = [i for i in members if lot(root, number, i) >= dropout]
            if not aggregate:
                found.append(number)
                if seed is not None:
                    nodes = Nodes(seed, number // TREE)
                    lost = lost + nodes.before(place) - nodes.before(place - 1)
                models.append(shared)
                continue
            if seed is None:
                first = keys.named(keys.derive(root, "server", number), "tree")
                seed = jax.random.bits(first, (2,), jnp.uint32)
                lost = Nodes(seed, 0).before(place - 1)
            for i in aggregate:
                step = -RATE * (matrices[i] @ shared - vectors[i])
                total = total + step * min(1, CLIP / np.linalg.norm(step))
            noise = Nodes(seed, number // TREE).before(place) - lost
            shared = begun + (total + NOISE * CLIP * noise) / COHORT
            models.append(shared)
        assert found == empty
        seen = [np.asarray(run.shared) for record in run if record.round]
        np.testing.assert_allclose(seen, models, rtol=0, atol=1e-12)


def lot(root, number, client):
    return jax.random.uniform(keys.derive(root, "dropout", number, client))


def played(algorithm, rounds, size=20_000, seed=5):
    """The model after each round in which all clients send zeros."""
    zeros = jnp.zeros(size)
    root = jax.random.key(seed)
    down, server = algorithm.start(zeros, Aggregate((), *jnp.zeros(2)), None, root)
    aggregate = Aggregate(Up(zeros), jnp.ones(()), jnp.asarray(COHORT))
    step, models = jax.jit(algorithm.server), []
    for number in range(rounds):
        key = keys.derive(root, "server", number)
        down, server = step(aggregate, down, server, None, key)
        down = down._replace(round=down.round + 1)
        models.append(np.asarray(down.shared))
    return np.stack(models)


ERRORS = 4
"""Standard errors."""


def test_the_noise_of_a_sum_is_that_of_as_many_nodes_as_its_number_has_ones():
    std, size, most = NOISE * CLIP / COHORT, 20_000, ERRORS
    models = played(by_tree(tree=11), 11) / std
    for number, model in enumerate(models, start=1):
        nodes = number.bit_count()
        assert abs(model.var() / nodes - 1) < most * np.sqrt(2 / size), number
        assert abs(model.mean()) < most * np.sqrt(nodes / size)
    # Rounds 4 and 5 share the node over 1 to 4, rounds 3 and 4 share none.
    assert abs((models[4] * models[3]).mean() - 1) < most * np.sqrt(3 / size)
    assert abs((models[3] * models[2]).mean()) < most * np.sqrt(2 / size)


def test_a_new_tree_has_new_noise_where_the_last_one_ended():
    """Two trees of four end with a node each, independent of each other."""
    std, size, most = NOISE * CLIP / COHORT, 20_000, ERRORS
    models = played(by_tree(tree=4), 8) / std
    assert abs(models[7].var() / 2 - 1) < most * np.sqrt(2 / size)
    second = models[4:] - models[3]
    assert abs((second[3] * models[3]).mean()) < most / np.sqrt(size)
    assert abs((second[0] * models[0]).mean()) < most / np.sqrt(size)
    other = played(by_tree(tree=4), 1, seed=6)[0] / std
    assert abs((other * models[0]).mean()) < most / np.sqrt(size)


def test_momentum_at_the_server_filters_the_noisy_sums():
    """DP-FTRLM: v <- m v + (S + N), the model is where it began and v."""
    momentum = fb.algorithms.fedopt(on.loss, fb.Work(RATE, **full), optax.sgd(1.0, 0.5))
    plain, filtered = (
        played(by_tree(one, tree=7), 7, size=50) for one in (descent, momentum)
    )
    v = np.zeros(50)
    for noisy, found in zip(plain, filtered, strict=True):
        v = 0.5 * v + noisy
        np.testing.assert_allclose(found, v, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [2, 1])
def test_dropouts_do_not_lower_the_noise(count):
    mean = jnp.full(10_000, 0.7)
    algorithm = by_tree()
    root = jax.random.key(1)
    start = (jnp.zeros_like(mean), Aggregate((), *jnp.zeros(2)), None, root)
    aggregate = Aggregate(Up(mean), jnp.ones(()), jnp.asarray(count))
    after, _ = algorithm.server(aggregate, *algorithm.start(*start), None, root)
    noise = np.asarray(after.shared) - 0.7 * count / COHORT
    planned = NOISE * CLIP / COHORT
    assert abs(noise.std() / planned - 1) < ERRORS / np.sqrt(2e4)
    assert abs(noise.mean()) < ERRORS * planned / 100


def test_without_noise_and_clipping_it_is_fedavg_bit_for_bit():
    quiet = by_tree(noise=0.0, clip=1e6)
    done = [
        begin(one, weights="uniform", chunk=1).complete() for one in (quiet, descent)
    ]
    np.testing.assert_array_equal(done[0].shared, done[1].shared)
    assert not np.array_equal(done[0].shared, on.params)


def test_a_resumed_run_has_the_same_bits_and_replicas_the_same_noise(tmp_path):
    momentum = by_tree(
        fb.algorithms.fedopt(on.loss, fb.Work(RATE, **full), optax.sgd(1.0, 0.5))
    )
    whole, second = (begin(momentum, cohort=dealt_out(0.3)) for _ in range(2))
    blocks, path = iter(whole), tmp_path / "checkpoint"
    next(blocks)
    next(blocks)
    assert 0 < whole.round < 11
    fb.checkpoint.save(path, whole)
    fb.checkpoint.restore(path, second)
    whole.complete()
    np.testing.assert_array_equal(second.complete().shared, whole.shared)
    in_one = begin(momentum, cohort=dealt_out(0.3), every=11, chunk=1).complete()
    np.testing.assert_allclose(in_one.shared, whole.shared, rtol=0, atol=1e-6)
    seeds = jnp.stack([jax.random.key(0), jax.random.key(1)])
    replicas = fb.simulate(
        momentum,
        on.params,
        on.federated_data,
        seeds,
        rounds=11,
        cohort=dealt_out(0.3),
        every=4,
    ).complete()
    np.testing.assert_allclose(replicas.shared[0], whole.shared, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(replicas.server.noise[0], whole.server.noise)
    assert not np.allclose(replicas.shared[1], whole.shared, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"clip": 0.0}, "^dp_ftrl: clip: 0.0 is not a number above 0"),
        (
            {"noise": -1.0},
            "^dp_ftrl: noise: -1.0 is not a number of",
        ),
        ({"cohort": 0}, "^dp_ftrl: cohort: 0 is not a whole number"),
        ({"tree": 0}, "^dp_ftrl: tree: 0 is not a whole number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changed, line):
    with pytest.raises(ValueError, match=line):
        by_tree(**changed)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"weights": "by_count"}, "^weights: .* needs 'uniform', not 'by_count'$"),
        ({"reduction": "median"}, "^reduction: 'median' breaks"),
        ({"cohort": 1}, "^cohort: .* built for 2 clients in a round, not 1$"),
    ],
)
def test_runs_that_break_the_accounting_are_refused(settings, line):
    with pytest.raises(ValueError, match=line):
        begin(by_tree(), **settings)


SERVERS = {
    "adam": optax.adam(0.1),
    "yogi": optax.yogi(0.1),
    "adagrad": optax.adagrad(0.1),
    "sign": optax.sign_sgd(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_servers_that_are_not_linear_are_refused_before_the_run(name):
    algorithm = fb.algorithms.fedopt(on.loss, fb.Work(RATE, **full), SERVERS[name])
    with pytest.raises(ValueError, match=r"^dp_ftrl: .* server is not linear in"):
        begin(by_tree(algorithm))


LINEAR = {
    "rates by round": fb.algorithms.fedopt(
        on.loss, fb.Work(RATE, **full), optax.sgd(optax.exponential_decay(0.1, 10, 0.5))
    ),
    "nesterov": fb.algorithms.fedopt(
        on.loss, fb.Work(RATE, **full), optax.sgd(0.5, 0.5, nesterov=True)
    ),
    "fedprox": fb.algorithms.fedprox(on.loss, fb.Work(RATE, **full), mu=0.5),
    "reptile": fb.algorithms.reptile(on.loss, fb.Work(RATE, **full), 0.7),
    "ditto": fb.ditto(descent, on.loss, fb.Work(RATE, **full), lam=0.5),
    "flix": fb.flix(
        on.loss,
        lambda loss: fb.fedavg(loss, fb.Work(RATE, **full)),
        alpha=0.5,
        local=fb.solvers.gradient_descent(on.loss, 5.0, most=3),
    ),
    "apfl": fb.apfl(on.loss, fb.Work(RATE, **full), alpha=0.5),
}


@pytest.mark.parametrize("name", LINEAR)
def test_servers_that_are_linear_go(name):
    assert begin(by_tree(LINEAR[name])).shapes.server.noise.shape == (2,)


def test_clients_that_say_more_are_refused():
    with pytest.raises(ValueError, match=r"^dp_ftrl: .* send more than an update"):
        begin(by_tree(fb.scaffold(on.loss, fb.Work(RATE, **full))))

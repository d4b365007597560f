# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Small federations with known answers, shared by all tests.

``quadratics``: heterogeneous, of uneven size; the optimum is a linear solve.
``means``: every client wants its own mean, all curvatures are 1.
``classes``: softmax regression on blobs, two layers of named parameters.
``adapted``: the same rows, and a network with a frozen base and adapters.
``several``: any of these for an ensemble of two models; ``factored``: over the factors
of an adapter; ``paired``: over two sets of parameters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend import trees
from fedblend.data.datasets.built_in import quadratic_loss
from fedblend.data.federated import Shards
from fedblend.losses import cross_entropy

COUNTS = (3, 1, 4, 2, 5, 2, 1)
"""Rows of each client: all different from the capacity but one, and coprime."""


class Problem(NamedTuple):
    """A federation with the loss and the initial parameters that belong to it."""

    federated_data: fb.FederatedData
    loss: Any
    params: Any


class Linear(NamedTuple):
    """The parameters of ``classes``."""

    weight: jax.Array
    bias: jax.Array


def _partition(counts) -> list[np.ndarray]:
    return np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])


def quadratics(counts=COUNTS, dim: int = 3, seed: int = 0) -> Problem:
    """Rows ``(A, b)`` with eigenvalues of A from 1/2 to 2, client by client."""
    rng = np.random.default_rng(seed)
    total = sum(counts)
    axes, _ = np.linalg.qr(rng.standard_normal((total, dim, dim)))
    curvature = rng.uniform(0.5, 2, (total, 1, dim))
    matrices = (axes * curvature) @ axes.swapaxes(1, 2)
    vectors = rng.standard_normal((total, dim))
    federated_data = fb.federate((matrices, vectors), _partition(counts))
    return Problem(
        federated_data, quadratic_loss, jnp.asarray(np.linspace(0, 0.5, dim))
    )


def means(counts=COUNTS, dim: int = 2, seed: int = 0) -> Problem:
    """``f_i(x) = mean 1/2 |x|^2 - b^T x``: the client's optimum is its mean b."""
    rng = np.random.default_rng(seed)
    matrices = np.broadcast_to(np.eye(dim), (sum(counts), dim, dim))
    vectors = rng.standard_normal((sum(counts), dim))
    federated_data = fb.federate((matrices, vectors), _partition(counts))
    return Problem(federated_data, quadratic_loss, jnp.asarray(np.ones(dim)))


def scores(params: Linear, inputs: jax.Array) -> jax.Array:
    """The forward pass of ``classes``."""
    return inputs @ params.weight + params.bias[None]


def classes(counts=COUNTS, seed: int = 0) -> Problem:
    """Three blobs in the plane; clients see the classes unevenly."""
    rng = np.random.default_rng(seed)
    total = sum(counts)
    labels = np.sort(rng.integers(0, 3, total)).astype(np.int32)
    centers = np.array([[2.0, 0], [-1, 2], [-1, -2]])
    inputs = (centers[labels] + rng.standard_normal((total, 2))).astype(np.float32)
    federated_data = fb.federate((inputs, labels), _partition(counts), test=0.25)
    params = Linear(jnp.zeros((2, 3), jnp.float32), jnp.zeros(3, jnp.float32))
    return Problem(federated_data, cross_entropy(scores), params)


def network(params: Linear, inputs: jax.Array) -> jax.Array:
    """The forward pass of ``adapted``: two weights, under the names of ``Linear``."""
    return jnp.tanh(inputs @ params.weight) @ params.bias


def network_base() -> Linear:
    """The frozen base of ``adapted``."""
    keys = jax.random.split(jax.random.key(1))
    first, last = (
        jax.random.normal(key, shape, jnp.float32)
        for key, shape in zip(keys, ((2, 4), (4, 3)), strict=True)
    )
    return Linear(first, last)


def merged(adapter: Any) -> Linear:
    """The weights of ``adapted``, base and product written out."""
    base = network_base()
    return Linear(
        *(
            weight + (adapter[name]["b"] @ adapter[name]["a"]).T
            for name, weight in base._asdict().items()
        )
    )


def adapted() -> Problem:
    """``classes`` with adapters of rank 2 on both weights of a small network."""
    data = classes().federated_data
    model = fb.adapt.adapt(
        fb.Model(lambda key: network_base(), network),
        how=fb.adapt.lora(2),
        inputs=data.train.examples[0][:2],
        where="*",
    )
    return Problem(data, cross_entropy(model.apply), model.init(jax.random.key(2)))


def factored(problem: Problem) -> Problem:
    """The same problem over two factors, whose product is added to its parameters."""
    if isinstance(problem.params, dict):
        return problem
    vector, layout = trees.ravel(problem.params)
    a = 0.3 * jnp.cos(jnp.arange(2 * vector.size, dtype=vector.dtype)).reshape(2, -1)

    def loss(params, rows):
        change = (params["change"]["b"] @ params["change"]["a"])[0]
        return problem.loss(trees.unravel(vector + change, layout), rows)

    params = {"change": {"a": a, "b": jnp.zeros((1, 2), vector.dtype)}}
    return problem._replace(loss=loss, params=params)


def paired(problem: Problem) -> Problem:
    """The same problem for the mean of a client's own parameters and shared ones."""

    def loss(params, rows):
        both = trees.add(params["personal"], params["shared"])
        return problem.loss(trees.scale(0.5, both), rows)

    params = dict.fromkeys(("personal", "shared"), problem.params)
    return problem._replace(loss=loss, params=params)


def several(problem: Problem) -> Problem:
    """The same rows for an ensemble of two models, whose likelihoods are averaged."""

    def loss(ensemble, rows):
        each = jax.vmap(problem.loss, (0, None))(ensemble.models, rows)
        weights = jax.nn.log_softmax(ensemble.log_weights)
        return -jax.nn.logsumexp(weights[:, None] - each, axis=0)

    def two(leaf):
        other = leaf + 0.3 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
        return jnp.stack([leaf, other.astype(leaf.dtype)])

    models = jax.tree.map(two, problem.params)
    weights = jnp.zeros(2, jnp.result_type(*jax.tree.leaves(models)))
    return problem._replace(loss=loss, params=fb.models.Ensemble(weights, models))


def normalized(problem: Problem) -> Problem:
    """``classes`` for a network with batch normalization and dropout."""
    del problem  # the same for all
    model = fb.models.mlp(2, 3, hidden=(4,), norm="batch", dropout=0.2)
    params = model.init(jax.random.key(2))
    return classes()._replace(loss=cross_entropy(model.apply), params=params)


def client_matrices(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Mean A and mean b of each client of a quadratic problem, in float64."""
    train = problem.federated_data.train
    rows = [train.rows(client) for client in range(problem.federated_data.clients)]
    pairs = [(np.mean(a, axis=0), np.mean(b, axis=0)) for a, b in rows]
    return np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])


def optimum(problem: Problem, weights: str = "uniform") -> np.ndarray:
    """The minimizer of the (weighted) mean of the clients' quadratics."""
    matrices, vectors = client_matrices(problem)
    counts = problem.federated_data.train.counts
    share = counts if weights == "by_count" else np.ones(len(counts))
    share = share / share.sum()
    matrix = np.tensordot(share, matrices, axes=1)
    return np.linalg.solve(matrix, share @ vectors)


def spoiled(problem: Problem, client: int, value: float = np.nan) -> Problem:
    """The same problem, but for the floating rows of one client, all ``value``."""
    federated_data = problem.federated_data
    train = federated_data.train
    start, count = train.starts[client], train.counts[client]

    def spoil(leaf):
        if leaf.dtype.kind != "f":
            return leaf
        leaf = np.array(leaf)
        leaf[start : start + count] = value
        return leaf

    shards = Shards(jax.tree.map(spoil, train.examples), train.starts, train.counts)
    federated_data = fb.FederatedData(
        shards, federated_data.validation, federated_data.test, federated_data.names
    )
    return problem._replace(federated_data=federated_data)

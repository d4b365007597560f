# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The movie recommender: clients draw movies together, the server pushes all apart.

Methods are built from a setting, the clients' rate and lambda, and those without a
spreadout ignore lambda.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedblend as fb
from fedblend.data.dataset import generator
from fedblend.data.federated import Shards
from fedblend.transforms import central_loss
from fedblend_reproductions.datasets import movielens
from fedblend_reproductions.mixed.dual_encoder import (
    dual_encoder,
    dual_encoder_loss,
    spreadout,
)
from fedblend_reproductions.mixed.fedselect import fedselect
from fedblend_reproductions.mixed.operations import client_flops
from fedblend_reproductions.mixed.partial_correction import partial_correction
from fedblend_reproductions.mixed.task import How, Method, Task, simulated

RATE = 0.25
"""The clients' rate: the paper's 0.5 times w_f."""
SERVER_RATE = 0.01
"""The rate of Adam at the server, appendix B.4.4."""
STRENGTHS = (1e-3, 3e-3, 1e-2, 3e-2)
"""Lambdas of the spreadout that are tried; the paper does not state its value."""
TABLE: dict[str, Any] = {"rows": {"embedding": ("0", "1")}, "always": 1}
"""Which rows of the table a client needs: those of its movies, and the padding's."""
DATA = (
    "MovieLens 1M as in the paper: a fifth of the users are left to the server, which "
    "needs no rows for the spreadout, eight tenths of the others train, a tenth are "
    "for validation and a tenth for testing; every rating after a user's "
    "first is an example, with up to ten movies before it; recall@10 is among all "
    "movies, over a fixed sample of 20,000 examples of held-out users. 100 "
    "clients a round, 10 steps on 16 examples drawn with replacement; clients weigh "
    "alike, since all of them process 160 examples."
)
"""The task, and what is different from the paper."""


def task(quick: bool) -> Task:
    """The paper's task; quickly, with few users and steps."""
    dataset = movielens()
    users = fb.partition.by_key(dataset.keys).rows
    train, validation, test = split(len(users))
    if quick:
        train = sorted(train, key=lambda user: len(users[user]))[:40]
    federated_data = fb.federate(dataset.rows, [users[user] for user in train])
    pieces, each = (2, 200) if quick else (10, 2000)

    def sampled(name: str, of: np.ndarray):
        rows = np.concatenate([users[user] for user in of])
        rows = generator(0, name).permutation(rows)[: pieces * each]
        return jax.tree.map(lambda leaf: leaf[rows], dataset.rows)

    held_out = sampled("tested", test), sampled("validated", validation)
    model = dual_encoder(dataset.outputs - 1)
    loss = dual_encoder_loss()
    measures = {
        "loss": fb.metrics.mean_loss(loss),
        "recall@10": fb.metrics.recall_at(model.apply, 10),
    }
    return Task(
        _in_pieces(federated_data, *held_out, pieces),
        None,
        model,
        loss,
        measures,
        weights=(0.5, 0.5),
        cohort=8 if quick else 100,
        batch_size=16,
        steps=2 if quick else 10,
    )


def split(users: int) -> list[np.ndarray]:
    """Numbers of users that train, validate and test; others are left out."""
    order = generator(0, "movies").permutation(users)[users // 5 :]
    return np.split(order, [len(order) * 8 // 10, len(order) * 9 // 10])


def _in_pieces(
    federated_data: fb.FederatedData, test: Any, validation: Any, pieces: int
) -> fb.FederatedData:
    """The same federation, whose first clients have equal pieces of held-out rows."""

    def in_pieces(rows):
        each = len(rows[0]) // pieces
        number = np.arange(federated_data.clients)
        counts = np.where(number < pieces, each, 0)
        return Shards(rows, np.minimum(number, pieces - 1) * each, counts)

    return fb.FederatedData(
        federated_data.train, validation=in_pieces(validation), test=in_pieces(test)
    )


def spreadout_of_pairs(params: Any, strength: Any) -> jax.Array:
    """The spreadout as the paper counts it, by the cosines of all pairs of movies."""
    table = params.embedding[1:]
    lengths = jnp.sqrt(jnp.square(table).sum(axis=1, keepdims=True))
    cosines = (table / lengths) @ (table / lengths).T
    cosines = cosines - jnp.diag(jnp.diagonal(cosines))
    return strength * jnp.sqrt(jnp.square(cosines).sum())


def baseline(
    of: Task,
    adaptive: bool,
    penalty: Callable[[Any, Any], jax.Array] = spreadout,
) -> Method:
    """All losses on clients: they get the whole table and compute the spreadout."""
    ratio = of.weights[1] / of.weights[0]

    def build(setting):
        rate, strength = setting

        def loss(params, rows):
            return of.loss(params, rows) + ratio * penalty(params, strength)

        return _clients(of._replace(loss=loss), rate, adaptive)

    return Method(build, *_on(of))


def alone(of: Task, adaptive: bool) -> Method:
    """FedAvg without the spreadout; clients get the rows that they use."""
    return Method(
        lambda setting: fedselect(
            _clients(of, setting[0], adaptive), of.federated_data, **TABLE
        ),
        *_on(of),
    )


def mixed_fl(of: Task, how: How, adaptive: bool) -> Method:
    """One of the three algorithms; clients get the rows that they use.

    Adam, where it is used, takes the whole move: at the server of one_way, and where
    the others merge.
    """
    merging = adaptive and how != "one_way"

    def build(setting):
        rate, strength = setting
        algorithm = fb.transforms.mixed_fl(
            _clients(of, rate, adaptive and not merging),
            central_loss.parameter_loss(lambda params: spreadout(params, strength)),
            how=how,
            weights=of.weights,
            steps=of.steps,
            merge_optimizer=optax.adam(SERVER_RATE) if merging else 1.0,
        )
        # The spreadout has no gradient in the dense layer, so none is sent.
        short = partial_correction(algorithm, ["embedding"])
        return fedselect(short, of.federated_data, **TABLE)

    return Method(build, *_on(of))


def _on(of: Task) -> tuple[fb.FederatedData, int]:
    return of.federated_data, of.cohort


def _clients(of: Task, rate: Any, adaptive: bool) -> fb.Algorithm:
    work = {"steps": of.steps, "batch_size": of.batch_size}
    if not adaptive:
        return fb.fedavg(of.loss, fb.Work(rate, **work))
    return fb.algorithms.fedopt(of.loss, fb.Work(rate, **work), optax.adam(SERVER_RATE))


def followed(
    of: Task,
    method: Method,
    settings: Any,
    seeds: Sequence[int],
    *,
    rounds: int,
    every: int,
    split: str = "test",
) -> dict[str, Any]:
    """Curves [replicas, points] on held-out users, and bytes of a client and round.

    A replica has a rate and a lambda, which is a setting of all methods, and a seed.
    """
    run = simulated(
        of,
        method,
        settings,
        seeds,
        rounds=rounds,
        every=every,
        weights="uniform",
        measure=of.measures,
        measure_on=np.flatnonzero(of.federated_data.splits[split].counts).tolist(),
        splits=(split,),
    ).complete()
    curves = {
        name: [
            [
                record[replica].measures[split]["shared"][name].mean
                for record in run.records
            ]
            for replica in range(len(seeds))
        ]
        for name in of.measures
    }
    bits = [one["bits"] for one in run.summary()]
    return {
        "rounds": [record[0].round for record in run.records],
        **curves,
        **{
            name: np.mean([one[name] for one in bits]) / (8 * rounds * of.cohort)
            for name in ("up", "down")
        },
    }


def step_flops(of: Task, method: Callable[[Task], Method], client: int) -> float:
    """Operations of a local step of this client, by the compiler's count.

    Of a program compiled for this client alone, with room for its own rows.
    """
    own = of._replace(federated_data=of.federated_data.select([client]), steps=1)
    params = of.model.init(jax.random.key(0))
    algorithm = method(own).build((RATE, STRENGTHS[0]))
    return client_flops(algorithm, params, own.federated_data)

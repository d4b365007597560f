# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cards by fedblend, as a user would call it, and their time."""

import gc
import hashlib
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import card_tasks
import fedblend as fb
from card_tasks import Card
from fedblend.core import Loss
from fedblend.data.federated import Shards
from fedblend.models import feedforward
from fedblend.models.derived import Products
from fedblend.models.model import Model
from fedblend.transforms import central_loss
from fedblend_reproductions.mixed.dual_encoder import dual_encoder, dual_encoder_loss
from fedblend_reproductions.resnet18 import resnet18

CENTRAL_ROWS, CENTRAL_BATCH = 1000, 50
ALPHAS = np.linspace(0.1, 1.0, 10, dtype=np.float32)


def federation(card: Card) -> fb.FederatedData:
    """The clients of a card, one's rows after another's."""
    if card.distinct:
        starts = np.arange(card.clients) * card.rows % card.distinct
        shards = Shards(
            card_tasks.rows(card, card.distinct),
            starts,
            np.full_like(starts, card.rows),
        )
        return fb.FederatedData(shards)
    parts = []
    for split, of in enumerate(card_tasks.counts(card)):
        edges = np.concatenate([[0], np.cumsum(of)])
        every = card_tasks.rows(card, int(edges[-1]), split)
        parts.append((every, [np.arange(*pair) for pair in pairwise(edges)]))
    (train, index), (test, test_index) = parts
    held = {"test_rows": test, "test_partition": test_index} if card.test else {}
    return fb.federate(train, index, **held)


def network(shape, channels, hidden, classes) -> Model:
    """Convolutions of 5x5, each pooled, and dense layers."""
    height, width, depth = (*shape, 1)[:3]
    he = jax.nn.initializers.he_normal()
    for _ in channels:
        height, width = (height - 4) // 2, (width - 4) // 2
    widths = (height * width * channels[-1], *hidden, classes)

    def init(key):
        keys = iter(jax.random.split(key, len(channels) + len(widths)))
        kernels = [
            feedforward.kernel(he, next(keys), (5, 5, *pair), jnp.float32)
            for pair in pairwise((depth, *channels))
        ]
        dense = [
            feedforward.affine(he, next(keys), *pair, jnp.float32)
            for pair in pairwise(widths)
        ]
        return tuple(kernels), tuple(dense)

    def apply(params, inputs):
        kernels, dense = params
        here = inputs.reshape(len(inputs), *shape[:2], depth)
        for layer in kernels:
            here = jax.nn.relu(feedforward.pool(feedforward.convolve(layer, here)))
        here = feedforward.flatten(here, jnp.float32)
        for layer in dense[:-1]:
            here = jax.nn.relu(feedforward.linear(layer, here))
        return feedforward.linear(dense[-1], here)

    return Model(init, apply)


def model_of(card: Card) -> Model:
    """The network of a card."""
    shape, classes = card.shape, card.classes
    builders = {
        "large_cnn": lambda: fb.models.large_cnn(shape, classes),
        "lenet": lambda: network(shape, (6, 16), (120, 84), classes),
        "pfllib_cnn": lambda: network(shape, (32, 64), (512,), classes),
        "mlp": lambda: fb.models.mlp(math.prod(shape), classes),
        "resnet18": lambda: resnet18(shape, classes),
        "char_gru": lambda: fb.models.char_rnn(classes, hidden=128, cell="gru"),
        "dual_encoder": lambda: dual_encoder(classes),
    }
    model = builders[card.model]()
    if card.products is None:
        return model
    return fb.models.set_products(model, cast(Products, card.products))


def loss_of(card: Card, model: Model) -> Loss:
    """What its clients minimize."""
    if card.model == "dual_encoder":
        return dual_encoder_loss()
    if card.model == "char_gru":
        return fb.losses.sequence_cross_entropy(model.apply)
    return fb.losses.cross_entropy(model.apply)


def algorithm_of(card: Card, loss: Loss) -> fb.Algorithm:
    """Its algorithm."""
    steps = fb.Epochs(card.epochs) if card.epochs else card.steps
    work = fb.Work(card.rate, steps=steps, batch_size=card.batch)
    fedavg = fb.fedavg(loss, work)
    solver = fb.solvers.gradient_descent(loss, 1 / card.rate, most=20)
    builders = {
        "fedavg": lambda: fedavg,
        "scaffold": lambda: fb.scaffold(loss, work),
        "apfl": lambda: fb.apfl(loss, work, alpha=0.5),
        "flix": lambda: fb.flix(
            loss, lambda own: fb.fedavg(own, work), alpha=0.5, local=solver
        ),
        "dp_fedavg": lambda: fb.transforms.dp_fedavg(
            fedavg, clip=0.4, noise=0.02, cohort=card.cohort, noise_from="seed"
        ),
        "mixed_fl": lambda: fb.transforms.mixed_fl(
            fedavg,
            central_loss.row_loss(loss, CENTRAL_BATCH),
            how="parallel",
            steps=card.steps,
        ),
    }
    return builders[card.algorithm]()


def start(card: Card, data: fb.FederatedData, **changes: Any) -> fb.Run:
    """The run of a card."""
    model = model_of(card)
    loss = loss_of(card, model)
    central = None
    if card.algorithm == "mixed_fl":
        central = fb.shard_of(card_tasks.rows(card, CENTRAL_ROWS, 2))
    measure = None
    if card.measured:
        measure = fb.metrics.standard("classes", loss, model.apply)
    asked = {
        "algorithm": algorithm_of(card, loss),
        "params": model.init,
        "federated_data": data,
        "key": jax.random.key(0),
        "rounds": card.rounds,
        "cohort": card.cohort if card.cohort < card.clients else None,
        "every": card.every,
        "central": central,
        "measure": measure,
        "splits": list(card.measured) or None,
        "chunk": card.chunk,
    }
    return fb.simulate(**{**asked, **changes})


def digest(params: Any) -> str:
    """The first digits of a hash of all bits: runs of equal bits have equal ones."""
    leaves = jax.tree.leaves(jax.device_get(params))
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()[:12]


def timed(card: Card, limit: float) -> dict[str, Any]:
    """Seconds of a card; it is ended early after ``limit``, and then extrapolated.

    There is one block at least.
    Drawing the rows is left out; sending them to the device and compiling is not.
    "measuring" is all that is not in one of the other parts.
    """
    data = federation(card)
    begun = time.perf_counter()
    run = start(card, data)
    ready = time.perf_counter()
    for _ in run:
        if run.round and time.perf_counter() - begun > limit:
            break
    jax.block_until_ready(run.down)
    total = time.perf_counter() - begun
    blocks = [record for record in run.records if record.rounds]
    each = [1000 * record.seconds / record.rounds for record in blocks]
    seconds = {
        "total": total,
        "setup": ready - begun,
        "compile": run.compile_seconds,
        "start": run.records[0].seconds,
        "rounds": sum(record.seconds for record in blocks),
    }
    seconds["measuring"] = total - sum(seconds[of] for of in seconds if of != "total")
    found = {
        "seconds": seconds,
        "rounds": run.round,
        "ms_a_round": statistics.median(each),
        "least_ms_a_round": min(each),
        "store": run.store_kind,
        "sha256": digest(run.down.shared),
        "weights": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
        "extrapolated": run.round < card.rounds,
    }
    if run.round < card.rounds:
        fixed = sum(seconds[part] for part in ("setup", "compile", "start"))
        found["seconds_of_card"] = fixed + (total - fixed) * card.rounds / run.round
    else:
        found["seconds_of_card"] = total
    run.wait()
    del run, data
    gc.collect()
    jax.clear_caches()
    return found


def sweep(tiny: bool) -> dict[str, Any]:
    """Ten alphas of APFL in one run, and a single run; a round of each by turns."""
    card = card_tasks.CARDS["G-APFL"]
    card = card.tiny() if tiny else card
    data = federation(card)
    model = model_of(card)
    loss = loss_of(card, model)
    work = fb.Work(card.rate, steps=card.steps, batch_size=card.batch)
    build = partial(fb.apfl, loss, work, learn="fixed")
    blocks, every = (1, 1) if tiny else (4, 5)
    same = {"rounds": every * (blocks + 1), "every": every}
    runs = {
        "single": start(card, data, algorithm=build(alpha=0.5), **same),
        "sweep": start(
            card, data, algorithm=lambda a: build(alpha=a), over=ALPHAS, **same
        ),
    }
    records: dict[str, Iterator[Any]] = {name: iter(run) for name, run in runs.items()}
    for of in records.values():
        next(of)
        next(of)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(blocks):
        for name, of in records.items():
            record = next(of)
            record = record[0] if isinstance(record, list) else record
            taken[name].append(1000 * record.seconds / record.rounds)
    least = {name: min(of) for name, of in taken.items()}
    compiling = {name: run.compile_seconds for name, run in runs.items()}
    return {
        "ms_a_round": least["sweep"],
        "single_ms_a_round": least["single"],
        "to_ten_single_rounds": least["sweep"] / (len(ALPHAS) * least["single"]),
        "compile_seconds": compiling,
    }

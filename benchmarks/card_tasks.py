# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The cards: what is computed, exactly. NumPy only: any peer imports it.

Rows are drawn at random in the shapes of the dataset that a card names: what is
measured is time.
"""

import dataclasses
from typing import Any

import numpy as np

DATA = "random rows in the shapes of the dataset; time only"


@dataclasses.dataclass(frozen=True)
class Card:
    """The settings of a benchmark.

    ``rows`` are those that a client trains on and ``test`` those it is measured on;
    with ``dirichlet`` they are means, and clients have as many as such a split of the
    classes gives them. A round has ``steps`` of ``batch`` rows, or ``epochs``. Every
    so many rounds, ``every``, it is measured on the splits ``measured``. Its bar is
    ``most`` seconds, compilation included. ``alone`` cards have a process of their own;
    with ``distinct``, clients share so many rows; ``chunk`` of them train side by side,
    all of a cohort on a GPU if None. ``products`` is the precision of matrix products,
    if not JAX's own.
    """

    name: str
    title: str
    model: str
    shape: tuple[int, ...]
    clients: int
    cohort: int
    rows: int
    batch: int
    rate: float
    rounds: int
    steps: int = 0
    epochs: int = 0
    algorithm: str = "fedavg"
    classes: int = 10
    test: int = 0
    dirichlet: float | None = None
    every: int | None = None
    measured: tuple[str, ...] = ()
    most: float | None = None
    peers: tuple[str, ...] = ()
    alone: bool = False
    distinct: int = 0
    chunk: int | None = None
    products: str | None = None

    def tiny(self) -> "Card":
        """The same work on next to nothing, to see that it runs."""
        small = (16, 16, *self.shape[2:]) if len(self.shape) > 1 else self.shape
        return dataclasses.replace(
            self,
            shape=small,
            clients=4,
            cohort=2,
            rows=min(self.rows, 12),
            test=min(self.test, 4),
            batch=min(self.batch, 4),
            steps=self.steps and 2,
            epochs=self.epochs and 1,
            rounds=2,
            every=1,
            distinct=self.distinct and 24,
        )

    def settings(self) -> dict[str, Any]:
        """What the JSON says of the card."""
        return dataclasses.asdict(self)


PFL = Card(
    name="A",
    title="pfl's CIFAR-10",
    model="large_cnn",
    shape=(32, 32, 3),
    clients=1000,
    cohort=50,
    rows=50,
    test=10,
    steps=5,
    batch=10,
    rate=0.1,
    rounds=1500,
    every=10,
    measured=("test",),
    most=20.0,
    peers=("hand", "loop", "vmap", "pfl"),
)
BLAZEFL = Card(
    name="D-CNN",
    title="BlazeFL's CIFAR-10, CNN 6-16-120-84",
    model="lenet",
    shape=(32, 32, 3),
    clients=100,
    cohort=100,
    rows=500,
    epochs=5,
    batch=50,
    rate=0.1,
    rounds=5,
    every=5,
    most=3.0,
)
MLP = Card(
    name="G",
    title="MLP 784-200-200-10",
    model="mlp",
    shape=(784,),
    clients=100,
    cohort=100,
    rows=600,
    steps=20,
    batch=20,
    rate=0.5,
    rounds=200,
    every=20,
    peers=("hand", "loop", "vmap", "pfl", "fedjax"),
)


def _like(card: Card, name: str, title: str, **changes: Any) -> Card:
    """A card beside another: its peers and its bar are not repeated."""
    return dataclasses.replace(
        card, **{"name": name, "title": title, "most": None, "peers": (), **changes}
    )


CARDS = {
    card.name: card
    for card in (
        PFL,
        _like(PFL, "A-APFL", "A with APFL, 1,000 personal models", algorithm="apfl"),
        _like(
            PFL,
            "A-APFL-20k",
            "A with APFL, 20,000 personal models",
            algorithm="apfl",
            clients=20_000,
            test=0,
            measured=(),
            rounds=60,
            alone=True,
            distinct=50_000,
        ),
        _like(PFL, "A-SCAFFOLD", "A with SCAFFOLD", algorithm="scaffold"),
        _like(PFL, "A-DP", "A with DP-FedAvg", algorithm="dp_fedavg"),
        BLAZEFL,
        _like(
            BLAZEFL,
            "D-ResNet18",
            "BlazeFL's CIFAR-10, ResNet-18 with group norm",
            model="resnet18",
            most=30.0,
            chunk=20,
        ),
        _like(
            BLAZEFL,
            "D-ResNet18-bf16",
            "the same with products in bfloat16",
            model="resnet18",
            chunk=20,
            products="bfloat16",
        ),
        Card(
            name="E",
            title="FedJAX's APFL on EMNIST's digits",
            model="mlp",
            shape=(28, 28),
            clients=3400,
            cohort=340,
            rows=100,
            test=12,
            epochs=1,
            batch=20,
            rate=0.001,
            rounds=500,
            algorithm="apfl",
            every=10,
            measured=("test",),
            most=30.0,
        ),
        Card(
            name="F",
            title="PFLlib's MNIST line",
            model="pfllib_cnn",
            shape=(28, 28),
            clients=20,
            cohort=20,
            rows=2625,
            test=875,
            dirichlet=0.1,
            epochs=1,
            batch=10,
            rate=0.005,
            rounds=2000,
            every=1,
            measured=("train", "test"),
            most=600.0,
        ),
        MLP,
        _like(MLP, "G-SCAFFOLD", "G with SCAFFOLD", algorithm="scaffold"),
        _like(MLP, "G-FLIX", "G with FLIX", algorithm="flix"),
        _like(MLP, "G-APFL", "G with APFL", algorithm="apfl"),
        Card(
            name="J-GRU",
            title="Mixed FL, characters: GRU",
            model="char_gru",
            shape=(80,),
            classes=90,
            clients=100,
            cohort=10,
            rows=50,
            steps=10,
            batch=4,
            rate=0.5,
            rounds=100,
            every=10,
            algorithm="mixed_fl",
        ),
        Card(
            name="J-dual",
            title="Mixed FL, movies: dual encoder",
            model="dual_encoder",
            shape=(10,),
            classes=3952,
            clients=1000,
            cohort=100,
            rows=64,
            steps=4,
            batch=16,
            rate=0.5,
            rounds=100,
            every=10,
            algorithm="mixed_fl",
        ),
    )
}
SPECIAL = {
    "H": "clients from 10^2 to 10^7 at a cohort of 100",
    "I": "sweep of ten alphas in one run, and single runs",
}
"""Cards that are no single run."""


def counts(card: Card) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each client, to train and to test."""
    clients = card.clients
    if card.dirichlet is None:
        return np.full(clients, card.rows), np.full(clients, card.test)
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(clients, card.dirichlet), card.classes).mean(axis=0)
    return tuple(
        np.maximum(shares * clients * mean, 1).astype(int)
        for mean in (card.rows, card.test)
    )


def rows(card: Card, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of so many rows, at random."""
    rng = np.random.default_rng(seed)
    if card.model in ("char_gru", "dual_encoder"):
        inputs = rng.integers(1, card.classes, (number, *card.shape), np.int32)
        shape = inputs.shape if card.model == "char_gru" else (number,)
        return inputs, rng.integers(1, card.classes, shape, np.int32)
    inputs = rng.standard_normal((number, *card.shape), np.float32) / 8
    return inputs, rng.integers(0, card.classes, number, np.int32)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training on synthetic data that some clients join later."""

from typing import Any

import jax
import numpy as np

import fedblend as fb
from fedblend.data.partition import federate_dataset
from fedblend_reproductions.apfl.runs import decaying

RATE = 0.1
"""The rate of training, which falls by 1 % a round, and of new clients."""
ALPHAS = (0.25, 0.5, 0.75)
TUNED, LEARNT = "FedAvg, fine-tuned", "APFL, alpha learned"
LABELS = (TUNED, *(f"APFL, alpha {alpha}" for alpha in ALPHAS), LEARNT)
MEASURES = (("train", "loss"), ("validation", "accuracy"), ("test", "accuracy"))


class Joining:
    """Clients that train, and new clients that join after training.

    Args:
        quick: small sizes.
        level: gamma and beta.
        draw: which clients join, and the seed of everything else.
    """

    batch_size = 20

    def __init__(self, quick: bool, level: float, draw: int) -> None:
        size = {"clients": 10, "least": 60, "most": 100} if quick else {}
        data = fb.datasets.load("synthetic", gamma=level, beta=level, **size)
        everybody = federate_dataset(
            data, fb.partition.by_key(data.keys), validation=0.1, test=0.2
        )
        share = 3 / everybody.clients
        self.seen, self.unseen = fb.data.split_clients(everybody, share, seed=draw)
        self.model = fb.models.softmax(60, 10)
        self.loss = fb.losses.cross_entropy(self.model.apply)
        self.key = jax.random.key(draw)
        self.rounds = 10 if quick else 100
        # An epoch of every new client, in steps, is that of the mean one.
        rows = self.unseen.train.counts.mean()
        self.epoch = int(np.ceil(rows / self.batch_size))

    def trained(self) -> Any:
        """The server's message after the last round, the same for FedAvg and APFL."""
        epoch = {"steps": fb.Epochs(1), "batch_size": self.batch_size}
        algorithm = fb.fedavg(self.loss, fb.Work(decaying(RATE), **epoch))
        return (
            fb.simulate(
                algorithm,
                self.model.init,
                self.seen,
                self.key,
                rounds=self.rounds,
                every=self.rounds,
                weights="uniform",
            )
            .complete()
            .down
        )

    def after(self, down: Any, rate: float, epochs: int) -> dict[str, Any]:
        """Measures of the new clients by label, arrays over new clients."""
        steps, size = epochs * self.epoch, self.batch_size
        work: dict[str, Any] = {"steps": steps, "batch_size": size}
        shared = fb.fedavg(self.loss, fb.Work(rate, **work))
        tuned = fb.finetune(shared, self.loss, fb.Work(rate, **work))
        number = self.unseen.clients
        several = self.unseen.select(list(range(number)) * len(ALPHAS))
        one: dict[str, Any] = {"steps": 1, "batch_size": size}
        weights = np.repeat(ALPHAS, number)
        fixed = fb.apfl(self.loss, fb.Work(rate, **one), alpha=weights, learn="fixed")
        learned = fb.apfl(self.loss, fb.Work(rate, **one), alpha=0.5)
        parts = {
            TUNED: self._measured(tuned, down, self.unseen, 0),
            LEARNT: self._measured(learned, down, self.unseen, steps),
        }
        grid = self._measured(fixed, down, several, steps)
        for place, alpha in enumerate(ALPHAS):
            own = slice(place * number, (place + 1) * number)
            parts[f"APFL, alpha {alpha}"] = {
                name: values[own] for name, values in grid.items()
            }
        return parts

    def _measured(self, algorithm, down, clients, visits) -> dict[str, np.ndarray]:
        joined = fb.personalize(
            algorithm,
            down,
            clients,
            self.key,
            visits=visits,
            measure={
                "accuracy": fb.metrics.accuracy(self.model.apply),
                "loss": fb.metrics.mean_loss(self.loss),
            },
        )
        return {
            f"{split} {metric}": joined.measured[split]["personal"][metric]
            for split, metric in MEASURES
        }

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Strongly convex problems with known minimizers, and APFL run on them.

Quadratics can be spread: with spread s the minimizer of client i is ``w* + s (x_i -
w*)``, so that Delta_i, and zeta_i at w*, grow with s^2 while w* and all matrices stay.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend import theory
from fedblend.core import Loss
from fedblend.data.federated import FederatedData
from fedblend.trees import precision
from fedblend_reproductions.apfl import theory as apfl
from fedblend_reproductions.apfl.averaged import apfl_averaged
from fedblend_reproductions.flix import logistic

STEPS = 10
"""Local steps of a round, tau."""


class Strong(NamedTuple):
    """A problem: ``loss(spread)``, its constants and its minimizers.

    ``own`` are v_i*, ``shared`` is w*, ``norms`` the gradient norms at v_i*, and
    ``gaps(points, spreads)`` are f_i - f_i* at points [replicas, clients, dim].
    """

    name: str
    federated_data: FederatedData
    loss: Callable[[Any], Loss]
    constants: theory.Smoothness
    own: np.ndarray
    shared: np.ndarray
    norms: np.ndarray
    gaps: Callable[[np.ndarray, np.ndarray], np.ndarray]

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.own)

    def residual(self, share: float = 1.0) -> float:
        """``(zeta_i/mu + kappa L Delta_i)/b`` of Theorem 3 in the mean over clients.

        The supremum in zeta_i is over w* and all v_j*, and its unknown factor is 1.
        """
        smooth, convex = self.constants.smooth.max(), self.constants.convex.min()
        with precision("float64"):
            points = jnp.asarray(np.concatenate([self.shared[None], self.own]))
            zeta = apfl.gradient_diversity(self.loss(1.0), points, self.federated_data)
        delta = apfl.model_distances(self.own, self.shared)
        each = zeta / convex + smooth**2 / convex * delta
        return float(each.mean() / min(share, 0.5))


def quadratics(clients: int, dim: int, rows: int) -> Strong:
    """Quadratics with a condition number of at most 4; several rows make noise."""
    federated_data, shared = fb.datasets.quadratics(
        clients, dim, condition=4.0, rows=rows
    )
    parts = [federated_data.train.rows(client) for client in range(clients)]
    matrices = np.stack([np.asarray(a, np.float64).mean(axis=0) for a, _ in parts])
    vectors = np.stack([np.asarray(b, np.float64).mean(axis=0) for _, b in parts])
    own = np.linalg.solve(matrices, vectors[..., None])[..., 0]
    gradients = np.einsum("cij,cj->ci", matrices, own) - vectors

    def loss(spread):
        def spread_loss(params, batch):
            matrices, vectors = (jnp.asarray(part, params.dtype) for part in batch)
            center = jnp.einsum("nij,j->ni", matrices, jnp.asarray(shared))
            moved = (1 - spread) * center + spread * vectors
            return fb.datasets.quadratic_loss(params, (matrices, moved))

        return spread_loss

    def gaps(points, spreads):
        targets = shared + spreads[:, None, None] * (own - shared)
        off = points - targets
        return 0.5 * np.einsum("lci,cij,lcj->lc", off, matrices, off)

    return Strong(
        f"quadratics, {'noisy' if rows > 1 else 'full'} gradients",
        federated_data,
        loss,
        theory.constants.quadratics(federated_data),
        own,
        shared,
        np.linalg.norm(gradients, axis=1),
        gaps,
    )


def regression(name: str, clients: int) -> Strong:
    """Logistic regression with a penalty of 0.1, on a dataset of FLIX's paper."""
    of = logistic.problem(name, clients)

    def values(points):
        found = []
        for client in range(clients):
            margins = of.signed[of.owner == client] @ points[:, client].T
            squares = (points[:, client] ** 2).sum(axis=1)
            found.append(np.logaddexp(0, -margins).mean(axis=0) + of.l2 / 2 * squares)
        return np.stack(found, axis=1)

    least = values(of.personal[None])

    return Strong(
        f"logistic regression, {name}",
        of.federated_data,
        lambda spread: of.loss,
        of.smoothness,
        of.personal,
        logistic.optimum(of, 1.0).point,
        of.norms,
        lambda points, spreads: values(points) - least,
    )


class Replica(NamedTuple):
    """A setting: alpha, the spread of minimizers, and the rate ``top/(t + shift)``."""

    alpha: float
    spread: float
    top: float
    shift: float


def replica(of: Strong, alpha: float, spread: float = 1.0) -> Replica:
    """A replica with the schedule of Theorem 3 if alpha allows, else of Theorem 4."""
    small = alpha <= apfl.largest_alpha(of.constants)
    rule = apfl.small_alpha if small else apfl.any_alpha
    return Replica(alpha, spread, *rule(of.constants, STEPS))


def averaged(loss: Loss, this: Replica, work: dict[str, Any]) -> fb.Algorithm:
    """The rate and the averages of the theorems."""
    rate = fb.Scheduled(apfl.Decay(this.top, this.shift), "step")
    return apfl_averaged(
        loss, fb.Work(rate, **work), alpha=this.alpha, shift=this.shift
    )


def last(loss: Loss, this: Replica, work: dict[str, Any]) -> fb.Algorithm:
    """The rate of the theorems, and the models after the last step."""
    rate = fb.Scheduled(apfl.Decay(this.top, this.shift), "step")
    return fb.apfl(loss, fb.Work(rate, **work), alpha=this.alpha, learn="fixed")


def constant(loss: Loss, this: Replica, work: dict[str, Any]) -> fb.Algorithm:
    """The first rate of the theorems throughout, and the last models."""
    rate = this.top / (1 + this.shift)
    return fb.apfl(loss, fb.Work(rate, **work), alpha=this.alpha, learn="fixed")


class Trace(NamedTuple):
    """Local steps at each record, and gaps [replicas, seeds, records, clients]."""

    steps: np.ndarray
    gaps: np.ndarray

    def means(self) -> np.ndarray:
        """Means over clients, [replicas, seeds, records]."""
        return self.gaps.mean(axis=-1)

    def slopes(self) -> np.ndarray:
        """Slopes of log gap over log steps in the last decade of steps, by replica."""
        late = self.steps >= self.steps[-1] / 10
        means = np.log(self.means().mean(axis=1)[:, late])
        return np.polyfit(np.log(self.steps[late]), means.T, 1)[0]


def run(
    of: Strong,
    replicas: list[Replica],
    build: Callable[[Loss, Replica, dict[str, Any]], fb.Algorithm] = averaged,
    *,
    rounds: int,
    seeds: int,
    batch_size: int | None,
    share: float = 1.0,
    records: int = 20,
) -> Trace:
    """All replicas and seeds side by side in float64, from the origin."""
    work = {"steps": STEPS, "batch_size": batch_size}
    steps, gaps = [], []
    spreads = np.repeat([one.spread for one in replicas], seeds)
    with precision("float64"):
        over = Replica._make(
            jnp.repeat(jnp.asarray(part), seeds) for part in zip(*replicas, strict=True)
        )
        completed = fb.simulate(
            lambda this: build(of.loss(this.spread), this, work),
            jnp.zeros(of.own.shape[1]),
            of.federated_data,
            jnp.tile(jax.random.split(jax.random.key(0), seeds), len(replicas)),
            rounds=rounds,
            cohort=round(share * of.clients),
            every=rounds // records,
            over=over,
        )
        for record in completed:
            if record[0].round:
                models = [completed.personal(client) for client in range(of.clients)]
                points = np.stack([np.asarray(model) for model in models], axis=1)
                steps.append(record[0].round * STEPS)
                gaps.append(of.gaps(points, spreads))
    shape = (len(replicas), seeds, len(steps), of.clients)
    return Trace(np.array(steps), np.stack(gaps, axis=1).reshape(shape))

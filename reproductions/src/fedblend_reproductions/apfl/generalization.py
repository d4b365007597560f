# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The alpha that minimizes APFL's bound on the risk of a mixture (its Theorem 1).

Alpha is the weight of the shared model; the paper's is one minus it. With probability
at least 1 - delta, for the mixture on client i's own distribution D_i::

    risk <= 2 alpha^2 g_i + 2 (1 - alpha)^2 l_i,   least at alpha = l_i / (g_i + l_i)

    g_i = Lhat(shared) + B |Dbar - D_i|_1 + C sqrt((d + log(1/delta)) / m)
    l_i = L_i(h_i*) + 2 C sqrt((d + log(1/delta)) / m_i) + G lambda_H(S_i)

m_i are the training rows of client i, m those of all, Dbar is the plain mean of all
D_i, Lhat the training loss on it, h_i* the best model for D_i, and lambda_H(S_i) the
largest mean of |h(x) - h'(x)| over S_i, the client's rows, for two models of the class.

What the theorem assumes: a class of models of VC dimension d; a loss in [0, B], that is
G-Lipschitz in the prediction; the squared hinge loss or the squared error (2 and the
squares come from it); mixed *outputs* (for linear models the same as mixed parameters);
independent rows. It says that some C exists, not which.

The resulting alpha is therefore a guide only:

- The user chooses C, B, G and d, on which alpha depends. Cross entropy is not bounded.
- The least value, ``2 g l / (g + l)``, is never below the smaller one of g and l, which
  bound the two models by themselves: the bound never proves that mixing helps.
- As m_i grows, l tends to ``L_i(h_i*) + G lambda_H``, and alpha to 0 only if that does;
  the text of the paper says it always does.
- The paper's proof has B^2 where its statement has B; this is the statement.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461, Theorem 1 and equation (3).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.batches import everything
from fedblend.checks import CHANCE, NOT_NEGATIVE, each_client, gate
from fedblend.core import Loss, PyTree, Shard
from fedblend.data.federated import FederatedData
from fedblend.losses import objective
from fedblend.mixing import Apply, predict
from fedblend.theory.constants import client_values
from fedblend_reproductions.clients import CHUNK, map_clients


class Sides(NamedTuple):
    """The two sides of the bound for every client: ``shared`` is g, ``local`` is l."""

    shared: np.ndarray
    local: np.ndarray

    @property
    def alpha(self) -> np.ndarray:
        """The weight of the shared model with the least bound; 1 if it is flat."""
        total = self.shared + self.local
        return np.divide(self.local, total, out=np.ones_like(total), where=total > 0)

    def bound(self, alpha) -> np.ndarray:
        """The bound on every client's risk, at one alpha or one for each."""
        alpha = client_values("alpha", alpha, len(self.shared))
        return 2 * alpha**2 * self.shared + 2 * (1 - alpha) ** 2 * self.local


BY_CLIENT = each_client(NOT_NEGATIVE)


@gate(
    shared_loss=NOT_NEGATIVE,
    local_loss=BY_CLIENT,
    distance=BY_CLIENT,
    dimension=NOT_NEGATIVE,
    constant=NOT_NEGATIVE,
    delta=CHANCE,
    largest=NOT_NEGATIVE,
    lipschitz=NOT_NEGATIVE,
    disagreement=BY_CLIENT,
)
def sides(
    shared_loss: float,
    local_loss: float | np.ndarray,
    distance: float | np.ndarray,
    counts: np.ndarray,
    *,
    dimension: float,
    constant: float = 1.0,
    delta: float = 0.05,
    largest: float = 1.0,
    lipschitz: float = 1.0,
    disagreement: float | np.ndarray = 0.0,
) -> Sides:
    """Both sides from their parts; a single number holds for all clients.

    Args:
        shared_loss: Lhat of the shared model, the mean over clients.
        local_loss: L_i(h_i*); the loss of the client's own model on held-out rows is an
            upper estimate.
        distance: |Dbar - D_i|_1, between 0 and 2.
        counts: m_i, training rows of every client.
        dimension: d; for linear models the number of parameters is usual.
        constant: C.
        delta: the chance that the bound does not hold.
        largest: B, the largest value of the loss.
        lipschitz: G.
        disagreement: lambda_H(S_i).

    >>> sides(0.1, 0.1, 0.0, np.array([1, 9999]), dimension=5).alpha.round(2)
    array([0.98, 0.55])
    """
    counts = np.asarray(counts, np.float64)
    if not counts.min() >= 1:
        raise ValueError(f"counts: {counts.min():g} is not at least 1 row")
    own_loss = client_values("local_loss", local_loss, len(counts))
    apart = client_values("distance", distance, len(counts))
    disagree = client_values("disagreement", disagreement, len(counts))
    if apart.max() > 2 + 1e-9:
        raise ValueError(f"distance: {apart.max():g} is not in [0, 2]")
    doubt = constant * np.sqrt(dimension + np.log(1 / delta))
    shared = shared_loss + largest * apart + doubt / np.sqrt(counts.sum())
    local = own_loss + 2 * doubt / np.sqrt(counts)
    return Sides(shared, local + lipschitz * disagree)


def label_distances(counts: np.ndarray) -> np.ndarray:
    """|Dbar - D_i|_1 of the labels alone, for every client.

    It is a lower bound of the distance of distributions of rows, exact if rows of one
    class have the same distribution at all clients; where inputs differ too it is too
    small. Shares of a few rows scatter, which makes it too large: by chance alone a
    client of m_i rows is off by up to sqrt(classes / m_i) in the mean.

    Args:
        counts: rows of each class at every client, [clients, classes]; or shares, as
            those of ``clusters.label_signatures``.

    >>> label_distances(np.array([[10, 0], [0, 5]]))
    array([1., 1.])
    """
    counts = np.asarray(counts, np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    if not totals.min() > 0:
        empty = int(totals.argmin())
        raise ValueError(f"counts: client {empty} has no rows of any class")
    shares = counts / totals
    return np.abs(shares - shares.mean(axis=0)).sum(axis=1)


def plug_in(
    loss: Loss,
    apply: Apply,
    federated_data: FederatedData,
    shared: PyTree,
    personal: PyTree,
    *,
    distance: float | np.ndarray,
    dimension: float,
    chunk: int = CHUNK,
    **constants: float,
) -> Sides:
    """Both sides with estimates from a run in place of the unknown quantities.

    All from training rows: Lhat is the mean over clients of the loss of ``shared``,
    L_i(h_i*) the loss of client i's own model, which is too small if it was fitted to
    these rows, and lambda_H(S_i) the mean of |h(x) - h'(x)| of these two models, summed
    over outputs, which is never more than the supremum. The last two make l and thus
    alpha too small; ``sides`` takes better estimates.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        apply: the forward pass.
        federated_data: whose training rows ``(inputs, targets)``.
        shared: the shared model.
        personal: the clients' own models, with a leading axis of clients.
        distance: see ``label_distances``.
        dimension: d.
        chunk: clients of a group; see ``map_clients``.
        constants: ``constant``, ``delta``, ``largest``, ``lipschitz`` of ``sides``.
    """

    def losses(shard: Shard):
        batch, own = everything(shard), trees.take(personal, shard.id)
        gaps = jnp.abs(
            predict(apply, shared, batch.rows[0]) - predict(apply, own, batch.rows[0])
        )
        apart = objective(
            lambda gaps, rows: gaps.reshape(len(gaps), -1).sum(axis=1), gaps, batch
        )
        return objective(loss, shared, batch), objective(loss, own, batch), apart

    together, alone, apart = (
        np.asarray(values, np.float64)
        for values in map_clients(losses, federated_data.train, chunk)
    )
    return sides(
        float(together.mean()),
        alone,
        distance,
        federated_data.train.counts,
        dimension=dimension,
        disagreement=apart,
        **constants,
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which of several arms costs a client least: its own rows, shrunk to the federation.

An arm is a way to get a model: a mixture at one alpha, another method, training alone.
Client i has the costs of all arms (an error, a loss) on the same n_i rows, on which
none of these models was trained. Their mean c_i, over arms, is modeled by::

    c_i = u_i + noise,    noise ~ N(0, S_i),    S_i = covariance of its rows / n_i
    u_i ~ N(a + b log(rows that it trains on), B)

u_i is what the client would pay on infinitely many rows. a, b and B are the
federation's: what arms cost on average, how that changes with the number of rows, and
how much clients differ. Given them a client knows its posterior in closed form::

    u_i | c_i ~ N(m + G (c_i - m), (I - G) B),    G = B (B + S_i)^-1,  m = a + b log n

With one arm and equal S this is the estimator of James and Stein. Few rows leave m, the
mean of clients of its size; many rows leave c_i. Models of a fold lack a few rows,
which b makes up for.

a, b and B come from expectation maximization. In each of its rounds a client sends
three small matrices (``client_statistics``), and the server needs nothing but their
mean over clients (``refine``): secure aggregation stays possible, no row and no single
client's cost leaves it. Few clients do not determine B, so B is pulled to a multiple of
the covariance of rows, and so is the latter's estimate on few rows.

The decision: the arm a of least ``E[u_a] + guard E[max(0, u_a - min over references
u_r)]``. The second term is the expected harm, what the client loses against the best of
its references, training alone and the shared model. A guard of 0 asks for the mean
alone; a large one deploys nothing but a reference unless it is surely not worse.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

PRIOR_ROWS = 30.0
"""As many rows count for the mean covariance in each client's covariance of rows."""
PRIOR_CLIENTS = 3.0
"""As many clients count for a multiple of the covariance of rows in B."""
PRIOR_SLOPE = 1.0
"""As many clients, with e times the rows of others, count for a slope of 0."""
ROUNDS = 40
DRAWS = 2000
_JITTER = 1e-4


class Scores(NamedTuple):
    """What a client knows: costs of all arms on rows that their models did not see."""

    costs: np.ndarray
    """[rows, arms], of which less is better."""
    trained: int
    """Rows on which these models were trained."""
    deployed: int
    """Rows on which the models that are deployed are trained."""

    @property
    def features(self) -> np.ndarray:
        """What the mean over similar clients depends on."""
        return np.array([1.0, np.log(max(self.trained, 1))])


class Federation(NamedTuple):
    """What the server knows, and sends to all clients."""

    within: np.ndarray
    """[arms, arms], covariance of the costs of one row, mean over clients."""
    line: np.ndarray
    """[2, arms], mean costs at one row, and their slope in the logarithm of rows."""
    between: np.ndarray
    """[arms, arms], B: covariance of what clients pay."""


class Posterior(NamedTuple):
    """What a client believes that arms cost it."""

    mean: np.ndarray
    covariance: np.ndarray


class Decision(NamedTuple):
    """What a client deploys, and why."""

    arm: int
    unguarded: int
    """The arm that it would deploy with a guard of 0."""
    expected: np.ndarray
    """Expected costs of all arms."""
    harm: np.ndarray
    """Expected harm of all arms, against the better of its references."""
    best: np.ndarray
    """The probability of each arm to cost least."""


def first_statistics(client: Scores) -> dict[str, Any]:
    """What a client sends at first; the server sees the mean over clients only."""
    rows, arms = client.costs.shape
    mean = client.costs.mean(axis=0) if rows else np.zeros(arms)
    off = client.costs - mean
    features = client.features * bool(rows)
    return {
        "freedom": np.array(max(rows - 1.0, 0.0)),
        "scatter": off.T @ off,
        "design": np.outer(features, features),
        "moment": np.outer(features, mean),
    }


def start(mean: dict[str, Any], clients: int) -> Federation:
    """The first guess: clients differ little."""
    within = mean["scatter"] / max(float(mean["freedom"]), 1e-12)
    arms = len(within)
    within = within + (_JITTER * np.trace(within) / arms + 1e-12) * np.eye(arms)
    line = _line(mean, clients)
    return Federation(within, line, within / 50)


def client_statistics(client: Scores, federation: Federation) -> dict[str, Any]:
    """What a client sends in a round of expectation maximization."""
    mean, covariance = fold_posterior(client, federation)
    features = client.features
    return {
        "design": np.outer(features, features),
        "moment": np.outer(features, mean),
        "second": np.outer(mean, mean) + covariance,
    }


def refine(mean: dict[str, Any], federation: Federation, clients: int) -> Federation:
    """The server's half of a round, of the mean over clients."""
    line = _line(mean, clients)
    cross = line.T @ mean["moment"]
    found = mean["second"] - cross - cross.T + line.T @ mean["design"] @ line
    scale = np.trace(np.linalg.solve(federation.within, found)) / len(found)
    pulled = clients * found + PRIOR_CLIENTS * scale * federation.within
    return federation._replace(line=line, between=pulled / (clients + PRIOR_CLIENTS))


def _line(mean: dict[str, Any], clients: int) -> np.ndarray:
    ridge = np.diag([1e-9, PRIOR_SLOPE / clients])
    return np.linalg.solve(mean["design"] + ridge, mean["moment"])


def fold_posterior(client: Scores, federation: Federation) -> Posterior:
    """What a client believes that the models of its folds cost."""
    within, line, between = federation
    prior = client.features @ line
    rows = len(client.costs)
    if not rows:
        return Posterior(prior, between)
    mean = client.costs.mean(axis=0)
    off = client.costs - mean
    known = off.T @ off + PRIOR_ROWS * within
    sampling = known / (rows - 1 + PRIOR_ROWS) / rows
    gain = np.linalg.solve(between + sampling, between).T
    covariance = between - gain @ between
    return Posterior(prior + gain @ (mean - prior), (covariance + covariance.T) / 2)


def posterior(client: Scores, federation: Federation) -> Posterior:
    """What a client believes that the deployed models cost, trained on all its rows."""
    more = np.log(max(client.deployed, 1)) - np.log(max(client.trained, 1))
    found = fold_posterior(client, federation)
    return found._replace(mean=found.mean + more * federation.line[1])


def learn(clients: Sequence[Scores], rounds: int = ROUNDS) -> Federation:
    """All rounds of both halves."""

    def mean(statistics: list[dict[str, Any]]) -> dict[str, Any]:
        return jax.tree.map(lambda *each: np.mean(each, axis=0), *statistics)

    number = len(clients)
    federation = start(mean([first_statistics(one) for one in clients]), number)
    for _ in range(rounds):
        sent = [client_statistics(one, federation) for one in clients]
        federation = refine(mean(sent), federation, number)
    return federation


def decide(
    belief: Posterior, references: Sequence[int], guard: float, draws: int = DRAWS
) -> Decision:
    """The arm of least expected cost and harm; ties go to the last arm.

    Expectations are means over draws that are the same for all clients.
    """
    values, vectors = np.linalg.eigh(belief.covariance)
    normal = np.random.default_rng(0).standard_normal((draws // 2, len(values)))
    normal = np.concatenate([normal, -normal])
    root = vectors * np.sqrt(np.maximum(values, 0))
    costs = belief.mean + normal @ root.T
    least = costs[:, list(references)].min(axis=1, keepdims=True)
    harm = np.maximum(costs - least, 0).mean(axis=0)
    best = np.bincount(costs.argmin(axis=1), minlength=len(values)) / len(costs)

    def last_least(values: np.ndarray) -> int:
        return len(values) - 1 - int(np.argmin(values[::-1]))

    return Decision(
        arm=last_least(belief.mean + guard * harm),
        unguarded=last_least(belief.mean),
        expected=belief.mean,
        harm=harm,
        best=best,
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which of several arms costs a client least: its own rows, shrunk to the federation.

An arm is a way to get a model: a mixture at one alpha, another method, training alone.
Client i has the costs of all arms (an error, a loss) on the same n_i rows, on which
none of these models was trained. Costs are at least 0. Clients differ in their noise:
squared errors of one client may be a hundred times those of another, and vary as much.
So the logarithms y_i of the mean costs are modeled, in which only ratios count::

    y_i = u_i + noise,    noise ~ N(0, S_i),    S_i = covariance of its rows / n_i
    u_i ~ t(a + b log(rows that it trains on), B),    with 4 degrees of freedom

where a row counts relative to the client's mean cost. exp(u_i) is what the client would
pay on infinitely many rows. a, b and B are the federation's: what arms cost on average,
how that changes with the number of rows, and how much clients differ; the distribution
of Student allows for a few that differ much. It is a normal one whose covariance is
B / q_i, with a weight q_i of each client. Given q_i a client knows its posterior in
closed form, and q_i is the fixed point of both::

    u_i | y_i ~ N(m + G (y_i - m), (I - G) B / q_i),  G = B (B + q_i S_i)^-1
    q_i = (4 + arms) / (4 + E[(u_i - m)^T B^-1 (u_i - m)]),  m = a + b log n

With one arm, equal S and q = 1 this is the estimator of James and Stein. Few rows leave
m, the mean of clients of its size; many rows leave y_i. Models of a fold lack a few
rows, which b makes up for.

a, b and B come from expectation maximization. In each of its rounds a client sends
three small matrices (``client_statistics``), and the server needs nothing but their
mean over clients (``refine``): secure aggregation stays possible, no row and no single
client's cost leaves it. Few clients do not determine B, so B is pulled to a multiple of
the covariance of rows, and so is the latter's estimate on few rows.

The decision: the arm a of least ``E[c_a] + guard E[max(0, c_a - min over references
c_r)]``, where the costs c = exp(u). The second term is the expected harm, what the
client loses against the best of its references, training alone and the shared model. A
guard of 0 asks for the mean alone; a large one deploys nothing but a reference unless
it is surely not worse.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

PRIOR_ROWS = 1 / 3
"""As many rows for each pair of arms count for the mean covariance in each client's
covariance of rows. Three arms need few, and clients differ: where many rows train the
arms, they hardly differ, and so do their costs."""
PRIOR_CLIENTS = 3.0
"""As many clients count for a multiple of the covariance of rows in B."""
PRIOR_SLOPE = 1.0
"""As many clients, with e times the rows of others, count for a slope of 0."""
PRIOR_COST = 2.0
"""As many rows cost all arms the same: so no mean cost is 0, which has no logarithm."""
FREEDOM = 4.0
"""Of the distribution of Student, by which clients differ."""
STEPS = 10
"""Of the fixed point of a client's weight."""
ROUNDS = 40
DRAWS = 2000
_JITTER = 1e-4


class ClientCosts(NamedTuple):
    """What a client knows: costs of all arms on rows that their models did not see."""

    costs: np.ndarray
    """[rows, arms], at least 0, of which less is better."""
    trained: int
    """Rows on which these models were trained."""
    deployed: int
    """Rows on which the models that are deployed are trained."""

    @property
    def features(self) -> np.ndarray:
        """What the mean over similar clients depends on."""
        return np.array([1.0, np.log(max(self.trained, 1))])

    def relative(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of the mean costs, and what rows differ by, in mean costs.

        The rows that cost all arms the same cost what this client's rows do, and one of
        them is a row of the federation, which costs ``level``.
        """
        rows, arms = self.costs.shape
        own = (self.costs.sum() / arms + level) / (rows + 1)
        means = (self.costs.sum(axis=0) + PRIOR_COST * own) / (rows + PRIOR_COST)
        off = self.costs - self.costs.mean(axis=0) if rows else self.costs
        return np.log(means), off / means


class CostMoments(NamedTuple):
    """What the server knows, and sends to all clients."""

    level: float
    """What a row costs, mean over clients and arms."""
    within: np.ndarray
    """[arms, arms], covariance of the relative costs of one row, mean over clients."""
    line: np.ndarray
    """[2, arms], logarithm of the costs at one row, and slope in that of rows."""
    between: np.ndarray
    """[arms, arms], B: spread of the logarithms of what clients pay."""


class Posterior(NamedTuple):
    """What a client believes of the logarithms of what arms cost it."""

    mean: np.ndarray
    covariance: np.ndarray
    weight: float = 1.0
    """q, less than 1 of a client that differs much from the others."""


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


def first_statistics(client: ClientCosts) -> dict[str, Any]:
    """What a client sends at first; the server sees the mean over clients only."""
    known = len(client.costs) > 0
    cost = client.costs.mean() if known else 0.0
    return {"known": np.array(float(known)), "cost": np.array(cost)}


def second_statistics(client: ClientCosts, level: float) -> dict[str, Any]:
    """What a client sends then."""
    means, off = client.relative(level)
    rows = len(off)
    features = client.features * bool(rows)
    return {
        "freedom": np.array(max(rows - 1.0, 0.0)),
        "scatter": off.T @ off,
        "design": np.outer(features, features),
        "moment": np.outer(features, means),
    }


def start(mean: dict[str, Any], level: float, clients: int) -> CostMoments:
    """The first guess: clients differ little."""
    within = mean["scatter"] / max(float(mean["freedom"]), 1e-12)
    arms = len(within)
    within = within + (_JITTER * np.trace(within) / arms + 1e-6) * np.eye(arms)
    return CostMoments(level, within, _line(mean, clients), within / 50)


def client_statistics(client: ClientCosts, federation: CostMoments) -> dict[str, Any]:
    """What a client sends in a round of expectation maximization."""
    mean, covariance, weight = fold_posterior(client, federation)
    features = client.features
    return {
        "design": weight * np.outer(features, features),
        "moment": weight * np.outer(features, mean),
        "second": weight * (np.outer(mean, mean) + covariance),
    }


def refine(mean: dict[str, Any], federation: CostMoments, clients: int) -> CostMoments:
    """The server's half of a round, of the mean over clients."""
    line = _line(mean, clients)
    cross = line.T @ mean["moment"]
    found = mean["second"] - cross - cross.T + line.T @ mean["design"] @ line
    scale = np.trace(np.linalg.solve(federation.within, found)) / len(found)
    pulled = clients * found + PRIOR_CLIENTS * scale * federation.within
    # Where all clients are alike B tends to 0, and has to stay invertible.
    between = pulled / (clients + PRIOR_CLIENTS) + 1e-5 * federation.within
    return federation._replace(line=line, between=between)


def _line(mean: dict[str, Any], clients: int) -> np.ndarray:
    ridge = np.diag([1e-9, PRIOR_SLOPE / clients])
    return np.linalg.solve(mean["design"] + ridge, mean["moment"])


def fold_posterior(client: ClientCosts, federation: CostMoments) -> Posterior:
    """What a client believes that the models of its folds cost."""
    level, within, line, between = federation
    prior = client.features @ line
    rows = len(client.costs)
    if not rows:
        return Posterior(prior, between)
    means, off = client.relative(level)
    pull = PRIOR_ROWS * within.size
    sampling = (off.T @ off + pull * within) / (rows - 1 + pull) / rows
    # In coordinates where B is the identity and S diagonal, all of it is scalars.
    root = np.linalg.cholesky(between)
    noise, turn = np.linalg.eigh(
        np.linalg.solve(root, np.linalg.solve(root, sampling).T)
    )
    noise, back = np.maximum(noise, 0), root @ turn
    away, weight = turn.T @ np.linalg.solve(root, means - prior), 1.0
    for _ in range(STEPS):
        gain = 1 / (1 + weight * noise)
        spread = (gain * away) @ (gain * away) + gain @ noise
        weight = (FREEDOM + len(noise)) / (FREEDOM + float(spread))
    gain = 1 / (1 + weight * noise)
    covariance = back * (gain * noise) @ back.T
    return Posterior(prior + back @ (gain * away), covariance, weight)


def posterior(client: ClientCosts, federation: CostMoments) -> Posterior:
    """What a client believes that the deployed models cost, trained on all its rows."""
    more = np.log(max(client.deployed, 1)) - np.log(max(client.trained, 1))
    found = fold_posterior(client, federation)
    return found._replace(mean=found.mean + more * federation.line[1])


def learn(clients: Sequence[ClientCosts], rounds: int = ROUNDS) -> CostMoments:
    """All rounds of both halves."""

    def mean(statistics: list[dict[str, Any]]) -> dict[str, Any]:
        return jax.tree.map(lambda *each: np.mean(each, axis=0), *statistics)

    number = len(clients)
    first = mean([first_statistics(one) for one in clients])
    level = max(float(first["cost"] / first["known"]), 1e-12)
    federation = start(
        mean([second_statistics(one, level) for one in clients]), level, number
    )
    for _ in range(rounds):
        sent = [client_statistics(one, federation) for one in clients]
        federation = refine(mean(sent), federation, number)
    return federation


def decide(
    belief: Posterior, references: Sequence[int], guard: float, draws: int = DRAWS
) -> Decision:
    """The arm of least expected cost and harm; ties go to the last arm.

    Expectations are means over draws that are the same for all clients. What all arms
    cost alike is taken as known: a few large errors make it uncertain, and say nothing
    about which arm is better.
    """
    values, vectors = np.linalg.eigh(belief.covariance)
    normal = np.random.default_rng(0).standard_normal((draws // 2, len(values)))
    normal = np.concatenate([normal, -normal])
    root = vectors * np.sqrt(np.maximum(values, 0))
    ratios = normal @ root.T
    costs = np.exp(belief.mean + ratios - ratios.mean(axis=1, keepdims=True))
    least = costs[:, list(references)].min(axis=1, keepdims=True)
    harm = np.maximum(costs - least, 0).mean(axis=0)
    best = np.bincount(costs.argmin(axis=1), minlength=len(values)) / len(costs)

    expected = costs.mean(axis=0)

    def last_least(values: np.ndarray) -> int:
        return len(values) - 1 - int(np.argmin(values[::-1]))

    return Decision(
        arm=last_least(expected + guard * harm),
        unguarded=last_least(expected),
        expected=expected,
        harm=harm,
        best=best,
    )

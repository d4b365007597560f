# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Median and trimmed mean under attack: within a proven bound, and where they break.

``f_i(x) = 1/2 |x|^2 - b_i^T x`` with b_i the mean of n Gaussian rows around mu: the
problem of estimating mu, by gradient descent with rate r. All reductions here commute
with shifts, so that a round takes the error e to at most ``(1 - r) |e| + r Delta`` in
each coordinate, Delta being the largest error of the reduction over honest b_i and
anything that attackers may send. After T rounds it is at most ``(1 - r)^T |e_0| +
Delta``: Theorems 1 and 4 of the paper, whose factor 2 / lambda is 1 here.

*Median*, f of m clients attack, a = f / m < 1/2. The empirical distribution of honest
b_i is within s = sqrt(t / (m - f)) of the true one, but for a probability of 2 exp(-2t)
(Dvoretzky, Kiefer, Wolfowitz), attackers move it by a, and the median of an even number
of values is between two. Rows are Gaussian, so that ::

    Delta = sigma / sqrt(n) * Phi^-1(1/2 + a + s + 1/m)

which is at most the paper's ``C_eps (a + s + ...) sigma / sqrt(n)``: the slope of
Phi^-1 up to there is at most its C_eps.

*Trimmed mean*, k >= f values cut at either end, c = k / m. If the mean of honest b_i
is within u of mu, and each of them within v, what is cut and what attackers keep inside
lies within v as well::

    Delta = (u + 3 c v) / (1 - 2 c)

Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning:
towards optimal statistical rates", ICML 2018, arXiv:1803.01498.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import fedblend as fb
import problems
from fedblend.simulation import aggregators

CLIENTS, ROWS, DIM, SIGMA = 200, 9, 4, 1.5
RATE, ROUNDS = 0.5, 40
MU = np.array([1.0, -2.0, 0.5, 3.0])
FAILURE = 1e-4
"""How likely the bounds may fail, over all coordinates."""
HUGE = 1e4


def estimation(seed=0):
    """Clients that estimate mu, each from rows of its own."""
    rng = np.random.default_rng(seed)
    vectors = MU + SIGMA * rng.standard_normal((CLIENTS * ROWS, DIM))
    matrices = np.broadcast_to(np.eye(DIM), (CLIENTS * ROWS, DIM, DIM))
    parts = np.split(np.arange(CLIENTS * ROWS), CLIENTS)
    data = fb.federate((matrices, vectors), parts)
    return problems.Problem(data, problems.quadratic_loss, jnp.zeros(DIM))


ON = estimation()
FEDAVG = fb.fedavg(ON.loss, fb.Work(RATE, steps=1, batch_size=None))


def error(attack, factor, attackers, **settings):
    """The largest error of a coordinate in the end."""
    who = np.arange(CLIENTS) < attackers
    algorithm = fb.byzantine(FEDAVG, attack, attackers=who, factor=factor)
    usual: dict[str, Any] = {"rounds": ROUNDS, "every": ROUNDS}
    run = fb.simulate(
        algorithm, ON.params, ON.federated_data, jax.random.key(0), **usual, **settings
    )
    return float(np.abs(np.asarray(run.complete().shared) - MU).max())


def of_median(attackers):
    t = np.log(2 * DIM / FAILURE) / 2
    within = np.sqrt(t / (CLIENTS - attackers))
    place = 0.5 + attackers / CLIENTS + within + 1 / CLIENTS
    assert place < 1, "too many attackers for the theorem"
    return SIGMA / np.sqrt(ROWS) * norm.ppf(place)


def of_trimmed_mean(attackers, cut):
    honest = CLIENTS - attackers
    assert cut >= attackers
    single = SIGMA / np.sqrt(ROWS)
    u = single * norm.isf(FAILURE / (4 * DIM)) / np.sqrt(honest)
    v = single * norm.isf(FAILURE / (4 * DIM * honest))
    part = cut / CLIENTS
    return (u + 3 * part * v) / (1 - 2 * part)


ATTACKS = [("negate", HUGE), ("inner_product", 1.0), ("negate", 1.0), ("noise", HUGE)]
START = (1 - RATE) ** ROUNDS * np.abs(MU).max() + 1e-5
"""What is left of the start; float32 on numbers of size 3."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        *ATTACKS[:2],
        *(pytest.param(attack, marks=pytest.mark.slow) for attack in ATTACKS[2:]),
    ],
    ids=[f"{name} {factor:g}" for name, factor in ATTACKS],
)
def test_errors_are_within_the_bound_of_the_theorem(attack):
    name, factor = attack
    attackers = 20
    found = error(name, factor, attackers, reduction="median")
    assert found <= of_median(attackers) + START
    found = error(name, factor, attackers, reduction="trimmed_mean")
    assert found <= of_trimmed_mean(attackers, cut=20) + START


def test_no_answer_at_all_breaks_the_bound_of_one_round():
    """Attackers that see all honest values and send one beside the best place."""
    honest = np.stack(
        [np.mean(ON.federated_data.train.rows(c)[1], 0) for c in range(CLIENTS)]
    )
    for sent in (-1e30, 1e30, *np.quantile(honest[20:], (0.01, 0.3, 0.7, 0.99))):
        values = jnp.asarray(np.where(np.arange(CLIENTS)[:, None] < 20, sent, honest))
        everyone = jnp.ones(CLIENTS, bool)
        middle = np.abs(aggregators.median(everyone, values) - MU).max()
        assert middle <= of_median(20)
        within = np.abs(aggregators.trimmed(0.1)(everyone, values) - MU).max()
        assert within <= of_trimmed_mean(20, cut=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attackers", "settings"),
    [
        (1, {"reduction": "mean"}),
        (21, {"reduction": "trimmed_mean"}),
        (100, {"reduction": "median"}),
    ],
    ids=["mean, 1", "trimmed mean, 21 with trim 20", "median, 100 of 200"],
)
def test_one_attacker_more_than_a_reduction_allows_breaks_it(attackers, settings):
    """A long negated update then decides where the model goes."""
    assert error("negate", HUGE, attackers, **settings) > 100
    # All honest b_i are within 3 sigma / sqrt(n) of mu, and so are all medians.
    assert error("negate", HUGE, attackers - 1, **settings) < 3 * SIGMA


@pytest.mark.parametrize(("fraction", "count"), [(0.42, 150), (0.21, 300), (0.1, 40)])
def test_as_many_are_trimmed_as_the_fraction_says(fraction, count):
    """In float32 0.42 * 150 is 62.999996."""
    cut = round(fraction * count)
    values = np.zeros(count, np.float32)
    values[:cut] = 1e6
    everyone = jnp.ones(count, bool)
    assert float(aggregators.trimmed(fraction)(everyone, jnp.asarray(values))) == 0
    values[cut] = 1e6
    assert float(aggregators.trimmed(fraction)(everyone, jnp.asarray(values))) > 0


def started(reduction, attackers: int, **settings) -> np.ndarray:
    """Where FLIX starts, with x_i the mean of a client's rows."""
    local = fb.solvers.gradient_descent(ON.loss, 1.0, most=1)
    flix = fb.flix(ON.loss, lambda loss: FEDAVG, alpha=0.5, local=local)
    who = np.arange(CLIENTS) < attackers
    run = fb.simulate(
        fb.byzantine(flix, "negate", attackers=who, factor=HUGE),
        ON.params,
        ON.federated_data,
        jax.random.key(0),
        rounds=1,
        reduction=reduction,
        **settings,
    )
    next(iter(run))
    return np.asarray(run.shared)


def test_what_clients_send_at_enrollment_is_reduced_as_in_rounds():
    """By hand: x_i is the mean of nine rows, and attackers send -HUGE x_i."""
    rows = np.asarray(ON.federated_data.train.examples[1], np.float64)
    sent = rows.reshape(CLIENTS, ROWS, DIM).mean(axis=1)
    sent[:20] *= -HUGE
    # The weights alpha^2 L = 0.25 travel with x_i, and -HUGE times for attackers.
    weights = np.where(np.arange(CLIENTS) < 20, -HUGE, 1.0)
    expected = np.median(sent, axis=0) / np.median(weights)
    found = started("median", 20)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.abs(found - MU).max() < of_median(20)
    assert np.abs(started(fb.trimmed_mean(0.2), 20) - MU).max() < 1
    assert np.abs(started("mean", 20) - MU).max() > 1
    small = started("median", 20, chunk=7)
    np.testing.assert_array_equal(small, found)

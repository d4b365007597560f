# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scaffnew: the paper's loop with the same coins, its limits, and its theorem."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend.algorithms.scaffnew import Coin, ScaffnewClient, scaffnew
from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.errors import ConfigError

KAPPA, STEPS, CLIENTS, DIM = 400, 20, 5, 4
P = 1 / STEPS
"""That of the paper, 1/sqrt(kappa); the rate is 1/L = 1."""


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def paper(matrices, vectors, x, coins, rate, p, weights):
    """Algorithm 2 of the paper in NumPy: x_i and h_i after every communication."""
    n = len(matrices)
    x = [np.array(x, np.float64) for _ in range(n)]
    h = [np.zeros_like(x[0]) for _ in range(n)]
    for theta in coins:
        xhat = [
            x[i] - rate * (matrices[i] @ x[i] - vectors[i] - h[i]) for i in range(n)
        ]
        if theta:
            mean = sum((weights[i] * xhat[i] for i in range(n)), np.zeros_like(x[0]))
            x = [mean for _ in range(n)]
        else:
            x = xhat
        h = [h[i] + p / rate * (x[i] - xhat[i]) for i in range(n)]
        if theta:
            yield np.stack(x), np.stack(h)


def controls(run, rate, p):
    """h_i after the last communication, which a client learns of in the next round.

    Clients are the first axis, before replicas.
    """
    kept = jax.tree.map(np.asarray, run.client_states())
    return kept.control + p / rate * (np.asarray(run.shared)[None] - kept.reached)


def simulated(algorithm, on, *, rounds, weights="uniform", key=None, every=None):
    return fb.simulate(
        algorithm,
        jnp.asarray(on.params, jnp.float64),
        on.federated_data,
        jax.random.key(3) if key is None else key,
        rounds=rounds,
        weights=weights,
        every=every or rounds,
    )


def ill_conditioned():
    """One row a client: the eigenvalues of every A_i are between 1/400 and 1.

    The flattest direction is the same for all, so that their mean is as flat.
    """
    rng = np.random.default_rng(5)
    axes, _ = np.linalg.qr(rng.standard_normal((CLIENTS, DIM - 1, DIM - 1)))
    curvature = np.geomspace(1 / KAPPA, 1, DIM - 1) * np.ones((CLIENTS, 1, 1))
    matrices = np.zeros((CLIENTS, DIM, DIM))
    matrices[:, 0, 0] = 1 / KAPPA
    matrices[:, 1:, 1:] = (axes * curvature) @ axes.swapaxes(1, 2)
    vectors = matrices @ rng.standard_normal((CLIENTS, DIM, 1))
    data = fb.federate(
        (matrices, vectors[..., 0]), np.split(np.arange(CLIENTS), CLIENTS)
    )
    return problems.Problem(data, fb.datasets.quadratic_loss, jnp.zeros(DIM))


def far(run, on):
    """The squared distance to the optimum, as a part of that at the start."""
    gap, begin = problems.optimum(on) - [run.shared, np.asarray(on.params)]
    return (gap @ gap) / (begin @ begin)


@pytest.mark.parametrize("weights", ["uniform", "by_count"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_papers_loop_with_the_coins_that_fell(weights, steps):
    """Both are in float64 and differ by the order of sums, over some 40 steps."""
    on, rate, rounds = problems.quadratics(), 0.3, 12
    algorithm = scaffnew(on.loss, fb.Work(rate, steps=steps, batch_size=None))
    run = simulated(algorithm, on, rounds=rounds, weights=weights, every=1)
    ours, coins, before = [], [], 0
    for record in run:
        if record.round == 0:
            continue
        coins += [False] * (int(run.server.local) - before - 1) + [True]
        before = int(run.server.local)
        ours.append((np.asarray(run.shared), controls(run, rate, 1 / steps)))
    assert len(coins) > 20 or steps == 1
    counts = on.federated_data.train.counts if weights == "by_count" else np.ones(7)
    given = (on.params, coins, rate, 1 / steps, counts / counts.sum())
    theirs = list(paper(*problems.client_matrices(on), *given))
    assert len(theirs) == rounds
    for (x, h), (shared, control) in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(np.tile(shared, (7, 1)), x, rtol=0, atol=1e-13)
        np.testing.assert_allclose(control, h, rtol=0, atol=1e-13)


def test_with_one_step_it_is_gradient_descent():
    on, work = problems.quadratics(), fb.Work(0.3, steps=1, batch_size=None)
    one, two = (
        simulated(build(on.loss, work), on, rounds=9).shared
        for build in (scaffnew, fb.fedavg)
    )
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-14)


def test_it_ends_at_the_optimum_where_fedavg_stays_away():
    """The rate of the theorem is (1 - 1/400)^20 a round: e^-50 after 1,000 of them."""
    on, work = ill_conditioned(), fb.Work(1.0, steps=STEPS, batch_size=None)
    new, averaged = (
        far(simulated(build(on.loss, work), on, rounds=1000), on)
        for build in (scaffnew, fb.fedavg)
    )
    assert new < 1e-20
    assert averaged > 1e-3


def test_fewer_communications_than_gradient_descent():
    """The bounds of both are e^(-R/20) and e^(-R/200); half of that factor will do."""
    on = ill_conditioned()

    def rounds(build, steps):
        work = fb.Work(1.0, steps=steps, batch_size=None)
        run = simulated(build(on.loss, work), on, rounds=5000, every=10)
        for record in run:
            if far(run, on) < 1e-8:
                return record.round
        raise AssertionError

    descent, new = rounds(fb.fedavg, 1), rounds(scaffnew, STEPS)
    assert new < descent / 5


def test_the_bound_of_the_theorem():
    """E Psi_t <= (1 - q)^t Psi_0, q = min(rate mu, p^2), also where a coin stops t.

    Psi is sum |x_i - x|^2 + rate^2/p^2 sum |h_i - grad f_i(x)|^2.
    """
    on, seeds = ill_conditioned(), 16
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    algorithm = scaffnew(on.loss, fb.Work(1.0, steps=STEPS, batch_size=None))
    (matrices, vectors), best = problems.client_matrices(on), problems.optimum(on)
    slopes = (matrices @ best - vectors)[:, None]

    def psi(shared, h):
        away = np.square(shared - best[None]).sum(axis=-1)
        return CLIENTS * away + np.square(h - slopes).sum(axis=(0, -1)) / P**2

    first = psi(np.zeros((1, DIM)), np.zeros((CLIENTS, 1, DIM)))
    for rounds in (5, 60):
        run = simulated(algorithm, on, rounds=rounds, key=keys).complete()
        bound = (1 - 1 / KAPPA) ** np.asarray(run.server.local) * first
        ratios = psi(np.asarray(run.shared), controls(run, 1.0, P)) / bound
        assert ratios.mean() <= 1
        local, error = np.asarray(run.server.local), np.sqrt(rounds * (1 - P)) / P
        assert abs(local.mean() - STEPS * rounds) < 4 * error / np.sqrt(seeds)
        assert error / 2 < local.std() < 2 * error


def test_it_forgets_controls_whose_mean_is_not_zero():
    """So they are if a client is not heard: it settles its control with a later model.

    With the mean of xhat_i alone it would go to another point, and stay there.
    """
    on = problems.quadratics()
    plain = scaffnew(on.loss, fb.Work(0.4, steps=3, batch_size=None))

    def enroll(params, shard, key):
        return (), ScaffnewClient(params + shard.id, params - 1)

    run = simulated(plain._replace(enroll=enroll), on, rounds=200)
    np.testing.assert_allclose(run.shared, problems.optimum(on), rtol=0, atol=1e-12)
    np.testing.assert_allclose(controls(run, 0.4, 1 / 3).mean(0), 0, atol=1e-12)


def test_a_nudge_is_a_linear_term_of_the_loss():
    on, push = problems.quadratics(), jnp.asarray([0.3, -0.2, 0.1])
    shard = jax.device_put(on.federated_data.train.shard(4))
    coin = Coin(jnp.asarray(3, jnp.int32))
    said = fb.Down(on.params + 1, jnp.asarray(2, jnp.int32), extra={"scaffnew": coin})
    state, work = ScaffnewClient(on.params, push), fb.Work(0.2, 2, None)
    one, two = (
        scaffnew(loss, work).client(message, state, shard, jax.random.key(0))[0]
        for loss, message in (
            (on.loss, said._replace(correction=push)),
            (lambda x, rows: on.loss(x, rows) + x @ push, said),
        )
    )
    np.testing.assert_allclose(one.delta, two.delta, rtol=0, atol=1e-14)
    slopes = np.asarray([one.mean_gradient, two.mean_gradient])
    np.testing.assert_allclose(slopes[0], slopes[1] - push, rtol=0, atol=1e-14)


def test_every_step_has_rows_of_its_own():
    """2,500 steps that do not move see each of five rows 500 times, more or less."""
    on, client, local = problems.quadratics(), 4, 2500
    shard = jax.device_put(on.federated_data.train.shard(client))
    said = fb.Down(on.params, jnp.int32(0), extra={"scaffnew": Coin(jnp.int32(local))})
    state = ScaffnewClient(jnp.zeros(3), on.params)
    algorithm = scaffnew(on.loss, fb.Work(1e-9, steps=2, batch_size=1))
    up, _ = algorithm.client(said, state, shard, jax.random.key(0))
    matrices, vectors = on.federated_data.train.rows(client)
    slopes = matrices @ np.asarray(on.params) - vectors
    error = slopes.std(axis=0) / np.sqrt(local)
    found = np.asarray(up.mean_gradient)
    assert np.all(np.abs(found - slopes.mean(axis=0)) < 4 * error)


@pytest.mark.parametrize(
    ("optimizer", "steps", "line"),
    [
        (optax.adam(0.1), 2, "optimizer: an optimizer is not a constant learning rate"),
        (0.0, 2, "optimizer: 0.0 is not a number above 0"),
        (0.1, fb.Epochs(2), "steps: .* is not a whole number of at least 1"),
        (0.1, [1, 2], "steps: .1, 2. is not a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(optimizer, steps, line):
    with pytest.raises(ValueError, match=f"^scaffnew: work: {line}$"):
        scaffnew(lambda x, rows: rows, fb.Work(optimizer, steps, None))


def test_everyone_takes_part():
    on = problems.quadratics()
    algorithm = scaffnew(on.loss, fb.Work(0.1, steps=2, batch_size=None))
    with pytest.raises(ValueError, match="needs all 7 clients"):
        fb.simulate(
            algorithm,
            on.params,
            on.federated_data,
            jax.random.key(0),
            rounds=1,
            cohort=3,
        )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"schedule": {"name": "cosine", "unit": "round", "over": 9}},
         "schedule: a schedule is not a constant learning rate"),
        ({"rate": None, "optimizer": {"name": "adam", "rate": 0.1}},
         "optimizer: an optimizer is not a constant learning rate"),
        ({"steps": [2, 1, 2, 1, 2, 1]},
         "steps: [2, 1, 2, 1, 2, 1] is not a whole number of at least 1"),
        ({"steps": None, "epochs": 2},
         "steps: Epochs(number=2) is not a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_a_configuration_refuses(options, line, tiny):
    given = {**tiny["algorithm"], "name": "scaffnew"}
    tiny["algorithm"] = given
    tiny["run"].pop("cohort")
    assert build(check(tiny, "here")).algorithm.needs.everyone
    tiny["algorithm"] = {k: v for k, v in (given | options).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        build(check(tiny, "here"))
    assert str(caught.value) == f"here: algorithm.{line}"

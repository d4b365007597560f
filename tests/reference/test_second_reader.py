# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The personalized family against ``second_reader``, on full batches in float64.

Logistic regression (a Hessian that is not constant), five clients of uneven size of
which three take part in a round, several local steps. What is compared is the shared
model, what every client would deploy, and the weights that were learned.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import second_reader as paper

import fedblend as fb
from fedblend.contrib.l2gd import L2gdClient, Tosses
from fedblend.simulation.sampling import cohorts
from fedblend.trees import precision
from fedblend_reproductions.apfl.averaged import apfl_averaged

COUNTS, DIM, ROUNDS, STEPS = (3, 2, 6, 4, 5), 3, 4, 3
CLIENTS, ROWS = len(COUNTS), sum(COUNTS)
PARTS = np.split(np.arange(ROWS), np.cumsum(COUNTS)[:-1])
KEY_NUMBER, TOLERANCE = 2, 1e-10
"""Float64 rounds at 1e-16; twelve steps stay far below, another formula does not."""
FULL: dict[str, Any] = {"steps": STEPS, "batch_size": None}

rng = np.random.default_rng(5)
INPUTS = rng.standard_normal((ROWS, DIM))
LABELS = np.where(rng.random(ROWS) < 0.5, 1.0, -1.0)
OWN_ROWS = [(INPUTS[part], LABELS[part]) for part in PARTS]
BEGIN = np.linspace(-0.5, 0.5, DIM)
LOCAL = np.array([0.1, 0.5, 0.7, 1.0, 0.0])
"""The weight of v, as the papers write it."""


@pytest.fixture(autouse=True)
def wide():
    with precision("float64"):
        yield


def loss(w, rows):
    x, y = rows
    return jnp.log1p(jnp.exp(-y * (x @ w))) + paper.RIDGE / 2 * w @ w


def chosen(cohort=3):
    return cohorts(jax.random.key(KEY_NUMBER), list(range(ROUNDS)), CLIENTS, cohort)


def ran(algorithm, begin: Any = BEGIN, rows=(INPUTS, LABELS), cohort=3, every=ROUNDS):
    return fb.simulate(
        algorithm,
        jax.tree.map(jnp.asarray, begin),
        fb.federate(rows, PARTS),
        jax.random.key(KEY_NUMBER),
        rounds=ROUNDS,
        cohort=cohort,
        weights="uniform",
        every=every,
    )


def same(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == np.float64
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < TOLERANCE


def deployed(run):
    return np.stack([run.personal(i) for i in range(CLIENTS)])


def test_everybody_takes_part_and_nobody_always():
    """Otherwise the comparisons below would see less than they could."""
    taken = np.bincount(chosen().ravel(), minlength=CLIENTS)
    assert (taken > 0).all()
    assert (taken < ROUNDS).any()


@pytest.mark.parametrize("learn", ["step", "round", "fixed"])
def test_apfl(learn):
    run = ran(
        fb.apfl(
            loss,
            fb.Work(0.3, **FULL),
            alpha=1 - LOCAL,
            learn=learn,
            alpha_rate=None if learn == "fixed" else 0.2,
        )
    )
    said: dict[str, Any] = {"alpha_rate": 0.2, "when": learn, "weights": LOCAL}
    w, personal, weights = paper.apfl(
        OWN_ROWS, BEGIN, chosen(), rates=[0.3] * STEPS, **said
    )
    same(run.shared, w)
    same(deployed(run), personal)
    same([1 - run.client(i).alpha for i in range(CLIENTS)], weights)
    assert (learn == "fixed") == np.allclose(weights, LOCAL)


def test_apfl_outputs_of_the_theorems():
    # Step t = 1, 2 ... has the rate 3/(t + 7), and a schedule counts from 0.
    schedule = fb.Scheduled(lambda count: 3.0 / (count + 8), "step")
    run = ran(
        apfl_averaged(loss, fb.Work(schedule, **FULL), alpha=1 - LOCAL, shift=7.0)
    )
    said = {"rate": lambda t: 3 / (t + 7), "weights": LOCAL, "shift": 7.0}
    w, personal = paper.apfl_outputs(OWN_ROWS, BEGIN, chosen(), steps=STEPS, **said)
    same(deployed(run), personal)
    same(run.down.extra["apfl"].model, w)


@pytest.mark.parametrize("hessian", ["exact", "differences", "none"])
def test_perfedavg(hessian):
    said: dict[str, Any] = {"inner_rate": 0.4, "hessian": hessian, "delta": 0.01}
    run = ran(fb.algorithms.perfedavg(loss, fb.Work(0.3, **FULL), **said))
    w, personal = paper.perfedavg(
        OWN_ROWS, BEGIN, chosen(), steps=STEPS, rate=0.3, **said
    )
    same(run.shared, w)
    same(deployed(run), personal)


def test_pfedme_with_an_inner_problem_that_is_solved():
    inner: dict[str, Any] = {"inner_rate": 0.3, "inner_steps": 80}
    run = ran(
        fb.algorithms.pfedme(
            loss, fb.Work(0.1, **FULL), lam=2.0, server_rate=1.5, **inner
        )
    )
    said = {"rate": 0.1, "lam": 2.0, "server_rate": 1.5}
    w, theta = paper.pfedme(OWN_ROWS, BEGIN, chosen(), steps=STEPS, **said)
    same(run.shared, w)
    same(deployed(run), theta)


def test_ditto():
    inner = fb.fedavg(loss, fb.Work(0.3, **FULL))
    run = ran(fb.ditto(inner, loss, fb.Work(0.2, steps=2, batch_size=None), lam=0.7))
    said = {"rate": 0.3, "own_steps": 2, "own_rate": 0.2, "lam": 0.7}
    w, v = paper.ditto(OWN_ROWS, BEGIN, chosen(), steps=STEPS, **said)
    same(run.shared, w)
    same(deployed(run), v)


def test_l2gd_with_the_coins_that_fell():
    """The paper's rate is n (1 - p) times ours. A round is its local steps, then the
    averagings up to the next local step; the first local steps come before any."""
    lam, p = 0.5, 0.4
    run = ran(
        fb.algorithms.l2gd(loss, 0.3, lam=lam, p=p, batch_size=None),
        cohort=CLIENTS,
        every=1,
    )
    coins, before = [], (0, 0)
    for _ in run:
        now = (int(run.server.local), int(run.server.averaging))
        coins += ["local"] * (now[0] - before[0]) + ["mean"] * (now[1] - before[1])
        before = now
    rate = 0.3 * CLIENTS * (1 - p)
    middle, y = paper.l2gd(OWN_ROWS, BEGIN, coins, rate=rate, lam=lam, p=p)
    assert coins.count("mean") >= ROUNDS
    same(run.shared, middle)
    same(deployed(run), y)


def test_l2gds_slope_is_the_mean_gradient():
    """No model shows it: transforms use it, and an int32 divides in float32."""
    train = fb.federate((INPUTS, LABELS), PARTS).train
    none, three = jnp.int32(0), jnp.int32(3)
    down = fb.Down(jnp.asarray(BEGIN), none, extra={"l2gd": Tosses(none, three)})
    up, _ = fb.algorithms.l2gd(loss, 0.3, lam=0.5, p=0.4, batch_size=None).client(
        down,
        L2gdClient(down.shared),
        jax.device_put(train.shard(2)),
        jax.random.key(0),
    )
    same(up.mean_gradient, -up.delta / (3 * 0.3))


def test_fedrep():
    begin = {"body": rng.standard_normal((DIM, 2)), "head": np.array([0.5, -1.0])}

    def bilinear(params, rows):
        return (rows[0] @ params["body"] @ params["head"] - rows[1]) ** 2 / 2

    work: dict[str, Any] = {"head_steps": 2, "steps": STEPS}
    run = ran(
        fb.algorithms.fedrep(
            bilinear,
            fb.Work(0.2, steps=STEPS, batch_size=None),
            head="head".__eq__,
            head_steps=2,
        ),
        begin,
    )
    first = begin["body"], begin["head"]
    body, heads = paper.fedrep(OWN_ROWS, *first, chosen(), rate=0.2, **work)
    models = [run.personal(i) for i in range(CLIENTS)]
    same([model["head"] for model in models], heads)
    same([model["body"] for model in models], [body] * CLIENTS)


@pytest.mark.parametrize(("cohort", "steps"), [(CLIENTS, 1), (3, STEPS)])
def test_agnostic(cohort, steps):
    said = {"q_rate": 0.2, "steps": steps}
    run = ran(
        fb.algorithms.agnostic(
            loss,
            fb.Work(0.3, steps=steps, batch_size=None),
            clients=CLIENTS,
            q_rate=0.2,
        ),
        cohort=cohort,
    )
    w, q = paper.agnostic(OWN_ROWS, BEGIN, chosen(cohort), rate=0.3, **said)
    same(run.shared, w)
    same(run.down.extra["agnostic"], q)


def test_agnostic_apfl():
    chosen_q: dict[str, Any] = {"clients": CLIENTS, "q_rate": 0.2}
    run = ran(
        fb.algorithms.apfl_agnostic(
            loss, fb.Work(0.3, **FULL), alpha=1 - LOCAL, **chosen_q
        )
    )
    said: dict[str, Any] = {"alpha_rate": 0.3, "when": "step", "rates": [0.3] * STEPS}
    w, q, personal = paper.apfl_agnostic(
        OWN_ROWS, BEGIN, chosen(), weights=LOCAL, q_rate=0.2, **said
    )
    same(run.shared, w)
    same(run.down.extra["agnostic"], q)
    same(deployed(run), personal)


@pytest.mark.parametrize("grid", [0, 5])
def test_mapper(grid):
    """All rows of a client are the same, so that it does not matter which are held out.

    The rate is so large that training overshoots: otherwise the weight is always 1.
    """
    numbers = np.arange(CLIENTS)
    rows = np.repeat(INPUTS[numbers], COUNTS, 0), np.repeat(LABELS[numbers], COUNTS)
    work = fb.Work(10.0, **FULL)
    mapper = fb.algorithms.mapper(loss, work, held_out=0.5, grid=grid, alpha=0.5)
    run = ran(mapper, rows=rows)
    single = [(INPUTS[i : i + 1], LABELS[i : i + 1]) for i in numbers]
    tried = np.linspace(0, 1, grid) if grid else [0.5]
    w, mixed, weights = paper.mapper(
        single, BEGIN, chosen(), steps=STEPS, rate=10.0, grid=tried
    )
    same(run.shared, w)
    same(deployed(run), mixed)
    same([1 - run.client(i).alpha for i in range(CLIENTS)], weights)
    assert len(set(weights)) > 1 or not grid

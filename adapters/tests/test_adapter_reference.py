# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods on adapters beside NumPy transcriptions of their papers, on a linear model.

Both sides compute the same sums in float64, in another order: 1e-12 is some thousand
roundings of numbers of size 1.
"""

import adapter_transcription as paper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.simulation.sampling import cohorts

CLIENTS, COHORT, ROUNDS, STEPS, RATE, RANK = 5, 3, 6, 4, 0.1, 2
INPUTS, OUTPUTS = 4, 3
KEY = jax.random.key(11)
WORK = fb.Work(RATE, steps=STEPS, batch_size=None)
NAME = "weight"


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem():
    """Rows of clients whose targets come of weights that differ in a rank of 1."""
    rng = np.random.default_rng(5)
    base = rng.normal(size=(OUTPUTS, INPUTS))
    x = rng.normal(size=(CLIENTS * 6, INPUTS))
    y = np.empty((len(x), OUTPUTS))
    parts = np.split(np.arange(len(x)), CLIENTS)
    for part in parts:
        change = np.outer(rng.normal(size=OUTPUTS), rng.normal(size=INPUTS))
        y[part] = x[part] @ (base + change).T
    model = fb.Model(
        lambda key: {NAME: jnp.asarray(base)},
        lambda params, inputs: inputs @ params[NAME].T,
    )
    return base, [(x[part], y[part]) for part in parts], model, (x, y), parts


def adapted(how):
    _, _, model, (x, _), _ = problem()
    return fb.adapt.adapt(model, how=how, inputs=x, where=[NAME])


def run(algorithm, params):
    _, _, _, rows, parts = problem()
    return fb.simulate(
        algorithm,
        params,
        fb.federate(rows, parts),
        KEY,
        rounds=ROUNDS,
        cohort=COHORT,
        weights="uniform",
        every=ROUNDS,
    ).complete()


def members():
    return cohorts(KEY, list(range(ROUNDS)), CLIENTS, COHORT).tolist()


def start(model):
    """Initial parameters whose B is not zero, so that all gradients matter at once."""
    params = model.init(jax.random.key(1))
    return jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape),
        params,
    )


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def factors(adapter):
    return np.asarray(adapter["a"]), np.asarray(adapter["b"])


def test_fedsa_lora():
    model = adapted(fb.adapt.lora(RANK))
    params = start(model)
    base, data, *_ = problem()
    loss = fb.losses.squared_error(model.apply)
    a, b = paper.fedsa(base, data, *factors(params[NAME]), members(), RATE, STEPS)
    done = run(fb.algorithms.fedsa_lora(loss, WORK), params)
    close(done.shared[NAME]["a"], a)
    for client in range(CLIENTS):
        close(done.personal(client)[NAME]["b"], b[client])


@pytest.mark.parametrize(
    "name", ["rolora", pytest.param("ffa_lora", marks=pytest.mark.slow)]
)
def test_one_factor_at_a_time(name):
    model = adapted(fb.adapt.lora(RANK))
    params = start(model)
    base, data, *_ = problem()
    loss = fb.losses.squared_error(model.apply)
    turns = "b" * ROUNDS if name == "ffa_lora" else "ba" * (ROUNDS // 2)
    given = (*factors(params[NAME]), members(), RATE, STEPS, turns)
    a, b = paper.alternating(base, data, *given)
    done = run(getattr(fb.algorithms, name)(loss, WORK), params)
    close(done.personal(0)[NAME]["a"], a)
    close(done.shared[NAME]["b"], b)


@pytest.mark.slow
def test_fedalt_of_pillutla_on_two_adapters():
    model = fb.adapt.two_adapters(adapted(fb.adapt.lora(RANK)))
    params = start(model)
    base, data, *_ = problem()
    loss = fb.losses.squared_error(model.apply)
    begun = {part: factors(params[part][NAME]) for part in params}
    shared, own = paper.two_adapters(base, data, begun, members(), RATE, STEPS)
    algorithm = fb.algorithms.fedalt(
        loss, WORK, personal=["personal"], personal_steps=STEPS
    )
    done = run(algorithm, params)
    for found, wanted in zip(factors(done.shared["shared"][NAME]), shared, strict=True):
        close(found, wanted)
    for client in range(CLIENTS):
        found = factors(done.personal(client)["personal"][NAME])
        for one, wanted in zip(found, own[client], strict=True):
            close(one, wanted)


def test_fedalt_with_the_rest_of_the_world():
    """Partial cohorts: the mean of the others has the last adapter of each of them."""
    model = adapted(fb.adapt.gated_lora(RANK))
    params = start(model)
    params[NAME]["gate"] = jnp.zeros_like(params[NAME]["gate"])
    base, data, *_ = problem()
    loss = fb.losses.squared_error(model.apply)
    begun = factors(params[NAME]["personal"])
    own, gates = paper.fedalt(base, data, *begun, members(), RATE, STEPS)
    done = run(fb.algorithms.fedalt_lora(loss, WORK, clients=CLIENTS), params)
    assert max(np.abs(gate).max() for gate in gates) > 0.01
    for client in range(CLIENTS):
        found = done.personal(client)[NAME]
        others = [own[other] for other in range(CLIENTS) if other != client]
        rest = [np.mean(factor, axis=0) for factor in zip(*others, strict=True)]
        for place, wanted in (("personal", own[client]), ("shared", rest)):
            for one, other in zip(factors(found[place]), wanted, strict=True):
                close(one, other)
        close(found["gate"], gates[client])
        x = data[client][0]
        wanted = paper.outputs(base, x, own[client], rest, gates[client])
        close(model.apply(done.personal(client), x), wanted)

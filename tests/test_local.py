# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local training against literal NumPy loops on a quadratic.

The objective of a row (a, b) is ``(a x - b)^2 / 2``, entry by entry, so its gradient
is ``a (a x - b)``. Everything runs in float64, where the loops agree to rounding.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedblend import local
from fedblend.batches import epoch_order, random_rows, random_rows_of
from fedblend.core import Shard
from fedblend.data.federated import federate
from fedblend.local import Epochs, Scheduled, Work, descend, descend_times, plan_steps
from fedblend.losses import gradient

COUNTS = (5, 7, 3)
KEY = jax.random.key(7)
RATE = 0.1


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def federated_data():
    rng = np.random.default_rng(0)
    ends = np.cumsum(COUNTS)
    rows = (rng.normal(size=(15, 2)), rng.normal(size=(15, 2)))
    return federate(rows, np.split(np.arange(15), ends[:-1]))


def loss(params, rows):
    slopes, targets = rows
    return 0.5 * jnp.square(slopes * params["x"][None] - targets).sum(axis=1)


def numpy_gradient(x, rows):
    slopes, targets = rows
    return (slopes * (slopes * x - targets)).mean(axis=0)


FEDERATION = federated_data()
START = {"x": np.array([1.0, -2.0])}


def run(client, examples=FEDERATION.train.examples, **settings):
    chosen = {"optimizer": RATE, "steps": 4, "batch_size": None} | settings
    work = Work(*(chosen.pop(name) for name in Work._fields))
    shard = replace(FEDERATION.train.shard(client), examples=examples)
    variables = jax.tree.map(jnp.asarray, START)
    reached, mean_gradient = descend(
        gradient(loss), variables, shard, KEY, work=work, **chosen
    )
    return np.asarray(reached["x"]), np.asarray(mean_gradient["x"])


def loop(client, batches, rate=lambda step: RATE, push=lambda x: 0.0):
    """Plain SGD over the given batches of row numbers, and the mean raw gradient."""
    rows = FEDERATION.train.rows(client)
    x, slopes = START["x"].copy(), []
    for step, batch in enumerate(batches):
        slopes.append(numpy_gradient(x, tuple(leaf[batch] for leaf in rows)))
        x = x - rate(step) * (slopes[-1] + push(x))
    return x, np.mean(slopes, axis=0)


def agree(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


def everything(client, steps):
    return [np.arange(COUNTS[client])] * steps


@pytest.mark.parametrize("client", range(3))
def test_full_batches(client):
    agree(run(client), loop(client, everything(client, 4)))


@pytest.mark.parametrize("client", range(3))
def test_drawn_batches(client):
    picked = random_rows(FEDERATION.train.shard(client), KEY, (6, 2))
    assert int(picked.max()) < COUNTS[client]
    batches = list(np.asarray(picked))
    agree(run(client, steps=6, batch_size=2), loop(client, batches))


@pytest.mark.parametrize("client", range(3))
def test_clients_with_fewer_steps_stop(client):
    steps = np.array([2, 5, 1])
    expected = loop(client, everything(client, int(steps[client])))
    agree(run(client, steps=steps), expected)
    momentum = optax.sgd(RATE, momentum=0.9)
    alone = run(client, steps=int(steps[client]), optimizer=momentum)
    agree(run(client, steps=steps, optimizer=momentum), alone)


@pytest.mark.parametrize("steps", [9, np.array([9, 2, 4]), Epochs(3)])
def test_batches_drawn_step_by_step_are_those_drawn_at_once(steps, monkeypatch):
    at_once = [run(client, steps=steps, batch_size=2) for client in range(3)]
    monkeypatch.setattr(local, "MOST_DRAWN", 17)
    monkeypatch.setattr(local, "MOST_ORDERED", 20)
    for client, expected in enumerate(at_once):
        found = run(client, steps=steps, batch_size=2)
        np.testing.assert_array_equal(found, expected)


def test_row_numbers_of_one_step_are_those_of_all_steps():
    shard = FEDERATION.train.shard(1)
    for count in (1, 2, 3, 1000, 2**16 + 1, 2**31 - 1):
        many = replace(shard, count=jnp.int32(count))
        all_steps = random_rows(many, KEY, (5, 3))
        for step in range(5):
            alone = random_rows_of(many, KEY, 3, jnp.asarray(step))
            np.testing.assert_array_equal(alone, all_steps[step])


def test_memory_does_not_grow_with_the_number_of_batches():
    shard, start = FEDERATION.train.shard(0), jax.tree.map(jnp.asarray, START)

    def bytes_with(steps: int) -> int:
        work = Work(RATE, steps, 64)
        compiled = (
            jax.jit(lambda at: descend(gradient(loss), at, shard, KEY, work=work))
            .lower(start)
            .compile()
        )
        found = compiled.memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    assert bytes_with(2_000_000) == bytes_with(20_000)


def test_a_salt_changes_the_batches_and_nothing_else():
    shard = FEDERATION.train.shard(1)
    salted = [replace(shard, salt=jnp.array([7, n], jnp.uint32)) for n in (1, 2)]
    drawn = [np.asarray(random_rows(one, KEY, (40,))) for one in (shard, *salted)]
    assert len({tuple(rows) for rows in drawn}) == 3
    orders = [np.asarray(epoch_order(one, KEY)) for one in (shard, *salted)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 20, None])
@pytest.mark.parametrize("client", range(3))
def test_epochs_visit_every_row_once(client, size):
    shard = FEDERATION.train.shard(client)
    count, width = COUNTS[client], size or shard.capacity
    batches = []
    for epoch in range(2):
        order = np.asarray(epoch_order(shard, jax.random.fold_in(KEY, epoch)))[:count]
        assert sorted(order) == list(range(count))
        batches += [order[at : at + width] for at in range(0, count, width)]
    own, most = plan_steps(shard, Work(0.1, Epochs(2), size))
    assert own == len(batches) and most == 2 * -(-7 // width)
    agree(run(client, steps=Epochs(2), batch_size=size), loop(client, batches))


@pytest.mark.parametrize("steps", [4, np.array([4, 2, 3]), Epochs(2)])
def test_scheduled_by_step_counts_over_all_rounds(steps):
    def rate(step):
        return 0.1 / (1 + step)

    own = {"Epochs": 2}.get(type(steps).__name__, 4)
    got = run(0, steps=steps, optimizer=Scheduled(rate, "step"), round=3)
    agree(got, loop(0, everything(0, own), lambda step: rate(3 * own + step)))


def test_scheduled_by_round_holds_within_one():
    def schedule(round):
        return 0.1 / (1 + round)

    got = run(0, optimizer=Scheduled(schedule, "round"), round=jnp.int32(3))
    agree(got, loop(0, everything(0, 4), lambda step: 0.025))
    with pytest.raises(ValueError, match="unit: 'epoch' is not 'step' or 'round'"):
        run(0, optimizer=Scheduled(schedule, "epoch"))


def test_scheduled_makes_other_optimizers():
    got = run(0, optimizer=Scheduled(lambda step: RATE, "step", optax.adam))
    agree(got, run(0, optimizer=optax.adam(RATE)))


def test_adam():
    got, mean_gradient = run(0, optimizer=optax.adam(RATE), steps=5)
    x, rows = START["x"].copy(), FEDERATION.train.rows(0)
    first, second, slopes = np.zeros(2), np.zeros(2), []
    for step in range(1, 6):
        g = numpy_gradient(x, rows)
        slopes.append(g)
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        x = x - RATE * first / (1 - 0.9**step) / scale
    # optax raises the decay rates to the power of the step in float32.
    np.testing.assert_allclose(got, x, rtol=1e-5)
    np.testing.assert_allclose(mean_gradient, np.mean(slopes, axis=0), rtol=1e-5)


def test_slope_is_without_nudge_and_penalty():
    correction = np.array([0.5, -1.0])
    got = run(
        1,
        correction={"x": jnp.asarray(correction)},
        penalty=lambda params: jnp.square(params["x"]).sum(),
    )
    agree(got, loop(1, everything(1, 4), push=lambda x: correction + 2 * x))


def test_nudge_with_nothing_at_some_nodes():
    def both(variables, batch):
        one, other = variables
        return gradient(loss)(one, batch), gradient(loss)(other, batch)

    shard = FEDERATION.train.shard(0)
    start = jax.tree.map(jnp.asarray, (START, START))
    correction = np.array([0.5, -1.0])
    (one, other), _ = descend(
        both,
        start,
        shard,
        KEY,
        work=Work(RATE, 4, None),
        correction=({"x": jnp.asarray(correction)}, None),
    )
    pushed, _ = loop(0, everything(0, 4), push=lambda x: correction)
    np.testing.assert_allclose(one["x"], pushed, rtol=1e-12)
    np.testing.assert_allclose(other["x"], run(0)[0], rtol=1e-12)


@pytest.mark.parametrize("size", [None, 2])
def test_rows_of_other_clients_are_never_read(size):
    rows = jax.tree.map(np.copy, FEDERATION.train.examples)
    rows[0][COUNTS[0] :] = np.nan
    for steps in (4, Epochs(2)):
        clean = run(0, steps=steps, batch_size=size)
        agree(run(0, examples=rows, steps=steps, batch_size=size), clean)


def test_batches_are_the_same_in_both_precisions():
    shard = FEDERATION.train.shard(1)
    double = epoch_order(shard, KEY), random_rows(shard, KEY, (9,))
    with jax.enable_x64(False):
        single = epoch_order(shard, KEY), random_rows(shard, KEY, (9,))
    jax.tree.map(np.testing.assert_array_equal, double, single)


@pytest.mark.parametrize(
    ("dtype", "x64"),
    [(jnp.float32, False), (jnp.float32, True), (jnp.float64, True)],
)
@pytest.mark.parametrize("steps", [2, np.array([1, 2, 3]), Epochs(1)])
def test_dtypes_stay_and_nothing_is_weakly_typed(dtype, x64, steps):
    def direction(variables, batch):
        params, weight = variables
        return gradient(loss)(params, batch), weight

    with jax.enable_x64(x64):
        start = ({"x": jnp.zeros(2, dtype)}, jnp.asarray(0.5, dtype))
        shard = FEDERATION.train.shard(0)
        settings = {
            "round": jnp.int32(1),
            "correction": ({"x": jnp.ones(2, dtype)}, None),
            "penalty": lambda variables: 0.5 * jnp.square(variables[1]),
        }
        for optimizer in (RATE, optax.adam(RATE), Scheduled(lambda t: RATE, "step")):
            settings |= {"work": Work(optimizer, steps, 2)}
            reached = jax.eval_shape(
                lambda: descend(direction, start, shard, KEY, **settings)  # noqa: B023
            )
            for leaf in jax.tree.leaves(reached):
                assert leaf.dtype == dtype and not leaf.weak_type


def test_mapped_over_clients_is_each_alone():
    steps = np.array([2, 5, 1])
    shards = FEDERATION.train
    examples = jax.tree.map(jnp.asarray, shards.examples)

    def client(start, count, number):
        shard = Shard(examples, start, count, number, shards.capacity)
        variables = jax.tree.map(jnp.asarray, START)
        return descend(gradient(loss), variables, shard, KEY, work=Work(RATE, steps, 2))

    numbers = (shards.starts, shards.counts, np.arange(3))
    reached, mean_gradient = jax.vmap(client)(
        *(np.asarray(n, np.int32) for n in numbers)
    )
    for i in range(3):
        alone = run(i, steps=steps, batch_size=2)
        agree((reached["x"][i], mean_gradient["x"][i]), alone)


def by_loop(client, times):
    """Single steps in NumPy, each on the row that its own key draws."""
    examples, x, total = FEDERATION.train.rows(client), START["x"], np.zeros(2)
    shard = FEDERATION.train.shard(client)
    for number in range(times):
        picked = random_rows(shard, jax.random.fold_in(KEY, number), (1, 2))[0]
        found = numpy_gradient(x, [np.asarray(part)[picked] for part in examples])
        x, total = x - RATE * found, total + found
    return x, total / times


def test_a_number_of_steps_that_a_compiled_round_is_given():
    """Clients mapped together take each its own number, and no step more."""
    shards = [FEDERATION.train.shard(client) for client in range(3)]
    times, params = np.array([1, 6, 3], np.int32), jax.tree.map(jnp.asarray, START)

    def one(start, count, id, own):
        shard = replace(shards[0], start=start, count=count, id=id)
        work = Work(RATE, 99, 2)
        return descend_times(gradient(loss), params, shard, KEY, times=own, work=work)

    fields = [
        np.stack([getattr(s, f) for s in shards]) for f in ("start", "count", "id")
    ]
    reached, mean_gradient = jax.jit(jax.vmap(one))(*fields, times)
    for client, own in enumerate(times):
        x, mean = by_loop(client, own)
        np.testing.assert_allclose(reached["x"][client], x, rtol=1e-12)
        np.testing.assert_allclose(mean_gradient["x"][client], mean, rtol=1e-12)


@pytest.mark.parametrize("steps", [np.array([1, 2, 6]), Epochs(2)])
def test_a_client_takes_its_own_steps_only(steps):
    """Not as many as the client with the most steps."""
    shard, taken = federated_data().train.shard(2), []
    work = Work(RATE, steps, 2)

    def direction(here, batch):
        jax.debug.callback(lambda: taken.append(1))
        return here

    descend(direction, jnp.ones(2), shard, KEY, work=work)
    descend(direction, jnp.ones(2), federated_data().train.shard(0), KEY, work=work)
    jax.effects_barrier()
    own = [int(plan_steps(federated_data().train.shard(id), work)[0]) for id in (2, 0)]
    assert len(taken) == sum(own) < 2 * plan_steps(shard, work)[1]


def test_no_steps_read_no_batch():
    """As FedBABU's head, which stays where it is."""
    start = {"x": jnp.ones(2)}
    shard, work = federated_data().train.shard(0), Work(RATE, steps=0, batch_size=2)
    reached, mean_gradient = descend(gradient(loss), start, shard, KEY, work=work)
    np.testing.assert_array_equal(reached["x"], start["x"])
    np.testing.assert_array_equal(mean_gradient["x"], np.zeros(2))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated select: the same run as with the whole table, and what is sent."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend import compress
from fedblend.core import Down, Ragged, Sender
from fedblend.data.federated import Shards
from fedblend.simulation import serialize
from fedblend.transforms.central_loss import parameter_loss
from fedblend_reproductions.mixed.dual_encoder import (
    dual_encoder,
    dual_encoder_loss,
    spreadout,
)
from fedblend_reproductions.mixed.fedselect import (
    close_rows,
    count_rows,
    entries_touched,
    fedselect,
    gather,
    lacking,
    open_picked,
    scatter,
)

MOVIES, WIDTH, ROUNDS, CLIENTS = 24, 3, 4, 6
DENSE = WIDTH * WIDTH + WIDTH
TABLE: dict[str, Any] = {"rows": {"embedding": ("0", "1")}, "always": 1}
WORK: dict[str, Any] = {"steps": np.array([3, 1, 2, 3, 4, 2]), "batch_size": 3}
model = dual_encoder(MOVIES, width=WIDTH)
loss = dual_encoder_loss()
params = model.init(jax.random.key(0))


def movies(seed: int = 0, most: int = 9) -> fb.FederatedData:
    """Users who rate 4 to ``most`` movies; only those of odd number have padding."""
    rng = np.random.default_rng(seed)
    contexts, labels, partition = [], [], []
    for user in range(CLIENTS):
        own = rng.choice(np.arange(1, MOVIES + 1), rng.integers(4, most + 1), False)
        count = rng.integers(3, 9)
        context = rng.choice(own, (count, 4))
        context[:, 2:] *= rng.integers(0, 2, (count, 2)) if user % 2 else 1
        contexts.append(context)
        labels.append(rng.choice(own, count))
        partition.append(sum(map(len, labels[:-1])) + np.arange(count))
    flat = np.concatenate(contexts), np.concatenate(labels)
    return fb.federate(tuple(leaf.astype(np.int32) for leaf in flat), partition)


on = movies()
AVERAGE = fb.fedavg(loss, fb.Work(0.5, **WORK))
SPREAD = parameter_loss(lambda here: spreadout(here, 0.3))
ALGORITHMS = {
    "adam at the server": fb.algorithms.fedopt(
        loss, fb.Work(0.5, **WORK), optax.adam(0.05)
    ),
    "two-way": fb.transforms.mixed_fl(AVERAGE, SPREAD, how="two_way", steps=2),
}


def used(client: int) -> np.ndarray:
    """The rows of a client: its movies, and the padding's."""
    contexts, labels = on.train.rows(client)
    return np.array(sorted({0} | set(contexts.ravel()) | set(labels)))


def run(algorithm, rounds=ROUNDS, **settings):
    place = (algorithm, params, on, jax.random.key(1))
    return fb.simulate(*place, rounds=rounds, every=rounds, **settings)


@cache
def pair(name: str):
    """The run with the whole table, and the one with rows of it."""
    plain = ALGORITHMS[name]
    return [run(a, chunk=4).complete() for a in (plain, fedselect(plain, on, **TABLE))]


def update_of(algorithm):
    """From a client's data to the server's decoded update."""
    down = Down(params, jnp.zeros((), jnp.int32))

    def update(shard, key):
        message = algorithm.wire.tell(down, algorithm.wire.ask((), shard))
        up, _ = algorithm.client(message, (), shard, key)
        up = up._replace(mean_gradient=None, step_sum=None)
        return algorithm.wire.decode(up, Sender(shard.id, key, down))

    return update


def test_the_run_is_that_with_the_whole_table_bit_for_bit():
    whole, some = pair("adam at the server")
    jax.tree.map(np.testing.assert_array_equal, some.shared, whole.shared)
    jax.tree.map(np.testing.assert_array_equal, some.personal(2), whole.shared)
    assert np.abs(whole.shared.embedding - params.embedding).max() > 0.05


def test_the_decoded_update_of_a_client_is_the_same_bit_for_bit():
    """With a pull, epochs, and an optimizer that needs no correction to be plain."""
    work = fb.Work(optax.adam(0.1), steps=fb.Epochs(2), batch_size=3)
    plain = fb.algorithms.fedprox(loss, work, mu=0.4)
    both = [jax.jit(update_of(a)) for a in (plain, fedselect(plain, on, **TABLE))]
    for client in (0, 3):  # one without padding, one with
        whole, some = (
            update(on.train.shard(client), jax.random.key(3)) for update in both
        )
        jax.tree.map(np.testing.assert_array_equal, some.delta, whole.delta)
        assert np.abs(whole.delta.embedding).max() > 0.05


@pytest.mark.slow
def test_a_correction_moves_rows_that_clients_lack():
    """To rounding; a round's correction moves such rows by some hundredths."""
    whole, some = pair("two-way")
    for one, other in zip(*map(jax.tree.leaves, (some.down, whole.down)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    unused = sorted(set(range(1, MOVIES + 1)) - {m for c in range(6) for m in used(c)})
    moved = np.abs(whole.shared.embedding - params.embedding)
    assert moved[unused].min() > 1e-4
    assert len(unused) > 0


@pytest.mark.slow
def test_bits_are_those_of_a_clients_own_rows():
    whole, some = pair("adam at the server")
    entries = entries_touched(params, on, **TABLE)
    sizes = np.array([len(used(client)) for client in range(CLIENTS)])
    np.testing.assert_array_equal(entries, DENSE + WIDTH * sizes)
    np.testing.assert_array_equal(some.bits().down, ROUNDS * 32 * entries)
    up = ROUNDS * 32 * (entries + sizes)  # the numbers of the rows, once
    np.testing.assert_array_equal(some.bits().up, up)
    everything = 32 * fb.trees.size(params)
    np.testing.assert_array_equal(whole.bits().down, ROUNDS * everything)
    # What is deployed in the end is the whole model.
    assert some.summary()["bits"]["last_broadcast"] == CLIENTS * everything
    _, corrected = pair(
        "two-way"
    )  # the correction's rows; two numbers: rate times steps
    np.testing.assert_array_equal(corrected.bits().down, 2 * ROUNDS * 32 * entries)
    np.testing.assert_array_equal(corrected.bits().up, up + ROUNDS * 2 * 32)


def test_row_numbers_are_sorted_and_unique():
    use = count_rows(on, ("0", "1"), 1)
    asking = fedselect(AVERAGE, on, **TABLE).wire.ask
    ask = jax.jit(lambda shard: asking((), shard)[1][0])
    for client in range(CLIENTS):
        own, (buffer, count) = used(client), ask(on.train.shard(client))
        numbers = Ragged(np.asarray(buffer), np.asarray(count))  # pyright: ignore
        assert numbers.used == use.counts[client] == len(own)
        np.testing.assert_array_equal(numbers.buffer[: len(own)], own)
        assert numbers.buffer.shape == (use.counts.max(),)
        places = np.searchsorted(numbers.buffer, on.train.rows(client)[0])
        np.testing.assert_array_equal(own[places], on.train.rows(client)[0])
        assert (places[on.train.rows(client)[0] == 0] == 0).all()


def test_gather_and_scatter_are_numpys():
    table = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    numbers = Ragged(jnp.array([1, 4, 5, 7777]), jnp.array(3, jnp.int32))
    picked = gather(jnp.asarray(table), numbers)
    assert picked.values.used == 3 * 4
    np.testing.assert_array_equal(open_picked(picked)[:3], table[[1, 4, 5]])
    assert (np.asarray(open_picked(picked)[3]) == 0).all()
    wanted = np.zeros_like(table)
    wanted[[1, 4, 5]] = 2 * table[[1, 4, 5]]
    arrived = Ragged(jnp.array([1, 4, 5, 0]), numbers.used)  # zeros behind the end
    doubled = close_rows(2 * open_picked(picked), picked)
    for sent in (numbers, arrived):
        np.testing.assert_array_equal(scatter(doubled, sent), wanted)
        without = np.asarray(lacking(6, sent))
        np.testing.assert_array_equal(without, [True, False, True, True, False, False])


def test_messages_survive_bytes_and_back():
    algorithm = fedselect(ALGORITHMS["two-way"], on, **TABLE)
    down, _ = algorithm.start(params, None, None, jax.random.key(0))  # pyright: ignore
    shard, key = on.train.shard(1), jax.random.key(4)

    def sent(message):
        arrays, _ = serialize.unpack(serialize.pack(serialize.traveling(message)))
        return serialize.complete_message(arrays, message)

    message = algorithm.wire.tell(down, algorithm.wire.ask((), shard))
    update = jax.jit(lambda received: algorithm.client(received, (), shard, key)[0])
    up = update(sent(message))._replace(mean_gradient=None, step_sum=None)
    sender = Sender(shard.id, key, down)
    there, here = (algorithm.wire.decode(one, sender) for one in (sent(up), up))
    jax.tree.map(np.testing.assert_array_equal, there, here)


def begin(algorithm, federated_data=on):
    """Nothing is compiled: a simulation looks at the shapes first."""
    place = (algorithm, params, federated_data, jax.random.key(1))
    fb.simulate(*place, rounds=1)


@pytest.mark.parametrize(
    "chosen, complaint",
    [
        ({"rows": {}}, "rows names no parameter"),
        ({"rows": {"embeding": ("0",)}}, "no parameter 'embeding', there are 'embedd"),
        ({"rows": {"embedding": "0"}}, "'0' is no list of fields"),
        ({"rows": {"embedding": ("2",)}}, "no field '2' in the examples, which have"),
        ({"rows": {"dense/bias": ("1",)}}, r"row 2\d of 'dense/bias', whose shape is"),
        (
            {"rows": {"embedding": ("0", "1"), "dense/bias": ("1",)}},
            "field '1' is among .* parameters that share a field share all",
        ),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(chosen, complaint):
    with pytest.raises(ValueError, match=f"^fedselect: .*{complaint}") as caught:
        begin(fedselect(AVERAGE, on, **chosen))
    assert "\n" not in str(caught.value)


def test_fields_without_numbers_of_rows_are_refused():
    examples = (on.train.examples[0] - 1.5, on.train.examples[1] - 30)
    shards = Shards(examples, on.train.starts, on.train.counts)
    for field, what in (("0", "float64 from -1.5"), ("1", "int32 from -2")):
        with pytest.raises(ValueError, match=f"field '{field}' holds {what}"):
            count_rows(fb.FederatedData(shards), (field,))


def test_a_method_that_needs_all_rows_is_refused():
    for algorithm, complaint in (
        (fb.scaffold(loss, fb.Work(0.1, **WORK)), "have a state or send"),
        (fb.apfl(loss, fb.Work(0.1, **WORK), alpha=0.5), "have a state or send"),
        (fb.transforms.compressed(AVERAGE, compress.rand_k(1)), "are encoded already"),
        (
            fb.transforms.mixed_fl(
                fb.algorithms.fedprox(loss, fb.Work(0.1, **WORK), mu=1.0),
                SPREAD,
                how="one_way",
            ),
            "do not take plain steps of one rate",
        ),
        (
            fb.transforms.mixed_fl(AVERAGE, SPREAD, how="two_way", upload=True),
            "hold more than the model",
        ),
        (
            fb.transforms.mixed_fl(
                AVERAGE, SPREAD, how="one_way", compressor=compress.natural()
            ),
            "an encoded correction has no rows",
        ),
    ):
        with pytest.raises(ValueError, match=f"^fedselect: .*{complaint}"):
            begin(fedselect(algorithm, on, **TABLE))
    with pytest.raises(ValueError, match=r"^compressed: .* are encoded already"):
        begin(
            fb.transforms.compressed(
                fedselect(AVERAGE, on, **TABLE), compress.rand_k(1)
            )
        )
    with pytest.raises(ValueError, match="a transform around it sends whole"):
        begin(
            fb.transforms.downlink(fedselect(AVERAGE, on, **TABLE), compress.top_k(2))
        )
    with pytest.raises(ValueError, match="it needs 'mean'"):
        run(fedselect(AVERAGE, on, **TABLE), reduction="median")


def test_a_client_with_more_rows_than_planned_sends_nothing_usable():
    algorithm = fedselect(AVERAGE, movies(seed=5, most=4), **TABLE)
    shard = on.train.shard(int(count_rows(on, ("0", "1"), 1).counts.argmax()))
    aggregate = jax.jit(update_of(algorithm))(shard, jax.random.key(0))
    assert np.isnan(aggregate.delta.dense.bias).all()

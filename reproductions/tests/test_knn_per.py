# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""kNN-Per: its paper's equations, and both ends of the mixture."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.core import Down
from fedblend_reproductions.knn_per import knn_per, neighbors

COUNTS, DIM, WIDTH, CLASSES, K, GRID, HELD_OUT = (23, 12, 30, 1), 4, 3, 3, 4, 6, 0.3
KEY = jax.random.key(1)
DRAWS = np.random.default_rng(5)


def softmax(scores):
    powers = [np.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def nearest(x, inputs, labels, classes, k, scale):
    """Marfoq et al. 2022, eq. (8), with the kernel of the authors' code.

    Its distances are those of an ``IndexFlatL2``, that is squared ones, and its
    ``similarities = np.exp(-distances / (features_dimension * scale))``.
    """
    away = [((x - other) ** 2).sum() for other in inputs]
    order = sorted(range(len(inputs)), key=lambda row: away[row])[:k]
    similar = [np.exp(-distance / (len(x) * scale)) for distance in away]
    chances = [
        sum(similar[row] for row in order if labels[row] == one)
        for one in range(classes)
    ]
    return [chance / sum(chances) for chance in chances]


def literal(rows, new, body, head, lams, held_out, k, scale=1.0):
    """Marfoq et al. 2022, eq. (9): the chosen lam, and probabilities at new inputs.

    The features are ``inputs @ body``, the scores ``features @ head``. The first rows
    are those held out; all rows vote on new inputs.
    """
    inputs, labels = rows[0] @ body, rows[1]
    classes, cut = head.shape[1], int(held_out * len(labels))

    def chances(lam, x, memory):
        known, votes = memory
        ours, own = softmax(x @ head), nearest(x, known, votes, classes, k, scale)
        return [(1 - lam) * a + lam * b for a, b in zip(ours, own, strict=True)]

    best, least = 0.0, np.inf
    for lam in lams:
        total = 0.0
        for x, y in zip(inputs[:cut], labels[:cut], strict=True):
            total -= np.log(chances(lam, x, (inputs[cut:], labels[cut:]))[y] + 1e-300)
        if total < least:
            best, least = lam, total
    return best, np.array([chances(best, x, (inputs, labels)) for x in new @ body])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def federation():
    """The label of a row depends on its input, in a way of its own in each client."""
    inputs = 2 * DRAWS.normal(size=(sum(COUNTS), DIM))
    labels = inputs[:, :CLASSES].argmax(axis=1)
    labels[: COUNTS[0]] = (labels[: COUNTS[0]] + 1) % CLASSES
    ends = np.cumsum(COUNTS)
    return fb.federate((inputs, labels), np.split(np.arange(ends[-1]), ends[:-1]))


DATA = federation()
BODY, HEAD = DRAWS.normal(size=(DIM, WIDTH)), DRAWS.normal(size=(WIDTH, CLASSES))
NEW = DRAWS.normal(size=(7, DIM))


def halves(head=lambda params, values: values @ params["head"]):
    def init(key):
        return jax.tree.map(jnp.asarray, {"body": BODY, "head": HEAD})

    def features(params, inputs):
        return inputs @ params["body"]

    def apply(params, inputs):
        return head(params, features(params, inputs))

    return neighbors(fb.Model(init, apply, features, head))


MODEL: Any = halves()
LOSS = fb.losses.cross_entropy(MODEL.apply)
AVERAGE = fb.fedavg(LOSS, fb.Work(0.05, steps=2, batch_size=5))


def simulated(algorithm, **more):
    return fb.simulate(algorithm, MODEL.init, DATA, KEY, rounds=3, **more).complete()


def built(**more):
    given: dict[str, Any] = {"k": K, "held_out": HELD_OUT, "grid": GRID} | more
    return knn_per(AVERAGE, LOSS, features=MODEL.features, **given)


@pytest.fixture(scope="module")
def run():
    with jax.enable_x64(True):
        own = built()
        measure = {"loss": fb.metrics.mean_loss(LOSS)}
        return simulated(own, measure=measure, every=3)


def probabilities(params, inputs):
    return np.asarray(jax.nn.softmax(MODEL.apply(params, inputs)))


def test_it_is_its_papers_equations(run):
    """Float64 rounds at 1e-16."""
    body, head = (np.asarray(run.shared[name]) for name in ("body", "head"))
    lams, found = np.arange(GRID) / GRID, []
    for client in range(len(COUNTS)):
        rows = DATA.train.rows(client)
        lam, wanted = literal(rows, NEW, body, head, lams, HELD_OUT, K)
        own = run.personal(client)
        found.append(lam)
        np.testing.assert_allclose(1 - own.alpha, lam, atol=1e-12)
        np.testing.assert_allclose(probabilities(own, NEW), wanted, atol=1e-9)
    assert found[0] > 0 and found[-1] == 0, "a client without held-out rows"
    assert len(set(found)) > 2, "not only the ends of the grid"


def test_the_scale_is_that_of_the_authors_code(run):
    """Probabilities of a client at two scales, one of which makes all votes equal."""
    body, head = (np.asarray(run.shared[name]) for name in ("body", "head"))
    rows, lams = DATA.train.rows(0), np.arange(GRID) / GRID
    down, shard = Down(run.shared, jnp.zeros((), jnp.int32)), DATA.train.shard(0)
    for scale in (0.05, 1e9):
        own = built(scale=scale).personal(down, (), shard, KEY)
        lam, wanted = literal(rows, NEW, body, head, lams, HELD_OUT, K, scale)
        assert lam > 0
        np.testing.assert_allclose(probabilities(own, NEW), wanted, atol=1e-9)
    votes = probabilities(own._replace(alpha=jnp.zeros(())), NEW)
    np.testing.assert_allclose(K * votes, np.round(K * votes), atol=1e-6)


def test_the_shared_model_and_the_messages_are_those_of_fedavg(run):
    plain = simulated(AVERAGE)
    jax.tree.map(np.testing.assert_array_equal, run.shared, plain.shared)
    assert run.message_bits == plain.message_bits
    same = run.personal(0)._replace(alpha=jnp.ones(()))
    wanted = probabilities(plain.shared, NEW)
    np.testing.assert_allclose(probabilities(same, NEW), wanted, atol=1e-12)
    last = run.records[-1].measures["train"]
    assert last["personal"]["loss"].mean < last["shared"]["loss"].mean


def test_the_nearest_row_of_a_training_row_is_itself(run):
    inputs, labels = DATA.train.rows(0)
    alone = run.personal(0)._replace(alpha=jnp.zeros(()), k=jnp.array(1))
    np.testing.assert_array_equal(probabilities(alone, inputs).argmax(axis=1), labels)
    assert np.isfinite(MODEL.apply(alone, inputs)).all(), "a label that nobody has"
    few = alone._replace(k=jnp.array(1000))
    every = alone._replace(k=jnp.array(len(labels)))
    np.testing.assert_array_equal(MODEL.apply(few, NEW), MODEL.apply(every, NEW))


def test_a_single_score_is_the_log_odds_of_two_classes(run):
    two: Any = halves(lambda params, values: values @ params["head"][:, :2])
    one: Any = halves(
        lambda params, values: values @ (params["head"][:, 1] - params["head"][:, 0])
    )
    own = run.personal(2)
    own = own._replace(labels=own.labels % 2, alpha=jnp.array(0.4))
    scores = two.apply(own, NEW)
    wanted = scores[:, 1] - scores[:, 0]
    np.testing.assert_allclose(one.apply(own, NEW), wanted, atol=1e-12)
    signs = own._replace(labels=2 * own.labels - 1)
    np.testing.assert_array_equal(one.apply(signs, NEW), one.apply(own, NEW))


def test_far_from_all_rows_and_without_any(run):
    own = run.personal(0)._replace(alpha=jnp.zeros(()))
    far = probabilities(own, 1e4 * NEW)
    np.testing.assert_allclose(far.sum(axis=1), 1)
    assert (far.max(axis=1) > 0.4).all(), "the nearest row counts most"
    empty = own._replace(count=jnp.array(0))
    np.testing.assert_allclose(probabilities(empty, NEW), 1 / CLASSES)


def test_what_is_refused_in_one_line():
    plain = fb.Model(MODEL.init, MODEL.apply)
    line = "^neighbors: model: one without them is not a model with features"
    with pytest.raises(ValueError, match=line):
        neighbors(plain)
    twice = knn_per(AVERAGE, LOSS, features=MODEL.features)
    twice = knn_per(twice, LOSS, features=MODEL.features)
    line = "^knn_per: algorithm: one with a Neighbors is not an algorithm that deploys"
    down = Down(MODEL.init(KEY), jnp.zeros((), jnp.int32))
    with pytest.raises(ValueError, match=line):
        twice.personal(down, (), DATA.train.shard(0), KEY)

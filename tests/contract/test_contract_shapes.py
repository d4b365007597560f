# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Structure and dtypes of everything that is kept or said never change.

Every algorithm, and every transform over a quarter of them (over all of them in the
slow tests), by shapes alone: no arithmetic is done.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from registry import (
    CASES,
    ENCODED,
    ENCODERS,
    FORMED,
    ONE_OF_EACH,
    PRODUCT,
    formed,
)

import problems
from fedblend import keys, trees
from fedblend.core import Aggregate, Sender

PROBLEMS = {
    "quadratics": problems.quadratics(),
    "classes": problems.classes(),
    "adapted": problems.adapted(),
    "half": problems.classes()._replace(
        params=jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16), problems.classes().params
        )
    ),
}


def rounds_by_shape(algorithm, problem, rounds: int = 2):
    """The kept and said of enrollment and some rounds: no arithmetic is done."""
    shard = jax.device_put(problem.federated_data.train.shard(1))
    root = jax.random.key(0)
    share, count = jnp.ones((), jnp.float32), jnp.ones((), jnp.int32)
    # A second round of the same shapes is not traced again.
    client_round, server_round, personal = map(
        jax.jit, (algorithm.client, algorithm.server, algorithm.personal)
    )

    def play():
        join, client = algorithm.enroll(problem.params, shard, root)
        aggregate = Aggregate(join, share, count)
        down, server = algorithm.start(problem.params, aggregate, None, root)
        told, kept, said, models = [], [(client, down, server)], [], []
        for number in range(rounds):
            message = algorithm.wire.tell(down, algorithm.wire.ask(client, shard))
            key = keys.derive(root, "client", number, 1)
            up, client = client_round(message, client, shard, key)
            up = up._replace(mean_gradient=None, step_sum=None)
            decoded = algorithm.wire.decode(up, Sender(shard.id, key, down))
            aggregate = Aggregate(decoded, share, count)
            down, server = server_round(aggregate, down, server, None, root)
            told.append(message)
            kept.append((client, down, server))
            said.append((up, decoded))
            message = algorithm.wire.tell(down, algorithm.wire.ask(client, shard))
            models.append(personal(message, client, shard, root))
        return told, kept, said, models

    return jax.eval_shape(play)


def read_metadata(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def _in_turns() -> set[str]:
    """A quarter of the algorithms under each transform: each algorithm under three."""
    by_transform = [
        [name for name in ENCODED if name.startswith(f"{transform}(")]
        for transform in ENCODERS
    ]
    return {
        name for turn, names in enumerate(by_transform) for name in names[turn % 4 :: 4]
    }


LATER = ENCODED.keys() - _in_turns()
"""Pairs of a transform and an algorithm for the slow tests."""

PAIRS = [
    *(
        pytest.param(name, "half", marks=pytest.mark.slow if name in LATER else ())
        for name in PRODUCT
    ),
    *((name, "quadratics") for name in CASES),
    *(
        pytest.param(
            name, problem, marks=() if name in ONE_OF_EACH else pytest.mark.slow
        )
        for problem, names in (("classes", CASES), ("adapted", PRODUCT))
        for name in names
    ),
]
"""A dtype that changes shows best where parameters are not of the usual one."""


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_structure_and_dtypes(name, problem):
    on = formed(name, PROBLEMS[problem])
    params, played = on.params, rounds_by_shape(PRODUCT[name](on), on)
    _, kept, said, models = played
    for series in played:
        first, *others = [read_metadata(entry) for entry in series]
        assert all(other == first for other in others), "changes from round to round"
    assert not [leaf for leaf in jax.tree.leaves(played) if leaf.weak_type]
    wanted = read_metadata(params)
    assert all(read_metadata(down.shared) == wanted for _, down, _ in kept)
    assert all(read_metadata(model) == wanted for model in models)
    delta = said[0][1].delta
    if delta is not None:
        in_part = any(one in name for one in ("partial", *FORMED))
        parts = trees.where_given(delta, params) if in_part else params
        assert read_metadata(delta) == read_metadata(parts)
        assert jax.tree.leaves(delta)


def test_a_state_that_changes_its_dtype_is_refused_in_one_line():
    import fedblend as fb

    problem = PROBLEMS["quadratics"]
    work: dict[str, Any] = {"steps": 1, "batch_size": None}
    alone = fb.local_only(problem.loss, fb.Work(0.1, **work))
    momentum = fb.algorithms.fedopt(
        problem.loss, fb.Work(0.1, **work), optax.sgd(1.0, 0.5)
    )

    def halved(function):
        def changed(*arguments):
            said, after = function(*arguments)
            return said, jax.tree.map(lambda leaf: leaf.astype(jnp.float16), after)

        return changed

    for broken, line in (
        (alone._replace(client=halved(alone.client)), "client: the state changes"),
        (momentum._replace(server=halved(momentum.server)), "server: the state chang"),
    ):
        with pytest.raises(TypeError, match=rf"^{line}.* from .*float32"):
            fb.simulate(
                broken,
                problem.params,
                problem.federated_data,
                jax.random.key(0),
                rounds=1,
            )

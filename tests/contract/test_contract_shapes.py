# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Structure and dtypes of everything that is kept or said never change.

The whole product of wrappers and algorithms, by shapes alone.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from registry import PRODUCT

import problems
from fedblend import keys, trees
from fedblend.core import Heard

PROBLEMS = {
    "quadratics": problems.quadratics(),
    "classes": problems.classes(),
    "half": problems.classes()._replace(
        params=jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16), problems.classes().params
        )
    ),
}


def rounds_by_shape(algorithm, problem, rounds: int = 2):
    """The kept and said of enrolment and some rounds: no arithmetic is done."""
    shard = jax.device_put(problem.federation.train.shard(1))
    root = jax.random.key(0)
    share, count = jnp.ones((), jnp.float32), jnp.ones((), jnp.int32)

    def play():
        hello, client = algorithm.enroll(problem.params, shard, root)
        heard = Heard(hello, share, count)
        down, server = algorithm.start(problem.params, heard, None, root)
        told, kept, said, models = [], [(client, down, server)], [], []
        for number in range(rounds):
            message = algorithm.tell(down, algorithm.ask(client, shard))
            key = keys.at(root, "client", number, 1)
            up, client = algorithm.client(message, client, shard, key)
            up = up._replace(slope=None, stretch=None)
            decoded = algorithm.decode(up)
            heard = Heard(decoded, share, count)
            down, server = algorithm.server(heard, down, server, None, root)
            told.append(message)
            kept.append((client, down, server))
            said.append((up, decoded))
            message = algorithm.tell(down, algorithm.ask(client, shard))
            models.append(algorithm.personal(message, client, shard, root))
        return told, kept, said, models

    return jax.eval_shape(play)


@cache
def played(name: str, problem: str):
    return rounds_by_shape(PRODUCT[name](PROBLEMS[problem]), PROBLEMS[problem])


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", PRODUCT)
def test_structure_and_dtypes_stay_the_same_over_rounds(name, problem):
    for series in played(name, problem):
        first, *others = [described(entry) for entry in series]
        for other in others:
            assert other == first


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", PRODUCT)
def test_nothing_is_weakly_typed(name, problem):
    weak = [leaf for leaf in jax.tree.leaves(played(name, problem)) if leaf.weak_type]
    assert not weak


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", PRODUCT)
def test_shared_and_personal_models_have_the_parameters_shapes(name, problem):
    _, kept, _, models = played(name, problem)
    wanted = described(PROBLEMS[problem].params)
    assert all(described(down.shared) == wanted for _, down, _ in kept)
    assert all(described(model) == wanted for model in models)


@pytest.mark.parametrize("name", PRODUCT)
def test_delta_has_the_structure_of_the_parameters_or_is_not_sent(name):
    _, _, said, _ = played(name, "classes")
    delta, params = said[0][1].delta, PROBLEMS["classes"].params
    parts = params if "fedrep" not in name else trees.where_given(delta, params)
    assert delta is None or described(delta) == described(parts)
    assert delta is None or jax.tree.leaves(delta)


def test_a_state_that_changes_its_dtype_is_refused_in_one_line():
    import fedblend as fb

    problem = PROBLEMS["quadratics"]
    work: dict[str, Any] = {"steps": 1, "batch_size": None}
    alone = fb.local_only(problem.loss, 0.1, **work)
    momentum = fb.fedopt(problem.loss, 0.1, optax.sgd(1.0, 0.5), **work)

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
                *(broken, problem.params, problem.federation, jax.random.key(0)),
                rounds=1,
            )

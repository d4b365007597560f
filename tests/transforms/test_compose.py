# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the encoding transforms refuse, each in one clear line."""

import jax
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import compress
from fedblend.transforms import compressed, diana, ef21

on = problems.quadratics()
plain = fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None))
ENCODERS = {
    "compressed": lambda inner: compressed(inner, compress.rand_k(1)),
    "diana": lambda inner: diana(inner, compress.rand_k(1)),
    "diana from first": lambda inner: diana(inner, compress.rand_k(1), start="first"),
    "ef21": lambda inner: ef21(inner, compress.top_k(1)),
}
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def begin(algorithm, rounds=1):
    """Nothing is compiled: a simulation looks at the shapes first."""
    return next(
        iter(
            fb.simulate(
                algorithm,
                on.params,
                on.federated_data,
                jax.random.key(0),
                rounds=rounds,
            )
        )
    )


@each_encoder
def test_an_algorithm_without_updates_is_refused(name):
    alone = fb.local_only(on.loss, fb.Work(0.1, steps=1, batch_size=None))
    with pytest.raises(ValueError, match=r"^\w+: clients .* send no update(\n|$)"):
        begin(ENCODERS[name](alone))


@each_encoder
@pytest.mark.parametrize("inner", ENCODERS)
def test_an_encoder_inside_another_is_refused(name, inner):
    nested = ENCODERS[name](ENCODERS[inner](plain))
    with pytest.raises(ValueError, match=r"^\w+: updates .* encoded already; use one"):
        begin(nested)


@each_encoder
def test_an_encoder_inside_finetune_is_not(name):
    tuned = fb.finetune(
        ENCODERS[name](plain), on.loss, fb.Work(0.1, steps=1, batch_size=None)
    )
    assert begin(tuned).round == 0


@pytest.mark.parametrize("k", [4, np.array([1, 1, 4, 1, 1, 1, 1])])
def test_a_k_larger_than_the_model_is_refused(k):
    message = r"_k: k: 4 is not from 1 to 3, the entries of the model"
    for algorithm in (
        compressed(plain, compress.rand_k(k)),
        diana(plain, compress.rand_k(k, places="sent")),
        ef21(plain, compress.top_k(k)),
    ):
        with pytest.raises(ValueError, match=message):
            begin(algorithm)


def test_diana_refuses_what_it_does_not_know():
    rand = compress.rand_k(1)
    with pytest.raises(ValueError, match="start: 'last' is not 'zero' or 'first'"):
        diana(plain, rand, start="last")
    for biased in (compress.top_k(1), compress.sign()):
        with pytest.raises(ValueError, match=r"^diana: .* is biased; use ef21"):
            diana(plain, biased)
    for rate in (0.0, 1.5, -1, np.array([0.5, 0.0])):
        with pytest.raises(ValueError, match=r"is not in .0, 1"):
            diana(plain, rand, rate=rate)


@pytest.mark.parametrize(
    "k, rate, message",
    [
        (1, 0.34, r"^rate: 0\.34 is not in .* = \(0, 0\.333333\] .* omega is 2(\n|$)"),
        (1, np.full(7, 0.5), r"^rate: 0\.5 of client 0 is not in .* omega is 2(\n|$)"),
        (1, jax.numpy.asarray(0.9), r"^rate: 0\.9 is not in .* omega is 2(\n|$)"),
        (
            np.array([3, 3, 3, 1, 3, 3, 3]),
            np.full(7, 1.0),
            r"^rate: 1 of client 3 is not in .* = \(0, 0\.333333\] .* omega is 2(\n|$)",
        ),
        (
            np.array([3, 1]),
            np.full(7, 0.1),
            "^rand_k: k: an array of 2 is not one value, or one for each of the 7",
        ),
    ],
)
def test_diana_refuses_memories_that_follow_too_fast(k, rate, message):
    """Beyond 1/(omega + 1) they grow without end."""
    with pytest.raises(ValueError, match=message):
        begin(diana(plain, compress.rand_k(k), rate=rate))


@pytest.mark.parametrize("k", [1, np.array([1, 1, 3, 1, 2, 1, 1])])
def test_diana_takes_the_largest_rate_allowed(k):
    most = 1 / np.asarray(3 / k)
    for rate in (None, most, most.astype(np.float32)):
        assert begin(diana(plain, compress.rand_k(k), rate=rate)).round == 0


def test_ef21_refuses_what_does_not_contract():
    with pytest.raises(ValueError, match=r"^ef21: rand_k\(1\) does not contract; us"):
        ef21(plain, compress.rand_k(1))
    with pytest.raises(ValueError, match=r"dithering\(1\) does not contract 3 entries"):
        begin(ef21(plain, compress.dithering(1)))


@pytest.mark.parametrize("build", [ENCODERS["diana"], ENCODERS["ef21"]])
def test_a_median_is_refused_with_memories_on_both_sides(build):
    with pytest.raises(ValueError, match="keeps the mean of the clients' memories"):
        fb.simulate(
            build(plain),
            on.params,
            on.federated_data,
            jax.random.key(0),
            rounds=1,
            reduction="median",
        )

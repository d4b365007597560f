# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A correction of some parameters: the same run, and fewer bits down."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.transforms.central_loss import parameter_loss
from fedblend_reproductions.mixed.dual_encoder import (
    dual_encoder,
    dual_encoder_loss,
    spreadout,
)
from fedblend_reproductions.mixed.partial_correction import partial_correction

MOVIES, WIDTH, ROUNDS, CLIENTS = 9, 2, 3, 4
DENSE = WIDTH * WIDTH + WIDTH
rng = np.random.default_rng(0)
rows = tuple(
    rng.integers(1, MOVIES + 1, shape).astype(np.int32) for shape in ((24, 3), (24,))
)
on = fb.federate(rows, np.split(np.arange(24), CLIENTS))
model = dual_encoder(MOVIES, width=WIDTH)
inner = fb.fedavg(dual_encoder_loss(), fb.Work(0.5, steps=2, batch_size=3))
spread = parameter_loss(lambda here: spreadout(here, 0.3))


def run(algorithm):
    place = (algorithm, model.init(jax.random.key(0)), on, jax.random.key(1))
    return fb.simulate(*place, rounds=ROUNDS, every=ROUNDS).complete()


@pytest.mark.slow
def test_the_run_is_the_same_and_zeros_do_not_travel():
    whole = fb.transforms.mixed_fl(inner, spread, how="two_way", steps=2)
    plain_run, short = run(whole), run(partial_correction(whole, ["embedding"]))
    jax.tree.map(np.testing.assert_array_equal, short.shared, plain_run.shared)
    assert np.abs(plain_run.down.correction.embedding).max() > 1e-3
    gap = plain_run.bits().down - short.bits().down
    np.testing.assert_array_equal(gap, np.full(CLIENTS, ROUNDS * 32 * DENSE))
    np.testing.assert_array_equal(plain_run.bits().up, short.bits().up)


def test_a_message_without_correction_stays_as_it_is():
    plain = fb.transforms.mixed_fl(inner, spread, how="parallel")
    down, _ = plain.start(model.init(jax.random.key(0)), None, None, jax.random.key(0))  # pyright: ignore
    assert (
        partial_correction(plain, ["embedding"]).wire.tell(down, ()).correction is None
    )


def test_a_parameter_that_does_not_exist():
    with pytest.raises(ValueError, match="no parameter 'table', there are 'embedding'"):
        run(
            partial_correction(
                fb.transforms.mixed_fl(inner, spread, how="one_way"), ["table"]
            )
        )

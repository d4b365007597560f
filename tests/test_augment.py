# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Changes of rows in training, against loops over single images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.augment import augment, crop, cutout, flip, mixup
from fedblend.core import Batch
from fedblend.errors import InputError
from fedblend.losses import objective

KEY = jax.random.key(0)
IMAGES = jnp.arange(1.0, 1 + 40 * 5 * 4 * 2).reshape(40, 5, 4, 2)
LABELS = jnp.arange(40) % 3
ROWS = IMAGES, LABELS


def test_crops_are_moved_images():
    found, labels = crop(2)(ROWS, KEY)
    assert (labels == LABELS).all()
    wide = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = set()
    for image, own in zip(np.asarray(found), wide, strict=True):
        fits = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if (own[down : down + 5, right : right + 4] == image).all()
        ]
        assert len(fits) == 1
        places.add(fits[0])
    assert len(places) > 10


def test_about_half_are_turned():
    found = np.asarray(flip(ROWS, KEY)[0])
    turned = (found == IMAGES[:, :, ::-1]).all((1, 2, 3))
    same = (found == IMAGES).all((1, 2, 3))
    assert (turned ^ same).all() and 10 < turned.sum() < 30


def test_a_square_is_cut_out():
    found = np.asarray(cutout(3)((IMAGES[..., 0], LABELS), KEY)[0])
    for image in found:
        down, right = np.nonzero(image == 0)
        assert len(down) == len(set(down)) * len(set(right))
        assert 4 <= len(down) <= 9 and np.ptp(down) < 3 and np.ptp(right) < 3


def test_mixup_mixes_inputs_and_targets_by_one_weight():
    inputs, targets = mixup(1.0, classes=3)(ROWS, KEY)
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-6)
    first = np.asarray(IMAGES[:, 0, 0, 0])
    gaps = np.asarray(inputs[:, 0, 0, 0]) - first
    partners = np.asarray(mixup(1.0)((IMAGES, IMAGES[:, 0, 0, 0]), KEY)[1]) - first
    np.testing.assert_allclose(gaps, partners, rtol=1e-4, atol=1e-3)
    with pytest.raises(InputError, match="mixup: classes: is needed"):
        mixup(1.0)(ROWS, KEY)


def test_rows_change_in_training_alone_and_anew_in_each_step():
    seen = []

    def loss(params, rows, key):
        jax.debug.callback(lambda rows: seen.append(np.asarray(rows)), rows[0])
        assert key is not None
        return params * rows[0].sum((1, 2, 3))

    data = fb.federate((np.asarray(IMAGES), np.asarray(LABELS)), [np.arange(40)])
    work = fb.Work(1e-9, 2, None)
    algorithm = fb.fedavg(augment(loss, flip), work)
    fb.simulate(algorithm, jnp.ones(()), data, KEY, rounds=1).complete()
    jax.effects_barrier()
    assert len(seen) == 2 and not (seen[0] == seen[1]).all()
    plain = fb.losses.squared_error(lambda params, inputs: params * inputs[:, 0, 0, 0])
    rows = IMAGES, IMAGES[:, 1, 1, 1]
    changed = augment(plain, flip)
    own = objective(plain, jnp.ones(()), Batch(rows))
    assert objective(changed, jnp.ones(()), Batch(rows)) == own
    assert objective(changed, jnp.ones(()), Batch(rows, key=KEY)) != own
    with pytest.raises(InputError, match=r"inputs: rows of shape \(4,\) is not"):
        flip((IMAGES[:, 0, :, 0], LABELS), KEY)

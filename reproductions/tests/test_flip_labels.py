# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flipped labels: whose, and which."""

import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.byzantine import flip_labels

LABELS = np.arange(40, dtype=np.int32) % 4
PARTS = np.split(np.arange(40), 5)
WHO = np.array([False, True, False, False, True])


def data(labels=LABELS):
    inputs = np.arange(len(labels), dtype=np.float32)[:, None]
    return fb.federate((inputs, labels), PARTS, validation=0.2, test=0.2)


def test_labels_of_the_attackers_training_rows_are_reversed():
    honest = data()
    flipped = flip_labels(honest, attackers=WHO)
    for client in range(5):
        rows, labels = flipped.train.rows(client)
        before, own = honest.train.rows(client)
        np.testing.assert_array_equal(rows, before)
        np.testing.assert_array_equal(labels, 3 - own if WHO[client] else own)
    assert flipped.train.examples[1].dtype == np.int32
    assert flipped.validation is honest.validation and flipped.test is honest.test
    np.testing.assert_array_equal(honest.train.rows(1)[1], data().train.rows(1)[1])


def test_held_out_training_rows_of_attackers_stay():
    """Validation rows may lie in the same arrays as training rows."""
    held = data().holding_out(0.3)
    flipped = flip_labels(held, attackers=WHO)
    assert held.validation is not None and flipped.validation is not None
    for client in range(5):
        np.testing.assert_array_equal(
            flipped.validation.rows(client)[1], held.validation.rows(client)[1]
        )
    np.testing.assert_array_equal(flipped.train.rows(1)[1], 3 - held.train.rows(1)[1])


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_two_real_labels_change_places(low):
    labels = np.where(LABELS > 1, 1.0, low)
    honest, flipped = data(labels), flip_labels(data(labels), attackers=WHO)
    expected = 1 + low - honest.train.rows(4)[1]
    np.testing.assert_array_equal(flipped.train.rows(4)[1], expected)


def test_nobody_flips_where_nobody_attacks():
    flipped = flip_labels(data(), attackers=np.zeros(5, bool))
    np.testing.assert_array_equal(flipped.train.examples[1], data().train.examples[1])


@pytest.mark.parametrize(
    ("labels", "who", "line"),
    [
        (LABELS + 0.5, WHO, "^flip_labels: federated_data: float64 .* is not labels"),
        (
            np.stack([LABELS] * 2, 1),
            WHO,
            "^flip_labels: federated_data: int32 of shape",
        ),
        (LABELS, [1, 4], "^flip_labels: attackers: .* is not an array over clients"),
        (LABELS, WHO[:4], "^flip_labels: attackers: .* is not one for each of the 5"),
    ],
)
def test_what_cannot_be_flipped_is_refused(labels, who, line):
    with pytest.raises(ValueError, match=line):
        flip_labels(data(labels), attackers=who)

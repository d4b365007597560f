# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of anything give finite inputs, or one line; never a traceback."""

import datetime
import decimal
import random

import numpy as np

import fedblend as fb
from fedblend.data.dataset import DataError, task_of
from fedblend.data.preprocess import Preprocessing
from fedblend.data.readers.read import read, read_inputs

ANYTHING = [
    *(None, "", "NA", "nan", "?", "-", "yes", "no", "Yes", "1", "0", "  a ", "a", "ä"),
    *("1,5", "1.234,5", "1,234", "$5", "12%", "inf", "1e400", "1e30", "1_000", "0x10"),
    *("2020-01-01", "31.12.2020", "03/04/2020", "13/04/2020", "2020-01-01T10:00:00Z"),
    *("9999-12-31", "0001-01-01", "2020-02-30", "\N{ARABIC-INDIC DIGIT ONE}", b"x"),
    *(float("nan"), float("inf"), 1, 0, 2.5, -7, 10**30, True, False, [1], {"a": 1}),
    *(datetime.date(2020, 1, 1), datetime.datetime(1, 1, 1), datetime.time(10, 0)),
    datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC),
    *(decimal.Decimal("1.5"), (1, 2), np.float32(3), np.int64(4)),
    *(np.datetime64("NaT"), np.datetime64("2020-01-01")),
]
TABLES = 120


def column(values: list) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def drawn(draw: random.Random, rows: int) -> np.ndarray:
    """A column of a few kinds of values, or of numbers of any size."""
    if draw.random() < 0.8:
        return column(draw.choices(draw.sample(ANYTHING, draw.randint(1, 6)), k=rows))
    size = 10.0 ** draw.randint(-12, 12)
    return column([draw.gauss(size, size * draw.random()) for _ in range(rows)])


def test_columns_of_anything():
    draw, used = random.Random(0), 0
    for _ in range(TABLES):
        rows = draw.choice([2, 5, 30, 60])
        names = [f"{draw.choice(['a', 'b_id ', 'é'])}{n}" for n in range(3)]
        table = {name: drawn(draw, rows) for name in names}
        targets = column(
            draw.choices(draw.sample(["u", "v", None, 1, "NA"], 3), k=rows)
        )
        clients = draw.choices("PQ", k=rows)
        try:
            dataset = read(table, target=targets, client=clients, preprocess="always")
            parts = fb.partition.by_key(dataset.keys)
            data = fb.data.federate_dataset(dataset, parts, test=0.2)
        except DataError as error:
            assert "\n" not in str(error)
            continue
        used += 1
        for split in data.splits.values():
            assert np.isfinite(split.examples[0]).all()
        assert data.preprocessing is not None
        kept = Preprocessing.parse(data.preprocessing.dump())
        assert kept == data.preprocessing
        try:
            new = {name: column(draw.choices(ANYTHING, k=rows)) for name in names}
            assert np.isfinite(
                read_inputs(new, task_of(dataset), preprocessing=kept)
            ).all()
        except DataError as error:
            assert "\n" not in str(error)
    assert used > TABLES / 3

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a run with known numbers, made by hand."""

from typing import Any

import numpy as np
import pytest

from fedblend.metrics import client_spread, standard
from fedblend.stats.gains import Evidence

NOTHING: Any = lambda *of: None  # noqa: E731
METRICS = standard("classes", NOTHING, NOTHING)

CLIENTS = 4
LEVELS = {"shared": 0.5, "local": 0.7, "personal": 0.8}


def spread(value: float, higher: bool = True) -> dict:
    """Four clients around a value."""
    values = value + 0.01 * np.arange(CLIENTS)
    return client_spread(values, np.ones(CLIENTS), higher)._asdict()


def row(round: int, seed: int = 0, sent: int = 1000, models=tuple(LEVELS)) -> dict:
    """One record: accuracy grows by round and seed, loss falls."""
    gain = 0.01 * round + 0.001 * seed
    measures = {
        model: {
            "accuracy": spread(LEVELS[model] + gain),
            "loss": spread(1 - LEVELS[model] - gain, False),
        }
        for model in models
    }
    return {
        "round": round,
        "rounds": 2,
        "seconds": 0.1,
        "received": 4,
        "dropped": 0,
        "rejected": 0,
        "bits_up": sent * round,
        "bits_down": 2 * sent * round,
        "seed": seed,
        "measures": {"test": measures, "train": measures},
    }


@pytest.fixture
def rows() -> list[dict]:
    """Two seeds, three records each."""
    return [row(number, seed) for number in (0, 2, 4) for seed in (0, 1)]


@pytest.fixture
def make_row():
    """The builder of a row."""
    return row


@pytest.fixture
def evidence() -> Evidence:
    """Two seeds of per-client accuracies on 60 rows each; client 2 is harmed."""
    personal = np.array([0.9, 0.8, 0.5, 0.7])
    local = np.array([0.5, 0.8, 0.75, 0.6])
    measured = {
        "test": {
            "personal": {"accuracy": personal, "loss": 1 - personal},
            "local": {"accuracy": local, "loss": 1 - local},
        }
    }
    return Evidence([measured, measured], (), {"test": np.full(CLIENTS, 60)}, METRICS)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A small valid configuration, as nested tables."""

from typing import Any

TINY: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "data": {
        "source": "digits",
        "partition": "classes_per_client",
        "clients": 6,
        "classes": 2,
        "test": 0.25,
    },
    "model": {"name": "softmax"},
    "algorithm": {"name": "fedavg", "rate": 0.1, "steps": 2, "batch_size": 4},
    "run": {"rounds": 4, "every": 2, "cohort": 3},
    "measure": {"local": False},
}

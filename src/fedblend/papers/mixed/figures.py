# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Curves with 95 % confidence, as the paper draws them."""

from typing import Any

import numpy as np


def confident(axes: Any, across: Any, values: Any, **style: Any) -> None:
    """The mean of ``values[seeds, points]``, and the 95 % confidence band of it."""
    from scipy.stats import t

    values = np.asarray(values, np.float64)
    seeds, mean = len(values), values.mean(axis=0)
    (line,) = axes.plot(across, mean, linewidth=1.5, **style)
    if seeds > 1:
        error = values.std(axis=0, ddof=1) / np.sqrt(seeds)
        wide = t.ppf(0.975, seeds - 1) * error
        axes.fill_between(
            *(across, mean - wide, mean + wide),
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )

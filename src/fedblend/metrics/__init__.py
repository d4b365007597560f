# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics: of a model on one client's rows, and over clients.

A ``Metric`` is a JAX function ``fn(model, batch) -> number`` for one client, to be
mapped over clients, and the direction that is better. The model is a set of parameters
or a ``Blend``. The number is NaN where the metric is not defined: no rows, or an area
under the curve with one class only.

Statistics over clients are NumPy and leave out clients with NaN. The mean alone hides
what personalization is for, so ``Spread`` has the worst tenth beside it; ``gains``
counts the clients that do better and worse with their personal model than with another.
"""

from fedblend.metrics.metric import (  # noqa: F401
    Measure,
    RowByRow,
    RowMeasure,
    main_first,
)
from fedblend.metrics.metric import Metric as Metric
from fedblend.metrics.metric import Spread as Spread
from fedblend.metrics.metric import client_spread as client_spread
from fedblend.metrics.metric import evaluate as evaluate
from fedblend.metrics.registry import METRICS as METRICS
from fedblend.metrics.registry import build as build
from fedblend.metrics.registry import make_metrics as make_metrics
from fedblend.metrics.registry import standard as standard
from fedblend.metrics.rows import accuracy as accuracy
from fedblend.metrics.rows import auc as auc
from fedblend.metrics.rows import average_precision as average_precision
from fedblend.metrics.rows import balanced_accuracy as balanced_accuracy
from fedblend.metrics.rows import brier_score as brier_score
from fedblend.metrics.rows import calibration_error as calibration_error
from fedblend.metrics.rows import calibration_gap as calibration_gap
from fedblend.metrics.rows import log_loss as log_loss
from fedblend.metrics.rows import mean_absolute_error as mean_absolute_error
from fedblend.metrics.rows import mean_loss as mean_loss
from fedblend.metrics.rows import mean_squared_error as mean_squared_error
from fedblend.metrics.rows import next_token_accuracy as next_token_accuracy
from fedblend.metrics.rows import poisson_deviance as poisson_deviance
from fedblend.metrics.rows import r2_score as r2_score
from fedblend.metrics.rows import recall_at as recall_at
from fedblend.metrics.rows import (
    root_mean_squared_error as root_mean_squared_error,
)

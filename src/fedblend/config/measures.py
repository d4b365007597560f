# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics that a configuration measures."""

from collections.abc import Mapping

from fedblend import metrics
from fedblend.config.config import Config
from fedblend.core import Loss
from fedblend.data.dataset import Task
from fedblend.errors import ConfigError
from fedblend.metrics import METRICS
from fedblend.mixing import Apply


def measures_of(
    config: Config, task: Task, loss: Loss, apply: Apply
) -> Mapping[str, metrics.Metric]:
    """The metrics of ``[measure]``, or the usual ones; loss is without the l2 term."""
    names = config.measure.metrics
    if names is None:
        return metrics.standard(task.kind, loss, apply)
    chosen = {}
    for place, name in enumerate(names):
        word, _, number = name.partition("@")
        key, kinds = f'measure.metrics.{place}: "{name}"', METRICS[word].kinds
        if task.kind not in kinds:
            raise ConfigError(
                f"{key} is not for {task.kind} targets; it needs {' or '.join(kinds)}"
            )
        if number and int(number) > task.outputs:
            raise ConfigError(f"{key}: there are only {task.outputs} classes")
        chosen[name] = metrics.build(name, task.kind, loss, apply)
    return chosen

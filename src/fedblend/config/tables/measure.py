# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[measure]``: which metrics, on which rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedblend import metrics
from fedblend.config.table import Count, Index, Positive, Split, Table, matching
from fedblend.core import Loss
from fedblend.data.dataset import (
    Task,
)
from fedblend.errors import ConfigError
from fedblend.metrics import METRICS, registry
from fedblend.mixing import Apply

if TYPE_CHECKING:
    from fedblend.config.config import Config

Metric = Annotated[str, matching(registry.pattern(), registry.list_names())]


class Measure(Table):
    """What is measured, where."""

    splits: Annotated[list[Split], Field(min_length=1)] | None = None
    on: Count | Annotated[list[Index], Field(min_length=1)] | None = None
    local: bool | Count = True
    local_rate: Positive | Literal["tune", "same"] | None = None
    metrics: Annotated[list[Metric], Field(min_length=1)] | None = None


def measures_of(
    config: "Config", task: Task, loss: Loss, apply: Apply
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

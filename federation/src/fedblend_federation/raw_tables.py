# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Raw tables on nodes: what the columns are, what nodes tell of them, what comes back.

``data.raw`` of the configuration states the columns. Each node that agrees sends the
statistics of its training rows (``data.preprocess``) with its description, and gets the
preprocessing that the statistics of all nodes make, with the terms.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedblend.config import toml
from fedblend.config.tables.data import NodeRows
from fedblend.data.dataset import NUMBERS, DataError, Dataset, task_of
from fedblend.data.federated import Shards
from fedblend.data.preprocess.columns import Column, Kind
from fedblend.data.preprocess.preprocessing import (
    Preprocessing,
    Statistics,
    client_statistics,
    sizes,
)
from fedblend.data.preprocess.preprocessing import finish as finish
from fedblend.data.preprocess.schema import Schema
from fedblend.errors import ConfigError

KINDS: dict[str, Kind] = {
    "standardize": "number",
    "as_is": "number",
    "flag": "boolean",
    "one_hot": "text",
    "ordinal": "text",
    "date": "date",
    "drop": "text",
}
"""What the values of a column are, by its encoding."""
LARGEST = float(np.finfo(np.float32).max)


def schema_of(data: NodeRows) -> Schema | None:
    """The schema that a configuration states; None where nodes have numbers."""
    if data.raw is None:
        return None
    return Schema(
        tuple(
            Column(
                one.name,
                KINDS[one.encoding],
                one.encoding,
                one.style,
                tuple(one.categories),
                one.other,
                one.missing,
                tuple(one.parts),
            )
            for one in data.raw
        )
    )


def raw_of(schema: Schema) -> list[dict[str, Any]]:
    """``data.raw`` of a configuration with this schema, defaults left out."""
    shown = {"style", "categories", "other", "missing", "parts"}
    return [
        {"name": one.name, "encoding": one.encoding}
        | {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in one._asdict().items()
            if key in shown and value and one.encoding != "drop"
        }
        for one in schema.columns
    ]


def data_of_nodes(dataset: Dataset, clients: int) -> str:
    """The table ``[data]`` of a federation whose nodes have such a table, as TOML.

    Raises:
        DataError: these are arrays, and no table.
    """
    if dataset.schema is None:
        raise DataError(
            f"{dataset.name}: has arrays, which nodes use as they are; data.shape is "
            "the shape of a row"
        )
    lines = ["[data]", 'partition = "nodes"', f"clients = {clients}"]
    lines.append(f"kind = {toml.literal(dataset.kind)}")
    task = task_of(dataset)
    if task.kind in NUMBERS:
        lines += [f"center = {task.center!r}", f"scale = {task.scale!r}"]
    if task.log_shift is not None:
        lines.append(f"log_shift = {task.log_shift!r}")
    if dataset.label_names:
        lines.append(f"labels = {toml.literal(dataset.label_names)}")
    columns = [f"  {toml.literal(one)}," for one in raw_of(dataset.schema)]
    return "\n".join([*lines, "raw = [", *columns, "]"])


def describe(schema: Schema, train: Shards) -> dict[str, list[float]]:
    """The statistics of a node's training rows, for its description."""
    found = client_statistics(schema, train.rows(0)[0])._asdict()
    return {name: found[name].tolist() for name in sizes(schema)}


def statistics_in(schema: Schema, sent: Any, rows: int) -> Statistics | None:
    """The statistics in a description; None if they cannot be such."""
    wanted = sizes(schema)
    if not isinstance(sent, dict) or set(sent) != set(wanted):
        return None
    parts = {}
    for name, size in wanted.items():
        numbers = sent[name]
        if not isinstance(numbers, list) or len(numbers) != size:
            return None
        if not all(type(number) in (int, float) for number in numbers):
            return None
        most = 1.0 if name in ("present", "shares") else LARGEST
        if name == "variance":
            most = LARGEST**2
        least = -most if name in ("mean", "rest", "quantiles") else 0.0
        parts[name] = np.array(numbers, np.float64)
        # Also false for what is not a number.
        if not ((parts[name] >= least) & (parts[name] <= most)).all():
            return None
    return Statistics(rows, **parts)


def preprocessing_in(schema: Schema, terms: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing in the terms, of exactly the columns agreed on.

    Raises:
        ConfigError: there is none, or one of other columns.
        DataError: it is damaged.
    """
    text = terms.get("preprocessing")
    if not isinstance(text, str):
        raise ConfigError("message: has no preprocessing")
    found = Preprocessing.parse(text)
    if found.schema != schema:
        raise ConfigError("message: preprocessing: has other columns than data.raw")
    return found

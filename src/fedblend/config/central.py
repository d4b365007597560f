# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[central]``: rows that the server holds itself, and how it uses them.

Its rows are some classes, or a random share, of the dataset, which no client has then;
or they are in a file of their own. A part of them is kept for testing, where the shared
model is measured at the end.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal
from warnings import catch_warnings, simplefilter

import jax
import numpy as np
from pydantic import Field, model_validator

from fedblend import models, transforms
from fedblend.config.schema.table import (
    ConfigError,
    Count,
    Fraction,
    Index,
    Inside,
    Misfit,
    NotNegative,
    Positive,
    Table,
    Word,
)
from fedblend.core import Algorithm, Batch, Loss, PyTree
from fedblend.data.dataset import DataError, Dataset, Rows, generator
from fedblend.data.federated import FederatedData, federate
from fedblend.data.readers.read import Task, read_new_rows, task_of
from fedblend.transforms.mixed_fl.central_loss import of_parameters, on_rows

STRENGTH = 1e-3
"""Of a penalty, if none is given."""
_OF_ROWS = ("classes", "share", "file", "target", "test", "batch_size")


class Central(Table):
    """Which rows are the server's, and how its loss is mixed with the clients'."""

    how: Literal["parallel", "one_way", "two_way"]
    weight: Inside = 0.5
    classes: Annotated[list[Index], Field(min_length=1)] | None = None
    share: Inside | None = None
    penalty: Literal["spreadout"] | None = None
    strength: Positive | None = None
    file: Word | None = None
    target: Word | None = None
    test: Fraction = 0.2
    steps: Count = 1
    batch_size: Count | None = None
    rate: Positive | None = None
    merge: (
        Literal["sum", "average"]
        | Annotated[list[NotNegative], Field(min_length=2, max_length=2)]
        | None
    ) = None
    upload: bool = False

    def _says(self, name: str) -> bool:
        """Whether a key is not what it is if left out: runs write defaults out."""
        return getattr(self, name) != type(self).model_fields[name].default

    @model_validator(mode="after")
    def _penalty_or_rows(self) -> "Central":
        if self.penalty is None and self.strength is not None:
            raise Misfit("strength", "goes with penalty")
        for name in _OF_ROWS:
            if self.penalty is not None and self._says(name):
                raise Misfit(name, "is for rows, and a penalty needs none")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> "Central":
        origins = (self.classes, self.share, self.file)
        rows = self.penalty is None
        if rows and sum(origin is not None for origin in origins) != 1:
            what = "several are given" if any(origins) else "is missing"
            raise Misfit("classes, share or file", f"{what}; exactly one is needed")
        if self.target is not None and self.file is None:
            raise Misfit("target", "goes with file")
        if self.how == "one_way":
            for name in ("steps", "rate", "merge", "upload"):
                if self._says(name):
                    raise Misfit(name, 'goes with central steps, not "one_way"')
        if self.how == "parallel" and self.upload:
            raise Misfit("upload", 'goes with how = "two_way"')
        return self


def set_aside(
    table: Central | None, dataset: Dataset, target: str | None, seed: int
) -> tuple[Dataset, FederatedData | None]:
    """The clients' rows, and the server's as a federation of one.

    Raises:
        DataError: the rows cannot be divided so.
    """
    if table is None or table.penalty is not None:
        return dataset, None
    if table.file is not None:
        return dataset, own_rows(table, task_of(dataset), target, seed)
    inputs, targets = dataset.rows
    mine = _mine(table, dataset, seed)
    if mine.all() or not mine.any():
        raise DataError(
            f"central: the server would have {mine.sum()} of {len(mine)} rows"
        )
    keys = None if dataset.keys is None else np.asarray(dataset.keys)[~mine]
    clients = dataset._replace(rows=(inputs[~mine], targets[~mine]), keys=keys)
    return clients, _held(table, (inputs[mine], targets[mine]), seed)


def own_rows(
    table: Central, task: Task, target: str | None, seed: int
) -> FederatedData:
    """The server's rows from its own file, as a federation of one."""
    assert table.file is not None
    rows = read_new_rows(table.file, task, target=table.target or target).rows
    return _held(table, rows, seed)


def _held(table: Central, rows: Rows, seed: int) -> FederatedData:
    own = federate(rows, [np.arange(len(rows[0]))], test=table.test, seed=seed)
    if table.batch_size is not None and table.batch_size > own.train.total:
        raise DataError(
            f"central.batch_size: {table.batch_size} is more than the server's "
            f"{own.train.total} training rows"
        )
    return own


def _mine(table: Central, dataset: Dataset, seed: int) -> np.ndarray:
    targets = dataset.rows[1]
    if table.classes is None:
        lots = generator(seed, "central").random(len(targets))
        assert table.share is not None
        return lots < np.quantile(lots, table.share)
    if dataset.kind not in ("classes", "binary"):
        raise DataError(f"central.classes: {dataset.kind} targets have no classes")
    absent = sorted(set(table.classes) - set(np.unique(targets).tolist()))
    if absent:
        raise DataError(f"central.classes: no row is of class {absent[0]}")
    return np.isin(targets, table.classes)


def mixed(
    table: Central | None, algorithm: Algorithm, name: str, loss: Loss, private: bool
) -> Algorithm:
    """The algorithm of that name, under the server's loss.

    Raises:
        ConfigError: what the table asks for does not go with the rest.
    """
    if table is None:
        return algorithm
    if name == "local_only":
        raise ConfigError("central: local_only has no shared model that it could move")
    if private and table.upload:
        raise ConfigError("central.upload: would send gradients past [privacy]")
    merge = tuple(table.merge) if isinstance(table.merge, list) else table.merge
    settled: Any = {}
    if table.how != "one_way":
        settled = {"optimizer": table.rate, "merge": merge, "upload": table.upload}
    with catch_warnings():
        simplefilter("ignore")  # ``warnings`` says it
        made = transforms.mixed_fl(
            algorithm,
            on_rows(loss, table.batch_size)
            if table.penalty is None
            else of_parameters(partial(_spreadout, table.strength or STRENGTH)),
            how=table.how,
            weights=(1 - table.weight, table.weight),
            steps=table.steps,
            **settled,
        )
    # The dense layer is not part of the penalty, and its gradient need not be sent.
    return (
        made if table.penalty is None else transforms.add_gradient(made, ["embedding"])
    )


def _spreadout(strength: float, params: PyTree) -> jax.Array:
    return models.spreadout(params, strength)


def warnings(table: Central | None, private: bool) -> list[str]:
    """What is odd about a table, but no error; ``private`` if answers are clipped."""
    if table is None or table.how != "parallel" or table.rate is None:
        return []
    found = [
        f"central.rate: parallel training minimizes a mixture with weight "
        f"{table.weight:g} only if {table.rate:g} times {table.steps} steps is the "
        "clients' rate times their steps times the server's rate, all of them plain; "
        "without central.rate it follows them"
    ]
    if private:
        found.append(
            "central.how: [privacy] clips the clients' side alone, so that parallel "
            f"training minimizes another mixture than one with weight {table.weight:g};"
            ' "one_way" does not'
        )
    return found


def report(
    own: FederatedData | None, shared: list[PyTree], measures: Mapping[str, Callable]
) -> list[dict[str, Any]]:
    """What the summary of each seed says of the server's rows."""
    if own is None:
        return [{}] * len(shared)
    splits = {"train": own.train, "test": own.test}
    batches = {
        name: Batch(jax.tree.map(np.asarray, split.rows(0)))
        for name, split in splits.items()
        if split is not None
    }
    return [
        {
            "central": {
                name: {
                    "rows": len(batch.rows[0]),
                    **{m: float(of(model, batch)) for m, of in measures.items()},
                }
                for name, batch in batches.items()
            }
        }
        for model in shared
    ]

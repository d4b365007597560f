# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[central]``: the server's own rows, and its loss beside the clients'.

Rows of the server are some classes, or a random share, of the dataset, and no client
has them; or they are in a file of their own. A part of them is for testing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from warnings import catch_warnings, simplefilter

import numpy as np
from pydantic import (
    Field,
    model_validator,
)

from fedblend import transforms
from fedblend.config.table import (
    Count,
    Fraction,
    Index,
    Inside,
    NotNegative,
    Positive,
    Table,
    Values,
    Word,
    exactly_one,
    refuse_first,
)
from fedblend.core import Algorithm, Loss
from fedblend.data.dataset import (
    DataError,
    Dataset,
    Rows,
    Task,
    generator,
    task_of,
)
from fedblend.data.federated import FederatedData, federate
from fedblend.data.partition import plain_arrays
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.data.readers.read import read_new_rows
from fedblend.errors import ConfigError
from fedblend.transforms.central_loss import row_loss


class Central(Table):
    """Which rows are the server's, and how its loss is mixed with the clients'."""

    how: Literal["parallel", "one_way", "two_way"]
    weight: Inside = 0.5
    classes: Annotated[list[Index], Field(min_length=1)] | None = None
    share: Inside | None = None
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

    def _refuse_given(self, why: str, *keys: str) -> None:
        """Refuse keys with other values than their defaults, which runs write out."""
        usual = type(self).model_fields
        refuse_first(*((getattr(self, k) != usual[k].default, k, why) for k in keys))

    @model_validator(mode="after")
    def _goes_together(self) -> "Central":
        exactly_one(self, "classes", "share", "file")
        refuse_first(
            (
                self.target is not None and self.file is None,
                "target",
                "goes with file",
            ),
            (
                self.how == "parallel" and self.upload,
                "upload",
                'goes with how = "two_way"',
            ),
        )
        if self.how == "one_way":
            wrong = 'goes with central steps, not "one_way"'
            self._refuse_given(wrong, "steps", "rate", "merge", "upload")
        return self


def set_aside(
    table: Central, dataset: Dataset, target: str | None, seed: int
) -> tuple[Dataset, FederatedData | None]:
    """The clients' rows, and the server's as a federation of one.

    Raises:
        DataError: the rows cannot be divided so.
    """
    if table.file is not None:
        if dataset.schema is not None:  # read when its preprocessing is known
            return dataset, None
        return dataset, own_rows(table, task_of(dataset), target, seed)
    if dataset.sha256:
        raise DataError("central: the server's rows need a file beside a folder's")
    inputs, targets = dataset.rows
    mine = _choose_rows(table, dataset, seed)
    if mine.all() or not mine.any():
        raise DataError(
            f"central: the server would have {mine.sum()} of {len(mine)} rows"
        )
    by_row = {"keys": dataset.keys, "time": dataset.time, "groups": dataset.groups}
    theirs = {key: None if of is None else of[~mine] for key, of in by_row.items()}
    clients = dataset._replace(rows=(inputs[~mine], targets[~mine]), **theirs)
    return clients, _hold_out(table, (inputs[mine], targets[mine]), seed)


def preprocess_server(
    table: Central,
    server: FederatedData | None,
    dataset: Dataset,
    target: str | None,
    seed: int,
    federations: Sequence[FederatedData],
) -> FederatedData:
    """The server's rows with the inputs of a raw table that the clients' make.

    Raises:
        DataError: seeds with splits of their own have a preprocessing of their own.
    """
    if len(federations) > 1:
        raise DataError(
            "central: the server's rows need one preprocessing, and each of "
            f"{len(federations)} splits has its own; data.split_seed makes them one"
        )
    fitted = federations[0].preprocessing
    assert fitted is not None
    if server is not None:
        return server.preprocess(fitted)
    return own_rows(table, task_of(dataset), target, seed, fitted)


def own_rows(
    table: Central,
    task: Task,
    target: str | None,
    seed: int,
    preprocessing: Preprocessing | None = None,
) -> FederatedData:
    """The server's rows from its own file, as a federation of one."""
    assert table.file is not None
    wanted = table.target or target
    new = read_new_rows(table.file, task, target=wanted, preprocessing=preprocessing)
    return _hold_out(table, new.rows, seed)


def _hold_out(table: Central, rows: Rows, seed: int) -> FederatedData:
    everyone = [np.arange(len(rows[0]))]
    own = federate(plain_arrays(rows), everyone, test=table.test, seed=seed)
    if table.batch_size is not None and table.batch_size > own.train.total:
        raise DataError(
            f"central.batch_size: {table.batch_size} is more than the server's "
            f"{own.train.total} training rows"
        )
    return own


def _choose_rows(table: Central, dataset: Dataset, seed: int) -> np.ndarray:
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


def mix_losses(
    table: Central, algorithm: Algorithm, loss: Loss, values: Values
) -> Algorithm:
    """The algorithm with the server's loss.

    Args:
        table: ``[central]``.
        algorithm: of the clients.
        loss: of the clients.
        values: in place of those of the table.

    Raises:
        ConfigError: the algorithm cannot have it.
    """
    merge = tuple(table.merge) if isinstance(table.merge, list) else table.merge
    steps: Any = {"steps": table.steps}
    if table.how != "one_way":
        steps |= {
            "optimizer": values.get("rate", table.rate),
            "merge": merge,
            "upload": table.upload,
        }
    central = row_loss(loss, table.batch_size)
    weights = 1 - table.weight, table.weight
    try:
        with catch_warnings():
            simplefilter("ignore")  # ``build`` has the text
            return transforms.mixed_fl(
                algorithm, central, how=table.how, weights=weights, **steps
            )
    except ValueError as error:
        raise ConfigError(f"central: {str(error).partition(': ')[2]}") from None

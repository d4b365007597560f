# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of a configuration other than ``[algorithm]``: data, model, run, measure.

``[data]`` names a dataset or a file of one's own, and how its rows are shared out; a
partition's options stand beside its name. The options of a model are those of its
builder, and have the types of their defaults.
"""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, create_model, model_validator

from fedblend.config.schema.table import (
    Count,
    Fraction,
    Index,
    NotNegative,
    Positive,
    Table,
    Word,
    between,
)
from fedblend.models import MODELS

_OWN = ("target", "client", "inputs", "kind")


class Data(Table):
    """Where the rows come from, and what is held out."""

    source: Word | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    file: Word | None = None
    target: Word | None = None
    client: Word | None = None
    inputs: Word | list[Word] | None = None
    kind: Literal["classes", "binary", "regression"] | None = None
    validation: Fraction = 0.0
    test: Fraction | Literal["official"] = 0.2
    unseen: Fraction = 0.0
    seed: Index = 0
    split_seed: Index | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> "Data":
        if (self.source is None) == (self.file is None):
            what = "is missing" if self.file is None else "both are given"
            raise ValueError(f"source or file: {what}; exactly one is needed")
        for name in _OWN:
            if self.source is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: goes with file, not with source")
        if self.file is not None and self.options:
            raise ValueError("options: go with source, not with file")
        if isinstance(self.test, float) and self.validation + self.test >= 1:
            held = self.validation + self.test
            raise ValueError(f"validation + test: {held:g} leaves no rows to train on")
        return self


class Iid(Data):
    """Shuffled rows, dealt out evenly."""

    partition: Literal["iid"]
    clients: Count


class Contiguous(Data):
    """Rows in their own order, cut in pieces."""

    partition: Literal["contiguous"]
    clients: Count


class ClassesPerClient(Data):
    """So many random classes for every client."""

    partition: Literal["classes_per_client"]
    clients: Count
    classes: Count


class ClassPairs(Data):
    """Fixed pairs of classes, each for a block of clients."""

    partition: Literal["class_pairs"]
    clients: Count
    pairs: list[list[Index]] | None = None


class Dirichlet(Data):
    """Classes in proportions drawn from a Dirichlet distribution."""

    partition: Literal["dirichlet"]
    clients: Count
    concentration: Positive
    minimum: Index = 1


class Shards(Data):
    """Rows sorted by class, cut in shards, some for every client."""

    partition: Literal["shards"]
    clients: Count
    per_client: Count = 2


class ByKey(Data):
    """The clients that the data itself names."""

    partition: Literal["by_key"]
    minimum: Index = 1


class Stored(Data):
    """A partition that was saved."""

    partition: Literal["file"]
    path: Word


class Nodes(Data):
    """Rows that lie on the nodes of a federation; what they are like is stated here."""

    partition: Literal["nodes"]
    clients: Count
    labels: Annotated[list[Word], Field(min_length=2)] | None = None
    classes: Annotated[int, Field(ge=2)] | None = None
    shape: list[Count] | None = None
    columns: Annotated[list[Word], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> "Nodes":
        for name in ("source", "file", "target", "client", "inputs"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: is the nodes' own affair")
        if self.kind is None:
            raise ValueError("kind: is missing; the nodes' rows are not known here")
        if (self.shape is None) == (self.columns is None):
            what = "is missing" if self.shape is None else "both are given"
            raise ValueError(f"shape or columns: {what}; exactly one is needed")
        if self.labels is not None and self.classes is not None:
            raise ValueError("labels or classes: both are given")
        if self.kind == "classes" and self.labels is None and self.classes is None:
            raise ValueError("labels or classes: is missing")
        if isinstance(self.test, str) or self.unseen:
            name = "test" if isinstance(self.test, str) else "unseen"
            raise ValueError(f"{name}: nodes hold out a fraction of their own rows")
        return self


AnyData = Annotated[
    Iid
    | Contiguous
    | ClassesPerClient
    | ClassPairs
    | Dirichlet
    | Shards
    | ByKey
    | Stored
    | Nodes,
    Field(discriminator="partition"),
]


LossName = Literal[
    "cross_entropy",
    "logistic",
    "squared_error",
    "sequence_cross_entropy",
    "multilabel",
    "hinge",
]


class ModelChoice(Table):
    """A model by name; subclasses add its own options."""

    l2: NotNegative = 0.0
    loss: LossName | None = None


def _model_class(name: str) -> type[ModelChoice]:
    options = {
        option: (list[Count], list(default))
        if isinstance(default, tuple)
        else (type(default), default)
        for option, default in MODELS[name].options.items()
        if option != "dtype"  # [run] precision decides
    }
    fields: Any = {"name": (Literal[name], ...), **options}
    return create_model(f"Model_{name}", __base__=ModelChoice, **fields)


if TYPE_CHECKING:
    AnyModel = ModelChoice
else:
    AnyModel = Annotated[
        reduce(or_, map(_model_class, MODELS)), Field(discriminator="name")
    ]


class Run(Table):
    """How long, with whom, and how it is computed."""

    rounds: Index
    cohort: Count | None = None
    epoch: Count | None = None
    seed: Index | Annotated[list[Index], Field(min_length=1)] = 0
    every: Count | None = None
    weights: Literal["by_count", "uniform"] | None = None
    chunk: Count | None = None
    store: Literal["auto", "device", "host", "disk"] = "auto"
    dropout: Fraction = 0.0
    reduction: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: Annotated[float, between(0, 0.5, closed=False)] = 0.1
    precision: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _different_seeds(self) -> "Run":
        if isinstance(self.seed, list) and len(set(self.seed)) < len(self.seed):
            raise ValueError(f"seed: {self.seed} has the same seed twice")
        return self


class Leading(Table):
    """How the server of a federation waits for its nodes, and whom it believes."""

    deadline: Positive = 600.0
    resend: Positive = 120.0
    attempts: Count = 20
    quorum: Annotated[float, Field(gt=0, le=1)] = 1.0
    spare: Index = 0
    longest_update: Positive | None = None
    longest_rest: Positive | None = None
    largest_answer: Count | None = None


Metric = Annotated[
    str, StringConstraints(pattern=r"^(loss|accuracy|auc|mse|recall@[1-9][0-9]{0,5})$")
]
Split = Literal["train", "validation", "test"]


class Measure(Table):
    """What is measured, where."""

    splits: Annotated[list[Split], Field(min_length=1)] | None = None
    on: Count | Annotated[list[Index], Field(min_length=1)] | None = None
    local: bool | Count = True
    metrics: Annotated[list[Metric], Field(min_length=1)] | None = None

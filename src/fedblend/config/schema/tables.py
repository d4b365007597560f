# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of a configuration other than ``[algorithm]``: data, model, run, measure.

``[data]`` names a dataset or a file of one's own, and how its rows are shared out; a
partition's options stand beside its name. The options of a model are those of its
builder, and have the types of their defaults.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, create_model, model_validator

from fedblend.checks import Number
from fedblend.config.schema.table import (
    Count,
    Fraction,
    Index,
    Misfit,
    NotNegative,
    Positive,
    Share,
    Table,
    Word,
    one_of,
    table_of,
    within,
)
from fedblend.data import partition
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
    partition: str

    @model_validator(mode="after")
    def _one_origin(self) -> "Data":
        if (self.source is None) == (self.file is None):
            what = "is missing" if self.file is None else "both are given"
            raise Misfit("source or file", f"{what}; exactly one is needed")
        for name in _OWN:
            if self.source is not None and getattr(self, name) is not None:
                raise Misfit(name, "goes with file, not with source")
        if self.file is not None and self.options:
            raise Misfit("options", "go with source, not with file")
        if isinstance(self.test, float) and self.validation + self.test >= 1:
            held = self.validation + self.test
            raise Misfit("validation + test", f"{held:g} leaves no rows to train on")
        return self


class Stored(Data):
    """A partition that was saved."""

    partition: Literal["file"]
    path: Word


class Nodes(Data):
    """Rows that lie on the nodes of a federation; what they are like is stated here."""

    partition: Literal["nodes"]
    clients: Count
    labels: Annotated[list[Word], Field(min_length=2)] | None = None
    classes: Annotated[int, within(Number(least=2, whole=True))] | None = None
    shape: list[Count] | None = None
    columns: Annotated[list[Word], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> "Nodes":
        for name in ("source", "file", "target", "client", "inputs"):
            if getattr(self, name) is not None:
                raise Misfit(name, "is the nodes' own affair")
        if self.kind is None:
            raise Misfit("kind", "is missing; the nodes' rows are not known here")
        if (self.shape is None) == (self.columns is None):
            what = "is missing" if self.shape is None else "both are given"
            raise Misfit("shape or columns", f"{what}; exactly one is needed")
        if self.labels is not None and self.classes is not None:
            raise Misfit("labels or classes", "both are given")
        if self.kind == "classes" and self.labels is None and self.classes is None:
            raise Misfit("labels or classes", "is missing")
        if isinstance(self.test, str) or self.unseen:
            name = "test" if isinstance(self.test, str) else "unseen"
            raise Misfit(name, "nodes hold out a fraction of their own rows")
        return self


PARTITIONS = {
    "iid": partition.iid,
    "contiguous": partition.contiguous,
    "classes_per_client": partition.classes_per_client,
    "class_pairs": partition.class_pairs,
    "dirichlet": partition.dirichlet,
    "shards": partition.shards,
    "by_key": partition.by_key,
}
"""How rows are given to clients, by name; options as of the function."""


def _partition_table(name: str) -> type[Data]:
    others: dict[str, Any] = {"rows": None, "seed": None}
    if name == "class_pairs":
        others["pairs"] = (list[list[Index]] | None, None)
    return table_of(PARTITIONS[name], name, Data, tag="partition", **others)


if TYPE_CHECKING:
    AnyData = Data
else:
    AnyData = one_of([*map(_partition_table, PARTITIONS), Stored, Nodes], "partition")


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
    name: str


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
    AnyModel = one_of(map(_model_class, MODELS))


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
    trim: Annotated[float, within(Number(least=0, below=0.5))] = 0.1
    precision: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _different_seeds(self) -> "Run":
        if isinstance(self.seed, list) and len(set(self.seed)) < len(self.seed):
            raise Misfit("seed", f"{self.seed} has the same seed twice")
        return self


class Leading(Table):
    """How the server of a federation waits for its nodes, and whom it believes."""

    deadline: Positive = 600.0
    resend: Positive = 120.0
    attempts: Count = 20
    quorum: Share = 1.0
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

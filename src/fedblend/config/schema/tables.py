# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of a configuration other than ``[algorithm]``: data only.

``[data]`` names a dataset or a file of one's own, and how its rows are shared out; a
partition's options stand beside its name. The options of a model are those of its
builder, and have the types of their defaults.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from fedblend import compress
from fedblend.checks import Number
from fedblend.compress import Compressor
from fedblend.config.schema.adapt import Adapt as Adapt
from fedblend.config.schema.adapt import require_form as require_form
from fedblend.config.schema.raw_column import RawColumns
from fedblend.config.schema.table import (
    Count,
    Fraction,
    Index,
    Inside,
    NotNegative,
    Positive,
    Share,
    Table,
    Word,
    arguments,
    exactly_one,
    matching,
    one_of,
    table_of,
    tagged,
    within,
)
from fedblend.data import partition
from fedblend.errors import SettingError
from fedblend.metrics import registry as metrics
from fedblend.models import MODELS
from fedblend.models.products import Products

_OWN: dict[str, str | None] = dict.fromkeys(("target", "client", "inputs", "drop"))
_OWN |= {"kind": None, "preprocess": "auto"}
"""Keys of a file of one's own, and what they are without one."""

Preprocess = Literal["auto", "always", "none"] | dict[Word, Word | list[Word]]
"""As of ``fedblend.data.read``."""


class Data(Table):
    """Where the rows come from, and what is held out."""

    source: Word | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    file: Word | None = None
    target: Word | None = None
    client: Word | None = None
    inputs: Word | list[Word] | None = None
    drop: list[Word] | None = None
    kind: Literal["classes", "binary", "regression"] | None = None
    preprocess: Preprocess = "auto"
    validation: Fraction = 0.0
    test: Fraction | Literal["official"] = 0.2
    unseen: Fraction = 0.0
    seed: Index = 0
    split_seed: Index | None = None
    partition: str

    @model_validator(mode="after")
    def _one_origin(self) -> "Data":
        exactly_one(self, "source", "file")
        for name in _OWN if self.source is not None else ():
            if getattr(self, name) != _OWN[name]:
                raise SettingError(name, "goes with file, not with source")
        if self.file is not None and self.options:
            raise SettingError("options", "go with source, not with file")
        if isinstance(self.test, float) and self.validation + self.test >= 1:
            held = self.validation + self.test
            raise SettingError(
                "validation + test", f"{held:g} leaves no rows to train on"
            )
        return self


class Stored(Data):
    """A partition that was saved."""

    partition: Literal["file"]
    path: Word


class InFolder(Data):
    """A folder that ``fedblend data shard`` or ``fb.data.write_shards`` wrote."""

    partition: Literal["folder"]

    @model_validator(mode="after")
    def _says_it_itself(self) -> "InFolder":
        for name, usual in _OWN.items():
            if getattr(self, name) != usual:
                raise SettingError(name, "is not for a folder of rows")
        return self


class Nodes(Data):
    """Rows that lie on the nodes of a federation; what they are like is stated here.

    ``raw`` has the columns of raw tables; their statistics come from the nodes.
    ``center`` and ``scale`` are about the mean and deviation of the targets.
    """

    partition: Literal["nodes"]
    clients: Count
    labels: Annotated[list[Word], Field(min_length=2)] | None = None
    classes: Annotated[int, within(Number(least=2, whole=True))] | None = None
    shape: list[Count] | None = None
    columns: Annotated[list[Word], Field(min_length=1)] | None = None
    raw: RawColumns | None = None
    center: float = 0.0
    scale: Positive = 1.0

    @model_validator(mode="after")
    def _one_origin(self) -> "Nodes":
        for name in ("source", "file", "target", "client", "inputs", "drop"):
            if getattr(self, name) is not None:
                raise SettingError(name, "is the nodes' own affair")
        if self.kind is None:
            raise SettingError("kind", "is missing; the nodes' rows are not known here")
        exactly_one(self, "shape", "columns", "raw")
        if self.kind == "classes" or self.labels is not None:
            exactly_one(self, "labels", "classes")
        if self.kind != "regression" and (self.center, self.scale) != (0, 1):
            name = "scale" if self.scale != 1 else "center"
            raise SettingError(name, 'goes with kind = "regression"')
        if isinstance(self.test, str) or self.unseen:
            name = "test" if isinstance(self.test, str) else "unseen"
            raise SettingError(name, "nodes hold out a fraction of their own rows")
        return self


_NAMES = ("iid", "contiguous", "class_pairs", "classes_per_client", "dirichlet")
PARTITIONS = {name: getattr(partition, name) for name in (*_NAMES, "shards", "by_key")}
"""How rows are given to clients, by name; options as of the function."""


def _partition_table(name: str) -> type[Data]:
    others: dict[str, Any] = {"rows": None, "seed": None}
    if name == "class_pairs":
        others["pairs"] = (list[list[Index]] | None, None)
    return table_of(PARTITIONS[name], name, Data, tag="partition", **others)


if TYPE_CHECKING:
    AnyData = Data
else:
    _further = (Stored, InFolder, Nodes)
    AnyData = one_of([*map(_partition_table, PARTITIONS), *_further], "partition")


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
    ensemble: Count | None = None
    products: Products | None = None
    name: str


_COUNT_OR_NONE: Any = Count | None  # pyright: ignore[reportOperatorIssue]


def _model_class(name: str) -> type[ModelChoice]:
    options: dict[str, Any] = {
        option: (list[Count], list(default))
        if isinstance(default, tuple)
        else (_COUNT_OR_NONE if default is None else type(default), default)
        for option, default in MODELS[name].options.items()
        if option != "dtype"  # [run] precision decides
    }
    return tagged(name, ModelChoice, **options)


NAMED_MODELS = tuple(map(_model_class, MODELS))
"""The tables of the models by name."""


Metric = Annotated[str, matching(metrics.pattern(), metrics.in_words())]
Split = Literal["train", "validation", "test"]


class Measure(Table):
    """What is measured, where."""

    splits: Annotated[list[Split], Field(min_length=1)] | None = None
    on: Count | Annotated[list[Index], Field(min_length=1)] | None = None
    local: bool | Count = True
    local_rate: Positive | Literal["tune", "same"] | None = None
    metrics: Annotated[list[Metric], Field(min_length=1)] | None = None


_OF_ROWS = ("classes", "share", "file", "target", "test", "batch_size")
COMPRESSORS = ("dithering", "identity", "int8", "natural", "rand_k", "sign", "top_k")
"""Those of ``fedblend.compress``; options as of the function."""


class CompressorTable(Table):
    """A compressor by name."""

    name: str

    def make(self, facts: Mapping[str, Any]) -> Compressor:
        """The compressor."""
        build = getattr(compress, self.name)
        return build(**arguments(build, self, facts))


if TYPE_CHECKING:
    AnyCompressor = CompressorTable
else:
    AnyCompressor = one_of(
        table_of(getattr(compress, name), name, CompressorTable) for name in COMPRESSORS
    )


class Compress(Table):
    """Which compressors, and the transforms that use them."""

    how: Literal["plain", "diana", "ef21", "perm_k"] = "plain"
    compressor: AnyCompressor | None = None
    rate: Share | Annotated[list[Share], Field(min_length=1)] | None = None
    start: Literal["zero", "first"] | None = None
    masks: Literal["own", "one"] = "own"
    down: AnyCompressor | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "Compress":
        given = [key for key in ("rate", "start") if getattr(self, key) is not None]
        if self.how != "diana" and given:
            key = given[0]
            raise SettingError(key, f'goes with how = "diana", not with "{self.how}"')
        one = self.masks == "one"
        if one and self.how not in ("plain", "diana"):
            wrong = f'"one" goes with how = "plain" or "diana", not with "{self.how}"'
            raise SettingError("masks", wrong)
        if self.down is not None and self.down.make({}).delta is None:
            wrong = f"needs a compressor that contracts, not {self.down.name}"
            raise SettingError("down", wrong)
        if self.how == "perm_k":
            if self.compressor is not None:
                wrong = 'how = "perm_k" has no other compressor; leave it out'
                raise SettingError("compressor", wrong)
            return self
        if self.compressor is None:
            if self.how != "plain" or self.down is None or one:
                raise SettingError("compressor", "is missing")
            return self
        made = self.compressor.make({})
        if one and not made.masks:
            wrong = '"one" needs rand_k with one k, and places that are not "sent"'
            raise SettingError("masks", wrong)
        if self.how == "diana" and made.omega is None:
            wrong = f'"diana" needs an unbiased compressor, not {self.compressor.name}'
            raise SettingError("how", wrong)
        if self.how == "ef21" and made.delta is None:
            wrong = f'"ef21" needs one that contracts, not {self.compressor.name}'
            raise SettingError("how", wrong)
        return self


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
    def _goes_together(self) -> "Central":
        if self.penalty is None and self.strength is not None:
            raise SettingError("strength", "goes with penalty")
        for name in _OF_ROWS:
            if self.penalty is not None and self._says(name):
                raise SettingError(name, "is for rows, and a penalty needs none")
        if self.penalty is None:
            exactly_one(self, "classes", "share", "file")
        if self.target is not None and self.file is None:
            raise SettingError("target", "goes with file")
        if self.how == "one_way":
            for name in ("steps", "rate", "merge", "upload"):
                if self._says(name):
                    raise SettingError(name, 'goes with central steps, not "one_way"')
        if self.how == "parallel" and self.upload:
            raise SettingError("upload", 'goes with how = "two_way"')
        return self


class Select(Table):
    """Which parameters are tables."""

    parameters: Annotated[list[str], Field(min_length=1)]


class Population(Table):
    """Which clients belong to it, by their names, and what they weigh together."""

    clients: Word | Annotated[list[Word], Field(min_length=1)]
    weight: Share
    cohort: Count | None = None


Populations = Annotated[dict[Word, Population], Field(min_length=1)]

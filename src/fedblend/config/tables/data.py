# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[data]``: its rows, which clients have them, what identifies them.

``[data]`` names a dataset or a file, and how its rows are shared out; a partition's
options stand beside its name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from fedblend.checks import Number
from fedblend.config.table import (
    Content,
    Count,
    Fraction,
    Index,
    NotNegative,
    Positive,
    Table,
    Word,
    arguments,
    exactly_one,
    limit,
    misfit,
    one_of,
    refuse_first,
    table_of,
)
from fedblend.data import datasets, partition
from fedblend.data.dataset import (
    DATASETS,
    NUMBERS,
    DataError,
    Dataset,
    DatasetInfo,
    Size,
    digest,
)
from fedblend.data.federated import (
    FederatedData,
    equalize,
    fit_preprocessing,
)
from fedblend.data.partition import Partition, divide
from fedblend.data.readers.checks import index_like, tells_target, wild_scales
from fedblend.data.readers.read import read
from fedblend.data.shards import dataset_in, open_shards
from fedblend.data.variants import one_class_clients, split_clients
from fedblend.errors import ConfigError, SettingError

SEEN = 10_000
"""Rows of a folder that are looked at for warnings."""
CLIENTS = {"clients": 10, "concentration": 1.0, "minimum": 20}
"""How the rows of a dataset without clients are shared out, by their classes."""
OF_OTHERS = ("classes", "per_client")
"""Options of partitions that are not chosen: these need their name."""
_OWN: dict[str, str | None] = dict.fromkeys(("target", "client", "inputs", "drop"))
_OWN |= {"kind": None, "log_shift": None, "preprocess": "auto"}
_OWN |= {"time": None, "group": None}
"""Keys of a file of one's own, and what they are without one."""
Preprocess = Literal["auto", "always", "none"] | dict[Word, Word | list[Word]]
"""As of ``fedblend.data.read``."""


class RawColumn(Table):
    """A column of the raw tables that nodes have, and the inputs made of it."""

    name: Word
    encoding: Literal[
        "standardize", "as_is", "flag", "one_hot", "ordinal", "date", "drop"
    ]
    style: str = ""
    categories: list[Word] = Field(default_factory=list)
    other: bool = False
    missing: bool = False
    parts: list[Literal["year", "week", "day"]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _goes_together(self) -> "RawColumn":
        named = self.encoding in ("one_hot", "ordinal")
        only = 'goes with encoding = "one_hot" or "ordinal"'
        refuse_first(
            (
                named and len(self.categories) < 2,
                "categories",
                f"{self.name} needs 2 or more",
            ),
            (not named and self.categories, "categories", only),
            (not named and self.other, "other", only),
            (
                self.encoding == "drop" and self.missing,
                "missing",
                "goes with a column that is not dropped",
            ),
            (
                self.parts and self.encoding != "date",
                "parts",
                'goes with encoding = "date"',
            ),
        )
        return self


def _different(columns: list[RawColumn]) -> list[RawColumn]:
    names = [column.name for column in columns]
    if len({*names}) < len(names):
        raise misfit("columns that differ in their names")
    return columns


RawColumns = Annotated[list[RawColumn], Field(min_length=1), AfterValidator(_different)]


class Data(Table):
    """Where the rows come from, and what is held out."""

    source: Word | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    file: Word | None = None
    target: Word | None = None
    client: Word | None = None
    inputs: Word | list[Word] | None = None
    drop: list[Word] | None = None
    kind: Literal["classes", "binary", "regression", "counts"] | None = None
    log_shift: NotNegative | None = None
    preprocess: Preprocess = "auto"
    time: Word | None = None
    group: Word | None = None
    validation: Fraction = 0.0
    test: Fraction | Literal["official"] = 0.2
    unseen: Fraction = 0.0
    seed: Index = 0
    split_seed: Index | None = None
    partition: str

    @model_validator(mode="after")
    def _one_origin(self) -> "Data":
        exactly_one(self, "source", "file")
        if self.source is not None:
            self._refuse_own("goes with file, not with source")
        held = self.validation + (self.test if isinstance(self.test, float) else 0)
        refuse_first(
            (
                self.file is not None and self.options,
                "options",
                "go with source, not with file",
            ),
            (held >= 1, "validation + test", f"{held:g} leaves no rows to train on"),
        )
        return self

    def _refuse_own(self, why: str) -> None:
        """Refuse the keys that only a table of the user's has."""
        own = ((getattr(self, key) != of, key, why) for key, of in _OWN.items())
        refuse_first(*own)


class InFolder(Data):
    """A folder that ``fb.data.write_shards`` wrote."""

    partition: Literal["folder"]

    @model_validator(mode="after")
    def _says_it_itself(self) -> "InFolder":
        self._refuse_own("is not for a folder of rows")
        return self


class NodeRows(Data):
    """Rows that lie on the nodes of a federation; what they are like is stated here.

    ``raw`` has the columns of raw tables; their statistics come from the nodes.
    ``center`` and ``scale`` are about the mean and deviation of the targets; of counts,
    ``center`` is about the logarithm of their mean.
    """

    partition: Literal["nodes"]
    clients: Count
    labels: Annotated[list[Word], Field(min_length=2)] | None = None
    classes: Annotated[int, limit(Number(least=2, whole=True))] | None = None
    shape: list[Count] | None = None
    columns: Annotated[list[Word], Field(min_length=1)] | None = None
    raw: RawColumns | None = None
    center: float = 0.0
    scale: Positive = 1.0

    @model_validator(mode="after")
    def _one_origin(self) -> "NodeRows":
        theirs = ("source", "file", "target", "client", "inputs", "drop")
        refuse_first(
            *(
                (
                    getattr(self, key) is not None,
                    key,
                    "is set by each node in node.toml; remove it",
                )
                for key in theirs
            ),
            (
                self.kind is None,
                "kind",
                "is missing; the nodes' rows are not known here",
            ),
        )
        exactly_one(self, "shape", "columns", "raw")
        if self.kind == "classes" or self.labels is not None:
            exactly_one(self, "labels", "classes")
        real, only = self.kind == "regression", 'goes with kind = "regression"'
        held = "nodes hold out a fraction of their own rows"
        refuse_first(
            (not real and self.scale != 1, "scale", only),
            (self.kind not in NUMBERS and self.center != 0, "center", only),
            (not real and self.log_shift is not None, "log_shift", only),
            (isinstance(self.test, str), "test", held),
            (self.unseen, "unseen", held),
            (self.time, "time", held),
            (self.group, "group", held),
        )
        return self


_NAMES = ["iid", "contiguous", "classes_per_client", "dirichlet", "shards", "by_key"]
PARTITIONS = {name: getattr(partition, name) for name in _NAMES}
"""How rows are given to clients, by name; options as of the function."""


def _partition_table(name: str) -> type[Data]:
    return table_of(PARTITIONS[name], name, Data, tag="partition", rows=None, seed=None)


if TYPE_CHECKING:
    AnyData = Data
else:
    AnyData = one_of(
        [*map(_partition_table, PARTITIONS), InFolder, NodeRows], "partition"
    )


def origin(data: Content) -> str:
    """What the rows are called."""
    return str(data.get("source") or Path(str(data.get("file", "run"))).stem)


def dataset_facts(data: Content) -> DatasetInfo | None:
    """What is known of the dataset; None of a file and of an unknown name."""
    source = data.get("source")
    return DATASETS.get(source) if isinstance(source, str) else None


def dataset_size(data: Content) -> Size | None:
    """The size of the dataset, where it is known."""
    known = dataset_facts(data)
    return None if known is None else known.size


def has_clients(data: Content) -> bool:
    """Whether the data names the client of each row."""
    size, file = dataset_size(data), data.get("file")
    if size is not None:
        return size.clients is not None
    named = isinstance(file, str) and file.endswith(".npz")
    return "client" in data or named


def usual_partition(data: Content) -> Content:
    """The partition of data that names none."""
    has_origin = "source" in data or "file" in data
    if not has_origin or any(key in data for key in ("partition", *OF_OTHERS)):
        return {}
    if has_clients(data):
        return {"partition": "by_key"}
    if "file" in data:
        raise SettingError(
            "data.client",
            "is missing; it names the column that says whose row it is. Without one, "
            'data.partition = "iid" with data.clients shares the rows out',
        )
    size = dataset_size(data)
    if size is None or size.classes is None:
        return {"partition": "iid", **_unless(data, {"clients": CLIENTS["clients"]})}
    return {"partition": "dirichlet", **_unless(data, CLIENTS)}


def _unless(data: Content, options: Mapping[str, Any]) -> Content:
    return {key: value for key, value in options.items() if key not in data}


def load_dataset(data: Data) -> Dataset:
    """The rows that ``[data]`` names."""
    if isinstance(data, NodeRows):
        raise ConfigError(
            'data.partition: "nodes" needs `fedblend federation run`, the rows are on '
            "the nodes"
        )
    if data.source is not None:
        return datasets.load(data.source, **data.options)
    assert data.file is not None
    if isinstance(data, InFolder):
        return dataset_in(data.file)
    known, path = data.model_dump_json(include={"file", *_READ}), Path(data.file)
    if path.is_file():
        about = path.stat()
        known += f"{path.absolute()} {about.st_mtime_ns} {about.st_size}"
    if _last_read.get("known") != known:
        _last_read.clear()  # before the next one is in memory, too
        options = {key: getattr(data, key) for key in _READ}
        options["drop"] = options["drop"] or ()
        _last_read.update(known=known, dataset=read(path, **options))
    return _last_read["dataset"]


_READ = ("target", "client", "inputs", "drop", "kind", "log_shift", "preprocess")
_READ += ("time", "group")
"""What ``read`` takes."""
_last_read: dict[str, Any] = {}
"""The rows of the last file, which runs of one comparison read again and again."""


def share_out(data: Data, dataset: Dataset) -> Partition:
    """The rows of every client, as ``[data]`` asks for them."""
    if isinstance(data, InFolder):  # which has the rows of clients in order
        return Partition((), description={"folder": dataset.sha256})
    labels = dataset.rows[1]
    facts = {"rows": len(labels), "labels": labels, "keys": dataset.keys}
    share = PARTITIONS[data.partition]
    return share(**arguments(share, data, facts))


def splits_of(data: Data, seed: int | list[int]) -> list[int]:
    """The numbers of the splits: one for every seed, or the one that is fixed."""
    if data.split_seed is not None:
        return [data.split_seed]
    if isinstance(data, InFolder):  # whose rows are shuffled for good
        return [0]
    seeds = [seed] if isinstance(seed, int) else seed
    # By time, the first seed tests the last rows, and each further one those before.
    return [*range(len(seeds))] if data.time is not None else seeds


def hold_out(
    data: Data, dataset: Dataset, parts: Partition, splits: list[int]
) -> tuple[Sequence[FederatedData], Sequence[FederatedData]]:
    """The clients in each split, and in each those that take no part in training."""
    every: Iterable[FederatedData] = (
        _split(data, dataset, parts, split) for split in splits
    )
    if data.time is not None or data.group is not None:
        every = equalize([*every])
    unseen: Sequence[FederatedData] = ()
    if data.unseen:
        pairs = [split_clients(one, data.unseen, data.seed) for one in every]
        every, unseen = zip(*pairs, strict=True)
    schema = dataset.schema
    if schema is None:
        return [*every], unseen
    seen, others = [], []
    # One after the other: raw splits of a large table are not all there at once.
    for place, one in enumerate(every):
        # Clients that take no part in training take none in the statistics, either.
        fitted = fit_preprocessing(schema, one)
        seen.append(one.preprocess(fitted))
        others += [new.preprocess(fitted) for new in unseen[place : place + 1]]
    return seen, others


def _split(data: Data, dataset: Dataset, parts: Partition, split: int) -> FederatedData:
    """The clients, with the rows that are held out in a split of this number."""
    if isinstance(data, InFolder):
        held: dict[str, Any] = {"validation": data.validation, "test": data.test}
        return open_shards(str(data.file), **held)
    try:
        return divide(
            dataset,
            parts,
            validation=data.validation,
            test=data.test,
            seed=data.seed,
            split=split,
        )
    except DataError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None


def facts(dataset: Dataset, parts: Partition, splits: list[int]) -> dict[str, Any]:
    """What identifies the data: name, rows, sha256 of rows and partition, splits."""
    return {
        "name": dataset.name,
        "rows": len(dataset.rows[0]),
        "sha256": dataset.sha256 or digest([*dataset.rows, *(dataset.test_rows or ())]),
        "partition_sha256": parts.hash,
        "splits": splits,
    }


def warnings(
    dataset: Dataset, federated_data: FederatedData, inputs: Any
) -> Iterator[str]:
    """What is odd about the data and its clients, but no error.

    ``inputs`` are the columns that the configuration names, if it does.
    """
    yield from dataset.notes
    if (fitted := federated_data.preprocessing) is not None:
        yield fitted.summarize()
        splits = federated_data.splits.values()
        yield from fitted.warnings(split.examples[0] for split in splits)
    if dataset.sha256:  # a folder's rows need not fit into memory
        some = tuple(array[:SEEN] for array in dataset.rows)
        dataset = dataset._replace(rows=some)
    if inputs is None or not dataset.columns:
        yield from index_like(dataset)
    yield from wild_scales(dataset)
    yield from tells_target(dataset)
    single = one_class_clients(federated_data)
    if single:
        name = federated_data.name(single[0])
        yield (
            f"{len(single)} of {federated_data.clients} clients have training rows of "
            f"one class only (the first is {name!r}); alone they cannot learn another"
        )

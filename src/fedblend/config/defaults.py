# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a configuration leaves out: keys that are chosen by the data and the algorithm.

A configuration needs its data, the columns of its client and target, and the name of an
algorithm. ``filled`` writes all other keys that have to be there into the raw tables,
before they are checked; what a file states is never changed. Keys that only have plain
defaults have them in the schema. The folder of a run has every key in ``config.toml``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedblend.data.dataset import DATASETS, DatasetInfo, Size
from fedblend.errors import SettingError
from fedblend.registry import ALGORITHMS, FACTS, AlgorithmEntry

VERSION = 1
"""The layout of a file that states none."""
LINEAR = ("logistic", "softmax")
ADAPTED = "mlp"
"""In place of a linear model, where an algorithm trains adapters."""
ADAPTERS = {"factors": "lora", "pairs": "gated_lora"}
"""The kind of adapters, by what an algorithm asks of them."""
WORK = {"rate": 0.1, "steps": 10, "batch_size": 32}
"""The local work of a client in a round."""
RATES = {"char_rnn": 0.8}
"""Of models that need another one."""
ROUNDS = 100
MANY, COHORT = 100, 10
"""Clients of a dataset beyond which a round has a cohort, and its size."""
CLIENTS = {"clients": 10, "concentration": 1.0, "minimum": 20}
"""How the rows of a dataset without clients are shared out, by their classes."""
OF_OTHERS = ("classes", "pairs", "path", "per_client")
"""Options of partitions that are not chosen: these need their name."""
OPTIONS: Mapping[str, Any] = {
    "alpha": 0.5,
    "copies": 2,
    "head_steps": 10,
    "inner_rate": 0.05,
    "inner_steps": 5,
    "compressor": {"name": "natural"},
    "lam": 0.1,
    "mu": 0.01,
    "personal": {"solver": "sgd"},
    "personal_steps": 10,
    "q_rate": 0.01,
    "refresh": 0.1,
    "server": 1.0,
    "tuning_steps": 10,
}
"""Options that an algorithm must have, by their keys."""
HEADS: Mapping[str, str] = {
    **dict.fromkeys(LINEAR, "bias"),
    **dict.fromkeys(("mlp", "cnn", "large_cnn", "resnet18", "char_rnn"), "last"),
    "text_classifier": "last",
    "transformer": "norm",
    "dual_encoder": "dense",
}
"""The parts of a model that stay with a client: of a linear one, the intercept."""
NEEDED = ("data", "algorithm")
"""Tables that a configuration cannot leave out."""

Content = dict[str, Any]


def filled(content: Content, name: str | None = None) -> Content:
    """The raw tables of a configuration with all that they leave out.

    Args:
        content: as TOML has it; what is no table is left for the schema to refuse.
        name: of the run, where the content has none.

    Raises:
        SettingError: nothing can be chosen for a key.
    """
    data, algorithm = _table(content, "data"), _table(content, "algorithm")
    adapt = _adapt(algorithm)
    model = {"name": _model(data, bool(adapt)), **_table(content, "model")}
    label = f"{_origin(data)}-{algorithm.get('name', 'run')}"
    adapted = {"adapt": adapt} if adapt else {}
    after = {"version": VERSION, "name": name or label, **adapted, **content}
    for key, table in (
        ("data", {**data, **_partition(data)}),
        ("model", model),
        ("algorithm", _algorithm(algorithm, str(model["name"]))),
        ("run", {"rounds": ROUNDS, **_table(content, "run")}),
    ):
        if isinstance(content.get(key, None if key in NEEDED else {}), dict):
            after[key] = table
    return _affordable(content, after) if any(chosen(content, after)) else after


def chosen(content: Content, after: Content) -> Iterator[tuple[str, Any]]:
    """The keys that ``filled`` chose, with their values, in the order of the tables."""
    for key, value in after.items():
        before = content.get(key)
        if isinstance(value, dict) and (before is None or isinstance(before, dict)):
            inside = chosen(before or {}, value)
            yield from ((f"{key}.{inner}", of) for inner, of in inside)
        elif key not in content:
            yield key, value


def _origin(data: Content) -> str:
    return str(data.get("source") or Path(str(data.get("file", "run"))).stem)


def _info(data: Content) -> DatasetInfo | None:
    """What is known of the dataset; None of a file and of an unknown name."""
    source = data.get("source")
    return DATASETS.get(source) if isinstance(source, str) else None


def _size(data: Content) -> Size | None:
    known = _info(data)
    return None if known is None else known.size


def _has_clients(data: Content) -> bool:
    """Whether the data names the client of each row."""
    size, file = _size(data), data.get("file")
    if data.get("source") == "mnist":
        return bool(_table(data, "options").get("writers"))
    if size is not None:
        return size.clients is not None
    named = isinstance(file, str) and (file.endswith(".npz") or Path(file).is_dir())
    return "client" in data or named


def _partition(data: Content) -> Content:
    has_origin = "source" in data or "file" in data
    if not has_origin or any(key in data for key in ("partition", *OF_OTHERS)):
        return {}
    if _has_clients(data):
        return {"partition": "by_key"}
    if "file" in data:
        raise SettingError(
            "data.client",
            "is missing; it names the column that says whose row it is. Without one, "
            'data.partition = "iid" with data.clients shares the rows out',
        )
    size = _size(data)
    if size is None or size.classes is None:
        return {"partition": "iid", **_unless(data, {"clients": CLIENTS["clients"]})}
    return {"partition": "dirichlet", **_unless(data, CLIENTS)}


def _adapt(algorithm: Content) -> Content:
    """The table ``[adapt]`` of an algorithm that cannot do without."""
    entry = ALGORITHMS.get(str(algorithm.get("name")))
    how = ADAPTERS.get(str(entry and entry.form))
    return {} if how is None else {"how": how}


def _model(data: Content, adapted: bool = False) -> str:
    shape, known = data.get("shape"), _info(data)
    if isinstance(shape, list) and len(shape) > 1:
        return "cnn"
    if known is not None and known.model is not None:
        return known.model
    two = known is not None and known.size.classes == 2
    return ADAPTED if adapted else "logistic" if two else "softmax"


def _algorithm(table: Content, model: str) -> Content:
    """The local work, and the options that the algorithm cannot do without."""
    name = str(table.get("name"))
    entry = ALGORITHMS.get(name)
    own = {} if entry is None else entry.defaults
    usual = {**WORK, "rate": RATES.get(model, WORK["rate"])}
    found = _with_work(table, {**usual, **own})
    if entry is None:
        return found
    nested = entry.keys.get("work")
    for key in _required(entry):
        if key == nested:
            found.setdefault(key, {})
        elif key in (entry.keeps, "head"):
            found.setdefault(key, _part(key, model))
        elif key in OPTIONS:
            found.setdefault(key, {**OPTIONS, **own}[key])
    usual |= {key: table[key] for key in ("optimizer", "batch_size") if key in table}
    if isinstance(table.get("rate"), float):
        usual["rate"] = table["rate"]
    for key, value in found.items():
        if isinstance(value, dict) and (key == nested or value.get("solver") == "sgd"):
            found[key] = _with_work(value, usual)
    return found


def _part(key: str, model: str) -> str | list[str]:
    """The part of a model that stays with a client; mostly its key says which."""
    word = "head" if key == "personal" else key
    return [HEADS[model]] if word == "head" and model in HEADS else word


def _with_work(table: Content, usual: Content) -> Content:
    """The table with what it lacks of local work."""
    found = dict(table)
    if "rate" not in table and "optimizer" not in table:
        key = "optimizer" if "optimizer" in usual else "rate"
        found[key] = usual[key]
    if "steps" not in table and "epochs" not in table:
        found["steps"] = usual["steps"]
    rows = "all" if found.get("rate") == "theory" else usual["batch_size"]
    return {**found, "batch_size": table.get("batch_size", rows)}


def _required(entry: AlgorithmEntry) -> Iterator[str]:
    """The keys of the options that have no default in the builder."""
    for name, parameter in entry.parameters.items():
        given = name in ("loss", "algorithm", *FACTS)
        is_main_work = name == "work" and name not in entry.keys
        if parameter.default is parameter.empty and not (given or is_main_work):
            yield entry.keys.get(name, name)


def _affordable(content: Content, after: Content) -> Content:
    """A cohort where there are many clients; of a chosen network, less is measured."""
    data, run = _table(after, "data"), _table(after, "run")
    size, model = _size(data), _table(after, "model").get("name")
    many = size is not None and (size.clients or 0) > MANY and _has_clients(data)
    drawn = "populations" in content or bool({"epoch", "separation"} & set(run))
    entry = ALGORITHMS.get(str(_table(after, "algorithm").get("name")))
    if many and not drawn and not (entry and entry.everyone):
        _add(after, "run", cohort=COHORT)
    if "name" not in _table(content, "model") and model not in LINEAR:
        held_out = {"splits": ["test"]} if data.get("test", True) else {}
        _add(after, "measure", local=False, **held_out)
    return after


def _add(content: Content, key: str, **more: Any) -> None:
    """Add keys to a table that does not have them."""
    if isinstance(content.get(key, {}), dict):
        content[key] = {**more, **_table(content, key)}


def _table(content: Content, key: str) -> Content:
    """A table of the content; an empty one for anything else, which is refused."""
    found = content.get(key)
    return found if isinstance(found, dict) else {}


def _unless(data: Content, options: Mapping[str, Any]) -> Content:
    return {key: value for key, value in options.items() if key not in data}

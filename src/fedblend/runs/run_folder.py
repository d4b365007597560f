# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its files, how they are written and read.

::

    config.toml        the configuration as run, every default explicit
    run.json           versions, device, hashes of data and partition, the task
    metrics.jsonl      a row after every block of rounds, for every seed
    summary.json       the final results, with harmed clients and costs
    clients.csv        every client's rows, bits, metrics, norm of the gradient at its
                       local model, and local_rounds, how long it trained alone
    harm.csv           which clients gain by the personal model, which it harms
    evidence.safetensors  what single test rows say, to compare with other runs
    model.safetensors  the shared model, one file for each of several seeds
    personal.safetensors  the personal models, leaves [clients, ...]; likewise
    preprocessing.json    what turns columns of a table into inputs; likewise
    checkpoint         for --resume; local_checkpoint is that of training alone,
                       trial_checkpoint that of the trial of how long to train alone
    states             client states, where they are stored on disk; likewise
    report.html        all of it as one page, written by ``fedblend run``

Every file is written beside its place and moved there, so that it is whole or absent.
"""

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from pydantic import TypeAdapter

from fedblend import trees
from fedblend.config import toml
from fedblend.config.config import Config, check
from fedblend.config.imports import refuse_unknown
from fedblend.core import Algorithm, PyTree, shared_model
from fedblend.data.dataset import DataError, Task
from fedblend.data.federated import FederatedData
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.errors import ConfigError, RunError
from fedblend.mixing import shapes_of
from fedblend.report.measures import rows_of
from fedblend.simulation.result import Results
from fedblend.simulation.serialize import (
    StackReader,
    WireError,
    build_tree,
    pack,
    stack_writer,
    unpack,
    write_atomically,
)

if TYPE_CHECKING:
    from fedblend.simulation.personalize import NewClients
    from fedblend.simulation.run import Run

KEPT, SHARED, LEFT_OUT = "kept", "shared", "left out"
"""What ``summary.json`` has under ``personal_models``: they are in the folder, all
clients deploy the shared model, or they were not kept."""


AUTO, DEPLOYED = "auto.json", "deployed"
"""What a comparison by ``fedblend auto`` has in its folder: what it found, and the
models of the method to deploy, trained on all rows."""
MADE_BY = "fb.simulate"
"""What ``config.toml`` has as ``made_by``, where Python code set up the run."""
MOST_BYTES = 8 * 2**30
"""The models of all clients and seeds are kept up to this size by default."""
AT_ONCE = 256
"""Clients whose states are in memory at once, besides those of the run itself."""


class Folder:
    """The paths in the folder of a run; its models may lie in another folder."""

    def __init__(self, path: Path, models: Path | None = None):
        self.path, self.models = path, models
        self.config = path / "config.toml"
        self.origin = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        """Absent while the run is not finished."""
        self.clients = path / "clients.csv"
        self.harm = path / "harm.csv"
        self.evidence = path / "evidence.safetensors"

    def checkpoint(self, stage: str) -> Path:
        """The checkpoint of a stage: "trial", "local" or "federated"."""
        before = "" if stage == "federated" else f"{stage}_"
        return self.path / f"{before}checkpoint"

    def states(self, stage: str) -> Path:
        """The client states of a stage, where they are stored on disk."""
        return self.path / ("states" if stage == "federated" else f"{stage}_states")

    def model(self, seed: int | None) -> Path:
        """The shared model; ``seed`` where there are several."""
        return self._of_models("model", seed, "safetensors")

    def personal(self, seed: int | None) -> Path:
        """The personal models of all clients; ``seed`` where there are several."""
        return self._of_models("personal", seed, "safetensors")

    def preprocessing(self, seed: int | None) -> Path:
        """What turns columns into inputs; ``seed`` where each has its own split."""
        return self._of_models("preprocessing", seed, "json")

    def _of_models(self, name: str, seed: int | None, ending: str) -> Path:
        if self.models is not None:
            return self.models / f"{name}.{ending}"
        suffix = "" if seed is None else f"-seed{seed}"
        return self.path / f"{name}{suffix}.{ending}"


def find_run(path: Path) -> Folder:
    """The folder of a run; that of ``fedblend auto`` stands for what it deploys, whose
    numbers are those of the run that it kept.

    Raises:
        RunError: the comparison deploys nothing, or had no time for the run.
    """
    if not (path / AUTO).is_file():
        return Folder(path)
    state = read_comparison(path)
    refuse_survival(path, state)
    method = state["deploy"]
    if method is None:
        raise RunError(
            f"{path}: this comparison deploys nothing; a run in {path / 'runs'} can be "
            "named instead"
        )
    run, models = path / "runs" / str(method), path / DEPLOYED
    if not run.is_dir():
        raise RunError(
            f"{path}: the run of {method} was left out for lack of time; the same "
            "fedblend auto command with more --minutes adds it"
        )
    return Folder(run, models if models.is_dir() else None)


def refuse_survival(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a comparison of times until an event, which keeps no run."""
    if state.get("kind") == "survival":
        raise RunError(
            f"{path}: holds models of times until an event, in models.json; fedblend "
            "predict, show and report take them, and nothing else does"
        )


def read_comparison(path: Path) -> dict[str, Any]:
    """What the folder of ``fedblend auto`` holds.

    Raises:
        RunError: the comparison is not finished.
    """
    state = read_json(path / AUTO)
    if "verdict" not in state or "deploy" not in state:
        raise RunError(
            f"{path}: this comparison is not finished; the same fedblend auto command "
            "continues it"
        )
    return state


def seeds_of(config: Config) -> list[int]:
    """The seeds of a run."""
    return list_seeds(config.run.seed)


def list_seeds(seed: int | list[int]) -> list[int]:
    """One seed or several, as a list."""
    return [seed] if isinstance(seed, int) else seed


def json_text(value: Any, indent: int | None = 2) -> str:
    """JSON text that every reader takes: what is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole."""
    write_atomically(path, text.encode())


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file, whole: a line for each row, with the columns of the first."""
    names = list(rows[0])
    lines = ([row.get(name, "") for name in names] for row in rows)
    write_text(path, csv_text(names, lines))


def csv_text(names: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    """The text of a CSV file, which spreadsheets show and do not compute.

    Names and labels come from others: a text that begins as a formula does gets an
    apostrophe before it. Numbers stay as they are.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_harmless(cell) for cell in line] for line in (names, *lines))
    return text.getvalue()


def _harmless(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def write_metrics(folder: Folder, run: Results, seeds: list[int]) -> None:
    """Write ``metrics.jsonl``: all rows so far."""
    lines = [json_text(row, indent=None) for row in rows_of(run, seeds)]
    write_text(folder.metrics, "".join(f"{line}\n" for line in lines))


def models(run: Results) -> list[PyTree]:
    """The shared model of every seed."""
    if run.replicas is None:
        return [run.shared]
    return [trees.take(run.shared, replica) for replica in range(run.replicas)]


def write_models(folder: Folder, run: Results, seeds: list[int]) -> None:
    """Write the shared model of every seed."""
    for seed, model in zip(seeds, models(run), strict=True):
        path = folder.model(None if run.replicas is None else seed)
        write_model(path, model, seed=seed, round=run.round)


def write_model(path: Path, model: PyTree, **about: Any) -> None:
    """Write a model, whole, with the format and these facts as metadata."""
    facts = {key: str(value) for key, value in about.items()}
    write_atomically(path, pack(model, {"format": "fedblend", **facts}))


def write_personal_models(
    folder: Folder,
    run: "Run",
    seeds: list[int],
    algorithm: Algorithm,
    keep: str,
) -> tuple[str, list[str]]:
    """Write the personal models of a completed run, a file for each seed.

    Args:
        folder: the folder of the run.
        run: the run.
        seeds: the seed of each replica.
        algorithm: that of the run.
        keep: "auto", "always" or "never".

    Returns:
        What ``summary.json`` has under ``personal_models``, and a warning where "auto"
        leaves the models out.
    """
    if algorithm.personal is shared_model:
        return SHARED, []
    if keep == "never":
        return LEFT_OUT, []
    clients = run.federated_data.clients
    (first,) = run.personal_models([0])
    size = clients * sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    if keep == "auto" and size > MOST_BYTES:
        return LEFT_OUT, [
            f"the personal models of {clients} clients are {size / 2**30:.1f} GiB, and "
            'not in the run folder; run.keep_personal = "always" keeps them'
        ]
    several = run.replicas is not None
    template = trees.take(first, 0) if several else first
    with contextlib.ExitStack() as files:
        writers = []
        for seed in seeds:
            path = folder.personal(seed if several else None)
            facts = {"format": "fedblend", "seed": str(seed), "round": str(run.round)}
            writer = stack_writer(path, template, clients, facts)
            writers.append(files.enter_context(writer))
        for start in range(0, clients, AT_ONCE):
            ids = np.arange(start, min(start + AT_ONCE, clients))
            models = run.personal_models(ids)
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
            for replica, write in enumerate(writers):
                own = (slice(None), replica) if several else slice(None)
                write(trees.take(stacked, own))
    return KEPT, []


def write_preprocessing(
    folder: Folder, preprocessing: Sequence[Preprocessing], seeds: list[int]
) -> None:
    """Write the preprocessing of every split: that of all seeds, or one of each."""
    one = len(preprocessing) == 1
    for seed, fitted in zip(seeds, preprocessing, strict=False):
        path = folder.preprocessing(None if one else seed)
        write_text(path, fitted.dump())


def read_preprocessing(folder: Folder, seed: int) -> Preprocessing | None:
    """The preprocessing of a seed; None of a run on numbers.

    Raises:
        RunError: the file is damaged.
    """
    for path in (folder.preprocessing(seed), folder.preprocessing(None)):
        if path.is_file():
            try:
                return Preprocessing.parse(_text(path))
            except DataError as error:
                raise RunError(f"{path}: {error}") from None
    return None


def write_clients(
    folder: Folder,
    run: Results,
    seeds: list[int],
    own: Mapping[str, np.ndarray],
    new_clients: "Sequence[NewClients]" = (),
) -> None:
    """Write ``clients.csv``: every client's rows, bits and metrics.

    Args:
        folder: the folder of the run.
        run: a completed run.
        seeds: the seed of each replica.
        own: further columns, arrays over the measured clients, and over seeds where
            there are several.
        new_clients: those that took no part in training, for each seed.
    """
    places = {int(client): place for place, client in enumerate(run.measured_ids)}
    seen, by_seed, rows = run.federated_data, run.evidence.measured, []
    training = {"training": "seen"} if new_clients else {}
    for replica, seed in enumerate(seeds):
        columns = _columns(by_seed[replica]) if by_seed else {}
        for name, values in own.items():
            columns[name] = values if run.replicas is None else values[:, replica]
        bits = run.bits(replica)
        for client in range(seen.clients):
            row = {"seed": seed, "id": client, **_facts(seen, client)}
            row |= {
                "bits_up": int(bits.up[client]),
                "bits_down": int(bits.down[client]),
            }
            row |= cells(columns, columns, places.get(client))
            rows.append(row | training)
        for new in new_clients[replica : replica + 1]:
            measured, data = _columns(new.measured), new.federated_data
            for client in range(data.clients):
                row = {"seed": seed, "id": seen.clients + client}
                row |= {**_facts(data, client), "bits_up": 0, "bits_down": 0}
                row |= {"training": "unseen", **cells(measured, columns, client)}
                rows.append(row)
    write_table(folder.clients, rows)


def _facts(data: FederatedData, client: int) -> dict[str, Any]:
    """The name of a client, and its rows in each split."""
    counts = dict.fromkeys(("train", "validation", "test"), 0)
    counts |= {name: int(of.counts[client]) for name, of in data.splits.items()}
    return {"name": data.name(client), **counts}


def cells(
    measured: Mapping[str, np.ndarray], columns: Iterable[str], place: int | None
) -> dict[str, float | str]:
    """A client's values in these columns; empty where there is none."""
    found: dict[str, float | str] = {}
    for name in columns:
        known = place is not None and name in measured
        value = float(measured[name][place]) if known else math.nan
        found[name] = "" if math.isnan(value) else value
    return found


def _columns(measured: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        f"{split}_{model}_{metric}": values
        for split, by_model in measured.items()
        for model, by_metric in by_model.items()
        for metric, values in by_metric.items()
    }


def read_config(folder: Folder, *, imports: bool = False) -> Config:
    """The configuration of a run.

    Args:
        folder: of the run.
        imports: whether it may name code that the user did not name, and that is
            imported.

    Raises:
        RunError: this is not the folder of a run, its configuration is damaged, or it
            names code that the user did not name.
    """
    content = _content(folder)
    if "made_by" in content:
        raise RunError(
            f"{folder.path}: {MADE_BY} made this run, so it has no configuration, "
            "which this needs; fb.load(folder, model) reads its models"
        )
    try:
        return _check(content, str(folder.config), imports)
    except ConfigError as error:
        raise RunError(str(error)) from None


def read_made_by(folder: Folder) -> int | list[int] | None:
    """The seeds of a run that Python code set up; None of one of a configuration."""
    content = _content(folder)
    return content["run"]["seed"] if "made_by" in content else None


def _content(folder: Folder) -> dict[str, Any]:
    if not folder.config.is_file():
        raise RunError(f"{folder.path}: is not the folder of a run (no config.toml)")
    try:
        return toml.read(folder.config)
    except ConfigError as error:
        raise RunError(str(error)) from None


def config_in(text: str, where: str, *, imports: bool = False) -> Config:
    """The configuration in a text that belongs to a run, see ``read_config``."""
    return _check(toml.parse(text, where), where, imports)


def _check(content: dict[str, Any], where: str, imports: bool) -> Config:
    if not imports:
        refuse_unknown(content, where)
    return check(content, where)


def read_data_tables(folder: Folder) -> Config:
    """The tables of a configuration that decide which rows are whose, and no others.

    Nothing is imported: a report must not run the code of an algorithm that a folder
    names.
    """
    content, kinds = _content(folder), Config.__annotations__
    try:
        parts = {
            name: TypeAdapter(kinds[name]).validate_python(content.get(name))
            for name in ("data", "central", "run", "measure")
        }
    except ValueError:
        raise RunError(f"{folder.config}: is damaged: its data are unclear") from None
    return Config.model_construct(**parts)


def read_task(folder: Folder) -> Task:
    """The task of a run, from ``run.json``."""
    if not folder.origin.is_file():
        raise RunError(f"{folder.path}: is not the folder of a run (no run.json)")
    known: Any = read_json(folder.origin).get("task")
    try:
        return task_from(known)
    except ValueError:
        raise RunError(
            f"{folder.origin}: does not say what the model is for; the run was made "
            "by an older fedblend, or the file is damaged"
        ) from None


def task_from(known: Any) -> Task:
    """The task that ``Task._asdict`` was written of."""
    return TypeAdapter(Task).validate_python(known)


def read_model(path: Path, template: PyTree) -> tuple[PyTree, dict[str, str]]:
    """The shared model that a run saved, and the metadata of the file.

    Args:
        path: see ``Folder.model``.
        template: the shapes and dtypes of its parameters.
    """
    if not path.is_file():
        raise RunError(
            f"{path}: the run has saved no shared model; it is written at the end, "
            "fedblend run ... --resume continues the run"
        )
    try:
        arrays, about = unpack(path.read_bytes())
        return build_tree(arrays, template), about
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def open_personal_models(path: Path) -> StackReader:
    """The personal models of a file.

    Raises:
        RunError: there is no such file, or it is damaged.
    """
    try:
        return StackReader(path)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def model_like(arrays: dict[str, np.ndarray], params: PyTree, where: Path) -> PyTree:
    """The model of these leaves: parameters, or a ``Blend``.

    Args:
        arrays: the leaves by name.
        params: the shapes and dtypes of the parameters.
        where: the file that they are from.
    """
    try:
        return build_tree(arrays, shapes_of(arrays, params))
    except WireError as error:
        raise RunError(f"{where}: {error}") from None


def read_rows(folder: Folder) -> list[dict[str, Any]]:
    """The rows of a run, finished or not."""
    lines = _text(folder.metrics).splitlines()
    return [_parse_json(line, folder.metrics) for line in lines]


def read_table(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    """The lines of a CSV file, all values text.

    Raises:
        RunError: the file is missing or damaged.
    """
    text = io.StringIO(_text(path))
    try:
        heading, *lines = filter(None, csv.reader(text, delimiter=delimiter))
        return [dict(zip(heading, line, strict=True)) for line in lines]
    except (ValueError, csv.Error):
        raise RunError(
            f"{path}: is damaged: it is not a table, or rows differ in length"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file."""
    return _parse_json(_text(path), path)


def read_summary(folder: Folder) -> dict[str, Any]:
    """The summary of a finished run."""
    found = read_json(folder.summary)
    if not found.get("runs"):
        raise RunError(f"{folder.summary}: is damaged: it has no runs")
    if not isinstance(found.get("warnings", []), list):
        raise RunError(f"{folder.summary}: is damaged: warnings are no list")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RunError(f"{path}: is damaged: it is not text") from None


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RunError(f"{path}: is damaged: it is not valid JSON") from None
    if not isinstance(found, dict):
        raise RunError(f"{path}: is damaged: a JSON object is expected")
    return found


def file_words(names: Sequence[str]) -> list[str]:
    """A word for the name of a file of each client; with its id where words are equal.

    >>> file_words(["a b", "c"]), file_words(["a b", "a-b"])
    (['a-b', 'c'], ['0-a-b', '1-a-b'])
    """
    words = [re.sub(r"[^\w.-]+", "-", name) for name in names]
    # File systems count bytes, up to 255 of them.
    words = [word.encode()[:80].decode(errors="ignore") for word in words]
    if len({word.lower() for word in words}) < len(words):
        words = [f"{client}-{word}" for client, word in enumerate(words)]
    return words

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""New clients for a finished run: models from its folder and the clients' own rows.

The folder is read and never written: the configuration, the shared model, and the task
in ``run.json``. The data of the run is not needed.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend.config.config import Config
from fedblend.config.model import loss_name, losses_of, measures_of, model_of
from fedblend.core import PyTree
from fedblend.data.dataset import AbsentColumnError, Task
from fedblend.data.federated import FederatedData, federate
from fedblend.data.partition.partitioners import by_key
from fedblend.data.readers.read import read_new_rows
from fedblend.errors import RunError
from fedblend.experiments import run_folder
from fedblend.experiments.new_clients import new_clients
from fedblend.experiments.run_folder import Folder
from fedblend.report.measures import in_order
from fedblend.simulation.personalize import NewClients
from fedblend.simulation.serialize import (
    WireError,
    as_tree,
    pack,
    unpack,
    write_atomically,
)
from fedblend.trees import precision


class ClientGain(NamedTuple):
    """The shared and the personal model of a new client on its held-out rows."""

    name: str
    train: int
    test: int
    metric: str
    before: float
    """The metric of the shared model; NaN where the client has no held-out rows."""
    after: float
    """The metric of the personal model."""
    low: float
    """The lower end of the 95 % interval of the gain; see ``gains``."""
    high: float
    """The upper end."""

    @property
    def gained(self) -> bool | None:
        """Whether the personal model is better; None where the rows do not tell."""
        if self.low <= 0 <= self.high or np.isnan(self.low):
            return None
        return self.low > 0


class Personalized(NamedTuple):
    """The new clients of a run, with their models."""

    clients: NewClients
    seed: int
    """The seed of the run whose shared model they got."""
    round: str

    def gains(self) -> list[ClientGain]:
        """A line for each client, by the main metric of the task."""
        data, measured = self.clients.federated_data, self.clients.measured
        metric, values = "loss", np.full((data.clients, 4), np.nan)
        if "test" in measured:
            models = measured["test"]
            metric = in_order(models["shared"])[0]
            gain = self.clients.evidence.gain("test", metric, "shared")
            both = models["shared"][metric], models["personal"][metric]
            values = np.stack([*both, gain.low, gain.high], axis=1)
        train, test = data.train.counts, data.test and data.test.counts
        return [
            ClientGain(
                data.name(client),
                int(train[client]),
                0 if test is None else int(test[client]),
                metric,
                *map(float, values[client]),
            )
            for client in range(data.clients)
        ]

    def save(self, path: Path) -> list[Path]:
        """Write the models in the format of runs; a file for each of several clients.

        The file of each of several clients has its name added. No file is overwritten.
        """
        data, paths = self.clients.federated_data, [path]
        names = [data.name(client) for client in range(data.clients)]
        if len(names) > 1:
            words = [re.sub(r"[^\w.-]+", "-", name) for name in names]
            if len(set(words)) < len(words):
                words = [f"{client}-{word}" for client, word in enumerate(words)]
            parts = [f"{path.stem}-{word}{path.suffix}" for word in words]
            paths = [path.with_name(part) for part in parts]
        for place in paths:
            if place.exists():
                raise RunError(f"{place}: exists already and is not overwritten")
        about = {"format": "fedblend", "seed": str(self.seed), "round": self.round}
        for client, place in enumerate(paths):
            model = self.clients.personal(client)
            write_atomically(place, pack(model, {**about, "client": names[client]}))
        return paths


def personalize_from(
    run: str | Path,
    data: str | Path,
    *,
    steps: int | None = None,
    rate: float | None = None,
    test: float = 0.2,
    seed: int | None = None,
    target: str | None = None,
    client: str | None = None,
) -> Personalized:
    """Give each new client a model, from the shared model of a run.

    Args:
        run: the folder of a finished run; it is not changed.
        data: the rows of the new clients, in any format of ``fedblend.data.read``.
        steps: local steps on the clients' own models; if None as the algorithm says,
            or those of five rounds.
        rate: the rate of these steps, plain SGD; the optimizer of the run if None.
        test: the fraction of each client's rows that is held out to compare on.
        seed: which seed of the run; the first if None.
        target: the column or array of the target; as in the run if None.
        client: the column or array that names the client of each row; as in the run if
            None and the data has it. Without it all rows are those of one client.

    Raises:
        RunError: the folder or an argument cannot be used.
        DataError: the data cannot be used.
    """
    if steps is not None and steps < 0:
        raise RunError(f"steps: {steps} is negative")
    if rate is not None and not 0 < rate < float("inf"):
        raise RunError(f"rate: {rate} is not a finite number above 0")
    if not 0 <= test < 1:
        raise RunError(f"test: {test} is not a fraction in [0, 1)")
    folder = Folder(Path(run))
    config, task = run_folder.read_config(folder), _task(folder)
    seeds = run_folder.seeds_of(config)
    chosen = seeds[0] if seed is None else seed
    if chosen not in seeds:
        known = ", ".join(map(str, seeds))
        raise RunError(f"seed: {chosen} is none of this run's seeds: {known}")
    rows = _data(Path(data), config, task, target, client, test, chosen)
    with precision(config.run.precision):
        name = loss_name(config, task)
        model = model_of(config, task, name)
        plain, loss = losses_of(config, name, model.apply)
        path = folder.model(chosen if isinstance(config.run.seed, list) else None)
        shared, about = _shared(path, jax.eval_shape(model.init, jax.random.key(0)))
        found = new_clients(
            config,
            (name, loss),
            rows,
            shared,
            jax.random.key(chosen),
            measure=measures_of(config, task, plain, model.apply),
            splits=["test"] if rows.test is not None else [],
            steps=steps,
            rate=rate,
        )
    return Personalized(found, chosen, about.get("round", ""))


def _task(folder: Folder) -> Task:
    """The task of a run, from ``run.json``."""
    if not folder.origin.is_file():
        raise RunError(f"{folder.path}: is not the folder of a run (no run.json)")
    known: Any = run_folder.read_json(folder.origin).get("task")
    try:
        return Task(
            known["kind"],
            int(known["outputs"]),
            tuple(int(size) for size in known["shape"]),
            tuple(str(name) for name in known["labels"]),
            tuple(str(name) for name in known["columns"]),
        )
    except (TypeError, KeyError, ValueError):
        raise RunError(
            f"{folder.origin}: does not say what the model is for; the run was made "
            "by an older fedblend, or the file is damaged"
        ) from None


def _shared(path: Path, template: PyTree) -> tuple[PyTree, dict[str, str]]:
    """The shared model that a run saved, and the metadata of the file."""
    if not path.is_file():
        raise RunError(
            f"{path}: the run has saved no shared model; it is written at the end, "
            "fedblend run ... --resume continues the run"
        )
    try:
        arrays, about = unpack(path.read_bytes())
        return as_tree(arrays, template), about
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def _data(
    path: Path,
    config: Config,
    task: Task,
    target: str | None,
    client: str | None,
    test: float,
    seed: int,
) -> FederatedData:
    """The rows of the new clients, a part of each client's held out."""
    data = config.data
    inputs = data.inputs if isinstance(data.inputs, str) else None
    read = partial(
        read_new_rows, path, task, target=target or data.target, inputs=inputs
    )
    try:
        found = read(client=client or data.client)
    except AbsentColumnError as error:
        # A single new client needs no column that tells the clients of the run apart.
        if client is not None or error.name != data.client:
            raise
        found = read()
    if found.keys is None:
        parts, names = [np.arange(len(found.rows[0]))], [path.stem]
    else:
        held = by_key(found.keys)
        parts, names = held.rows, held.names
    return federate(found.rows, parts, test=test, names=names, seed=seed)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""New clients for a run that is over: from its folder and their rows to their models.

The folder is read and never written: the configuration, the shared model, and what
``run.json`` says of the task. The data of the federation is not needed.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.config import toml
from fedblend.config.config import Config, ConfigError, check
from fedblend.config.schema.table import RunError
from fedblend.config.tasks import loss_name, losses_of, measures_of, model_of
from fedblend.core import Down, PyTree
from fedblend.data.dataset import AbsentColumnError
from fedblend.data.federated import FederatedData, federate
from fedblend.data.partition.partitioners import by_key
from fedblend.data.readers.read import Task, read_new_rows
from fedblend.experiments import run_folder
from fedblend.experiments.newcomers import joining
from fedblend.experiments.run_folder import Folder
from fedblend.report.curves import shown_metrics
from fedblend.simulation.checkpoint import write_atomically
from fedblend.simulation.personalize import NewClients, personalize
from fedblend.simulation.precision import precision
from fedblend.simulation.serialize import WireError, as_tree, pack, unpack


class Gain(NamedTuple):
    """What a newcomer's own model is worth beside the shared one, on held-out rows."""

    name: str
    train: int
    test: int
    metric: str
    before: float
    """Of the shared model; NaN where the newcomer has no held-out rows."""
    after: float
    """Of its own."""
    low: float
    """Where the 95 % interval of what it gains begins; see ``gains``."""
    high: float
    """Where it ends."""

    @property
    def gained(self) -> bool | None:
        """Whether its own model is better; None where nobody can tell."""
        if self.low <= 0 <= self.high or np.isnan(self.low):
            return None
        return self.low > 0


class Joined(NamedTuple):
    """Newcomers of a run, with their models."""

    newcomers: NewClients
    seed: int
    """Of the run whose shared model they got."""
    round: str

    def gains(self) -> list[Gain]:
        """A line for each newcomer, by the main metric of the task."""
        federated_data, measured = (
            self.newcomers.federated_data,
            self.newcomers.measured,
        )
        unknown = np.full(federated_data.clients, np.nan)
        metric, before, after, low, high = "loss", *[unknown] * 4
        if "test" in measured:
            metric = shown_metrics([{"measures": measured}], "test")[0]
            models = measured["test"]
            before, after = (models[of][metric] for of in ("shared", "personal"))
            gain = self.newcomers.evidence.gain("test", metric, "shared")
            low, high = gain.low, gain.high
        test = federated_data.test
        return [
            Gain(
                name=federated_data.name(client),
                train=int(federated_data.train.counts[client]),
                test=0 if test is None else int(test.counts[client]),
                metric=metric,
                before=float(before[client]),
                after=float(after[client]),
                low=float(low[client]),
                high=float(high[client]),
            )
            for client in range(federated_data.clients)
        ]

    def save(self, path: Path) -> list[Path]:
        """Write the models as runs write theirs; of several newcomers one file each.

        The name of a newcomer then stands behind that of the file. Nothing is
        overwritten.
        """
        paths = places(path, self.newcomers.federated_data)
        for place in paths:
            if place.exists():
                raise RunError(f"{place}: exists already and is not overwritten")
        for client, place in enumerate(paths):
            name = self.newcomers.federated_data.name(client)
            words = {"format": "fedblend", "seed": str(self.seed), "round": self.round}
            data = pack(self.newcomers.personal(client), {**words, "client": name})
            write_atomically(place, data)
        return paths


def places(path: Path, newcomers: FederatedData) -> list[Path]:
    """Where the models of newcomers go."""
    if newcomers.clients == 1:
        return [path]
    names = [newcomers.name(client) for client in range(newcomers.clients)]
    words = [re.sub(r"[^\w.-]+", "-", name) for name in names]
    if len(set(words)) < len(words):
        words = [f"{client}-{word}" for client, word in enumerate(words)]
    return [path.with_name(f"{path.stem}-{word}{path.suffix}") for word in words]


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
) -> Joined:
    """Give new clients a model each, from the shared model of a run.

    Args:
        run: the folder of a finished run; it is not changed.
        data: the newcomers' rows, in any format that ``fedblend.data.read`` takes.
        steps: local steps on their own models; the algorithm's own if None, or those
            of five rounds.
        rate: of these steps, plain SGD; the run's own if None.
        test: fraction of every newcomer's rows that is held out to compare on.
        seed: which of the run's seeds; the first if None.
        target: the column or array of the target; as in the run if None.
        client: that of the client of each row; as in the run if None and it is there.
            Without one all rows are one newcomer's.

    Raises:
        RunError: the folder, or what is asked of it, will not do.
        DataError: the data will not do.
    """
    if steps is not None and steps < 0:
        raise RunError(f"steps: {steps} is negative")
    if rate is not None and not 0 < rate < float("inf"):
        raise RunError(f"rate: {rate} is not a finite number above 0")
    if not 0 <= test < 1:
        raise RunError(f"test: {test} is not a fraction in [0, 1)")
    folder = Folder(Path(run))
    config, task = _config(folder), _task(folder)
    seeds = config.run.seed if isinstance(config.run.seed, list) else [config.run.seed]
    chosen = seeds[0] if seed is None else seed
    if chosen not in seeds:
        known = ", ".join(map(str, seeds))
        raise RunError(f"seed: {chosen} is none of this run's seeds: {known}")
    newcomers = _newcomers(Path(data), config, task, target, client, test, chosen)
    with precision(config.run.precision):
        name = loss_name(config, task)
        model = model_of(config, task, name)
        plain, loss = losses_of(config, name, model.apply)
        path = folder.model(chosen if isinstance(config.run.seed, list) else None)
        shared, words = _shared(path, jax.eval_shape(model.init, jax.random.key(0)))
        work = joining(config, (name, loss), newcomers, steps=steps, rate=rate)
        found = personalize(
            work.algorithm,
            Down(jax.tree.map(jnp.asarray, shared), jnp.zeros((), jnp.int32)),
            newcomers,
            jax.random.key(chosen),
            visits=work.visits,
            measure=measures_of(config, task, plain, model.apply),
            splits=["test"] if newcomers.test is not None else [],
        )
    return Joined(found, chosen, words.get("round", ""))


def _config(folder: Folder) -> Config:
    if not folder.config.is_file():
        raise RunError(f"{folder.path}: is not the folder of a run (no config.toml)")
    try:
        return check(toml.read(folder.config), str(folder.config))
    except ConfigError as error:
        raise RunError(str(error)) from None


def _task(folder: Folder) -> Task:
    """What the run says of its rows."""
    if not folder.origin.is_file():
        raise RunError(f"{folder.path}: is not the folder of a run (no run.json)")
    said: Any = run_folder.read_json(folder.origin).get("task")
    try:
        return Task(
            said["kind"],
            int(said["outputs"]),
            tuple(int(size) for size in said["shape"]),
            tuple(str(name) for name in said["labels"]),
            tuple(str(name) for name in said["columns"]),
        )
    except (TypeError, KeyError, ValueError):
        raise RunError(
            f"{folder.origin}: does not say what the model is for; the run was made "
            "by an older fedblend, or the file is damaged"
        ) from None


def _shared(path: Path, template: PyTree) -> tuple[PyTree, dict[str, str]]:
    """The shared model that a run saved, and what it says of it."""
    if not path.is_file():
        raise RunError(
            f"{path}: the run has saved no shared model; it is written at the end, "
            "fedblend run ... --resume goes on"
        )
    try:
        arrays, words = unpack(path.read_bytes())
        return as_tree(arrays, template), words
    except WireError as error:
        raise RunError(f"{path}: {error}") from None


def _newcomers(
    path: Path,
    config: Config,
    task: Task,
    target: str | None,
    client: str | None,
    test: float,
    seed: int,
) -> FederatedData:
    """The newcomers' rows, a part of each held out."""
    data = config.data
    inputs = data.inputs if isinstance(data.inputs, str) else None
    read = partial(
        read_new_rows, path, task, target=target or data.target, inputs=inputs
    )
    try:
        further = read(client=client or data.client)
    except AbsentColumnError as error:
        # A lone newcomer has no need of what tells the clients of the run apart.
        if client is not None or error.name != data.client:
            raise
        further = read()
    if further.keys is None:
        parts, names = [np.arange(len(further.rows[0]))], [path.stem]
    else:
        held = by_key(further.keys)
        parts, names = held.rows, held.names
    return federate(further.rows, parts, test=test, names=names, seed=seed)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models for new clients from the folder of a finished run, see ``new_clients``.

The folder is never written. It has the configuration, the shared model and the task;
the data of the run is not needed.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from fedblend.config.config import Config
from fedblend.config.tables.measure import measures_of
from fedblend.config.tables.model import loss_name, losses_of, model_of, name_parts
from fedblend.data.dataset import AbsentColumnError, Task
from fedblend.data.federated import FederatedData, federate
from fedblend.data.partition.partitioners import by_key
from fedblend.data.readers.read import read_new_rows
from fedblend.errors import RunError
from fedblend.metrics import main_first
from fedblend.runs import run_folder
from fedblend.runs.new_clients import new_clients
from fedblend.runs.saved_run import load
from fedblend.simulation.personalize import NewClients
from fedblend.trees import precision

if TYPE_CHECKING:
    from fedblend.data.preprocess.preprocessing import Preprocessing


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
            asked = self.clients.evidence.metrics
            metric = main_first(name for name in asked if name in models["shared"])[0]
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
            words = run_folder.file_words(names)
            parts = [f"{path.stem}-{word}{path.suffix}" for word in words]
            paths = [path.with_name(part) for part in parts]
        for place in paths:
            if place.exists():
                raise RunError(f"{place}: exists already and is not overwritten")
        for client, place in enumerate(paths):
            facts = {"seed": self.seed, "round": self.round, "client": names[client]}
            run_folder.write_model(place, self.clients.personal(client), **facts)
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
    imports: bool = False,
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
        imports: whether code that the folder names by import path may be imported.

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
    saved = load(run, imports=imports)
    config, task = saved.config, saved.task
    chosen = saved.seeds[0] if seed is None else seed
    path, fitted = saved.model_file(chosen), saved.preprocessing(chosen)
    rows = _data(Path(data), config, task, fitted, target, client, test, chosen)
    with precision(config.run.precision):
        name = loss_name(config, task)
        model = model_of(config, task, name)
        config = name_parts(config, model, task)
        plain, loss = losses_of(config, name, model.apply, task)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        shared, about = run_folder.read_model(path, shapes)
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
            features=model.features,
        )
    return Personalized(found, chosen, about.get("round", ""))


def _data(
    path: Path,
    config: Config,
    task: Task,
    preprocessing: "Preprocessing | None",
    target: str | None,
    client: str | None,
    test: float,
    seed: int,
) -> FederatedData:
    """The rows of the new clients, a part of each client's held out."""
    data = config.data
    inputs = data.inputs if isinstance(data.inputs, str) else None
    read = partial(
        read_new_rows,
        path,
        task,
        target=target or data.target,
        inputs=inputs,
        preprocessing=preprocessing,
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

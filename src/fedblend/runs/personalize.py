# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models for clients that join after training, from the folder of a finished run.

``simulation.personalize`` computes them: a new client enrolls at the shared model, may
take part in rounds of its own in which the message stays the same ("visits"), and then
deploys ``personal``. What it trains, and in how many visits, depends on the algorithm
of the run:

=============================================  =======================================
algorithm                                      the new client
=============================================  =======================================
one model for all clients (FedAvg)             fine-tunes that model, without visits
finetune, reptile, fomaml, perfedavg           adapts as in the run, without visits
FLIX                                           finds x_i by the run's solver and mixes
                                               it with the shared model, without visits
its own model is trained against the message   makes one visit, with all the steps
(Ditto, MAPPER, FedRep, training alone)
pFedMe, L2GD                                   takes Ditto's steps with their lam
APFL                                           makes visits of one step each
=============================================  =======================================

With a fixed shared model pFedMe's inner problem is Ditto's, and the expected step of
L2GD is Ditto's step. Visits of one step keep APFL's shared model fixed: equation (17).

Options with a number for each client are replaced by its mean; rates have no schedule.
The folder has all that is needed (configuration, shared model, task) and is never
changed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.config.config import Config
from fedblend.config.tables.measure import measures_of
from fedblend.config.tables.model import (
    loss_name,
    losses_of,
    model_of,
    name_parts,
    smoothness,
)
from fedblend.core import Algorithm, Down, Key, Loss, PyTree, shared_model
from fedblend.data.dataset import AbsentColumnError, Task
from fedblend.data.readers.read import read_new_rows
from fedblend.errors import RunError
from fedblend.metrics import Metric, main_first
from fedblend.report.measures import (
    Clients,
    ModelScores,
    compare_models,
    harm_rows,
)
from fedblend.runs import run_folder
from fedblend.runs.export.portable import Portable, safetensors_bytes
from fedblend.runs.saved_run import SavedRun, load
from fedblend.simulation.personalize import NewClients, personalize
from fedblend.simulation.serialize import write_atomically
from fedblend.trees import precision

if TYPE_CHECKING:
    from fedblend.data.preprocess.preprocessing import Preprocessing

ROUNDS = 5
"""The rounds of local work that new clients do by default; figure 6 of the APFL paper
has five epochs, one a round."""


def new_clients(
    config: Config,
    loss: tuple[str, Loss],
    data: fb.FederatedData,
    shared: PyTree,
    key: Key,
    *,
    measure: Mapping[str, Metric],
    splits: Sequence[str] | None,
    steps: int | None = None,
    rate: float | None = None,
) -> NewClients:
    """A model for each client that joins after training, with its metrics.

    Args:
        config: the configuration of the run.
        loss: its name, and the loss itself.
        data: the rows of the new clients.
        shared: the shared model of the run.
        key: the seed.
        measure: metrics by name.
        splits: the splits to measure on, all there are if None.
        steps: local steps on the clients' own models; if None as the algorithm says,
            or those of ``ROUNDS`` rounds.
        rate: the rate of these steps, plain SGD; the optimizer of the run if None.

    Raises:
        RunError: the algorithm does not use ``steps`` or ``rate``.
    """
    algorithm, visits = client_work(config, loss, data, steps, rate)
    down = Down(jax.tree.map(jnp.asarray, shared), jnp.zeros((), jnp.int32))
    return personalize(
        algorithm, down, data, key, visits=visits, measure=measure, splits=splits
    )


def client_work(
    config: Config,
    loss: tuple[str, Loss],
    data: fb.FederatedData,
    steps: int | None = None,
    rate: float | None = None,
) -> tuple[Algorithm, int]:
    """What a new client runs, and in how many visits; see the module's text."""
    options: Any = config.algorithm
    # A new client has no number of its own in a list over clients.
    means = {
        key: float(np.mean(value))
        for key in ("alpha", "lam")
        if isinstance(value := getattr(options, key, None), list)
    }
    options, kind = options.model_copy(update=means), options.entry.new_client
    visits = kind.visits
    if kind.steps is None:
        for key, value in {"steps": steps, "rate": rate}.items():
            if value is not None:
                raise RunError(
                    f"{key}: {value} has no meaning here; {options.name} finds the "
                    "model of a new client with the run's solver, algorithm.personal"
                )
        # Only the solver of x_i computes anything; the local work never runs.
        still = {"rate": 1.0, "optimizer": None, "schedule": None}
        options = options.model_copy(update=still)
    else:
        rounds = config.run.rounds if kind.whole_run else ROUNDS
        options = _work_stated(options, steps, rate, 0 if visits == 0 else rounds)
    if visits is None:
        if options.epochs is None:
            visits = int(np.mean(options.steps))
        else:
            rows = data.train.capacity
            visits = options.epochs * -(-rows // (options.rows() or rows))
        options = options.model_copy(update={"steps": 1, "epochs": None})
    known = None
    if "smooth" in options.entry.parameters:
        known = smoothness(config.model, loss[0], data)
    algorithm = options.build(loss[1], known, data.clients, new_client=True)
    if algorithm.personal is not shared_model:
        return algorithm, visits
    work = options.work()
    return fb.finetune(fb.fedavg(loss[1], work), loss[1], work), 0


def _work_stated(
    options: Any, steps: int | None, rate: float | None, rounds: int
) -> Any:
    """The options with these steps at this rate on a client's own model.

    Without ``steps``, the steps of so many rounds; with 0 rounds those of the options.
    """
    entry = options.entry
    table, place = entry.keys.get("work"), entry.new_client
    work = options if table is None else getattr(options, table)
    changes: dict[str, Any] = {"schedule": None}
    counted = place.steps == "steps" and work.epochs is not None
    if steps is not None:
        changes |= {place.steps: steps} | ({"epochs": None} if counted else {})
    elif rounds:
        key = "epochs" if counted else place.steps
        changes[key] = rounds * round(float(np.mean(getattr(work, key))))
    if rate is not None:
        changes[place.rate] = rate
        changes |= {"optimizer": None} if place.rate == "rate" else {}
    if table is None and place.steps == "steps":
        return options.model_copy(update=changes)
    # The update of the shared model is discarded: as little work on it as possible.
    least = {"steps": 1, "epochs": None, "schedule": None}
    if table is None:
        return options.model_copy(update=least | changes)
    return options.model_copy(update={**least, table: work.model_copy(update=changes)})


class Personalized(NamedTuple):
    """The new clients of a run, with their models."""

    clients: NewClients
    run: SavedRun
    seed: int
    """The seed of the run whose shared model they got."""
    round: str

    def compare(self) -> ModelScores | None:
        """The shared and the personal models by the main metric on held-out rows.

        None where there are no such rows, or the run has no shared model that predicts.
        """
        evidence = self.clients.evidence
        if "test" not in evidence.counts or self.run.no_shared:
            return None
        shared = self.clients.measured["test"]["shared"]
        metric = main_first(name for name in evidence.metrics if name in shared)[0]
        return compare_models(evidence, "test", metric)

    def gains(self) -> list[dict[str, Any]]:
        """A line for each client as in ``harm.csv``; only counts without a comparison.

        The other model is the shared one.
        """
        data, found = self.clients.federated_data, self.compare()
        ids = np.arange(data.clients)
        names = [data.name(client) for client in range(data.clients)]
        test = np.zeros_like(ids) if data.test is None else data.test.counts
        rows = ids.tolist(), names, data.train.counts.tolist(), test.tolist()
        lines: list[dict[str, Any]] = [
            dict(zip(("id", "name", "train", "test"), row, strict=True))
            for row in zip(*rows, strict=True)
        ]
        if found is not None:
            lines = harm_rows(found, Clients(ids, names, data.train.counts, test))
        return sorted(lines, key=lambda line: line["id"])

    def save(self, path: Path) -> list[Path]:
        """Write the models as exports do, with all that predicting needs.

        The file of each of several clients has its name added, and any file the suffix
        by which ``predict`` knows it. No file is overwritten.
        """
        if path.suffix != ".safetensors":
            path = path.with_name(f"{path.name}.safetensors")
        data, paths = self.clients.federated_data, [path]
        names = [data.name(client) for client in range(data.clients)]
        if len(names) > 1:
            words = run_folder.file_words(names)
            parts = [f"{path.stem}-{word}{path.suffix}" for word in words]
            paths = [path.with_name(part) for part in parts]
        for place in paths:
            if place.exists():
                raise RunError(f"{place}: exists already and is not overwritten")
        run, fitted = self.run, self.run.preprocessing(self.seed)
        for client, place in enumerate(paths):
            facts = {"seed": str(self.seed), "round": self.round}
            facts["client"] = names[client]
            params = self.clients.personal(client)
            model = Portable(run.config, run.task, params, fitted, facts)
            write_atomically(place, safetensors_bytes(model))
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
        model = model_of(config, task)
        config = name_parts(config, model, task)
        plain, loss = losses_of(config, model.apply, task)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        shared, about = run_folder.read_model(path, shapes)
        found = new_clients(
            config,
            (loss_name(config, task), loss),
            rows,
            shared,
            jax.random.key(chosen),
            measure=measures_of(config, task, plain, model.apply),
            splits=["test"] if rows.test is not None else [],
            steps=steps,
            rate=rate,
        )
    return Personalized(found, saved, chosen, about.get("round", ""))


def _data(
    path: Path,
    config: Config,
    task: Task,
    preprocessing: "Preprocessing | None",
    target: str | None,
    client: str | None,
    test: float,
    seed: int,
) -> fb.FederatedData:
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
        held = fb.partition.by_key(found.keys)
        parts, names = held.rows, held.names
    return fb.federate(found.rows, parts, test=test, names=names, seed=seed)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a finished run as a value: its models, what they predict, its records.

``fb.load(folder)`` needs the folder alone, not the data of the run.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.config.config import Config
from fedblend.core import PyTree
from fedblend.data.dataset import Task
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.errors import RunError
from fedblend.mixing import Apply
from fedblend.models import Model
from fedblend.report.measures import frame
from fedblend.runs import run_folder
from fedblend.runs.export.portable import Portable
from fedblend.runs.predict import (
    NO_SHARED,
    TablePredictions,
    find_client,
    predict_rows,
)
from fedblend.simulation.serialize import StackReader


def load(
    folder: str | Path, model: Model | None = None, *, imports: bool = False
) -> "SavedRun":
    """The finished run in a folder.

    Args:
        folder: of the run, or of ``fedblend auto``, whose run to deploy is loaded.
        model: of a run that ``Run.save`` wrote: what it trained, to read its models.
        imports: whether code that the folder names by import path may be imported:
            for a folder that you trust. Import paths of configurations that you loaded
            in this process are allowed.

    Example::

        run = fb.load("runs/first")
        model = run.personal("hospital 3")
        labels = run.predict("new.csv", client="hospital 3")

    Raises:
        RunError: this is not the folder of a finished run, or it names other code.
    """
    return SavedRun(folder, model, imports=imports)


class SavedRun:
    """A finished run, read from its folder.

    ``config``, ``summary`` and ``task`` are the configuration, the content of
    ``summary.json`` and what the model is for; ``seeds`` are the seeds of the run, and
    ``names`` the names of its clients, by id. Methods take the first seed if none is
    given. A run that ``Run.save`` wrote has neither ``config`` nor ``task``.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Model | None = None,
        *,
        imports: bool = False,
    ):
        self.folder = run_folder.find_run(Path(folder))
        self._imports, self._model = imports, model
        self._coded = run_folder.read_made_by(self.folder)
        seed = self.config.run.seed if self._coded is None else self._coded
        if not self.folder.summary.is_file():
            raise RunError(
                f"{folder}: this run is not finished; fedblend run ... --resume "
                "continues it"
            )
        self.summary = run_folder.read_summary(self.folder)
        if self._coded is None:
            _ = self.task  # refuses what is damaged at once
        self._several = not isinstance(seed, int)
        self.seeds = run_folder.list_seeds(seed)
        if self.folder.models is not None:
            self.seeds = self.seeds[:1]  # all rows are one split
        self._stacks: dict[Path, StackReader] = {}

    @cached_property
    def config(self) -> Config:
        """The configuration."""
        return run_folder.read_config(self.folder, imports=self._imports)

    @cached_property
    def task(self) -> Task:
        """What the model is for."""
        _ = self.config  # refuses a run without one
        return run_folder.read_task(self.folder)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the clients that took part, by id."""
        return tuple(row["name"] for row in self.clients())

    def clients(self, seed: int | None = None) -> list[dict[str, str]]:
        """The lines of ``clients.csv`` of a seed, by id; all values are text.

        Clients that took no part in training are left out.
        """
        chosen, lines = self.seeds[0] if seed is None else seed, self._lines
        try:
            own = [row for row in lines if int(row["seed"]) == chosen]
            seen = [row for row in own if row.get("training") != "unseen"]
            in_order = [int(row["id"]) for row in seen] == list(range(len(seen)))
        except (KeyError, ValueError):
            raise RunError(f"{self.folder.clients}: is damaged") from None
        if not seen or not in_order:
            raise RunError(f"{self.folder.clients}: is damaged: clients are missing")
        return seen

    @cached_property
    def _lines(self) -> list[dict[str, str]]:
        return run_folder.read_table(self.folder.clients)

    def client_id(self, client: int | str) -> int:
        """The id of a client, by its id or its name.

        A text is a name first; where no client has this name, it may be an id.
        """
        return find_client(client, self.names)

    @cached_property
    def portable(self) -> Portable:
        """The configuration and the task as what predicts; without parameters."""
        return Portable(self.config, self.task)

    @property
    def apply(self) -> Apply:
        """``apply(params, inputs) -> outputs``; ``fb.predict`` takes a Blend too."""
        return self.portable.apply if self._model is None else self._model.apply

    @cached_property
    def _shapes(self) -> PyTree:
        """Shapes and dtypes of the parameters."""
        if self._model is None:
            return self.portable.shapes
        return jax.eval_shape(self._model.init, jax.random.key(0))

    @property
    def no_shared(self) -> str:
        """Why no shared model predicts; empty where one does."""
        if not self.summary["runs"][0]["bits"]["up"]:
            return "no client sent anything"
        parts = self._coded is None and self.config.algorithm.trains_parts
        return "a part of the model never leaves its client" if parts else ""

    def shared(self, seed: int | None = None) -> PyTree:
        """The shared model.

        Raises:
            RunError: there is none, as after training alone, or a part of it stayed
                with the clients, as with FedPer.
        """
        if self.no_shared:
            raise RunError(f"{self.folder.path}: {self.no_shared}{NO_SHARED}")
        return run_folder.read_model(self.model_file(seed), self._shapes)[0]

    def model_file(self, seed: int | None = None) -> Path:
        """The file of the shared model, and of the part of a model that is shared."""
        return self.folder.model(self._file_seed(seed))

    def personal(self, client: int | str, seed: int | None = None) -> PyTree:
        """The model that a client deploys: parameters, or a ``Blend``.

        Args:
            client: by id or by name.
            seed: which seed of the run; the first if None.

        Raises:
            RunError: there is no such client, or the run has kept no such models.
        """
        place = self.client_id(client)
        kept = self.summary.get("personal_models")
        if kept == run_folder.SHARED:
            return self.shared(seed)
        path = self.folder.personal(self._file_seed(seed))
        if kept != run_folder.KEPT:
            why = 'run.keep_personal = "always" keeps them'
            if kept is None:
                why = "an older fedblend made it; run it again"
            raise RunError(
                f"{self.folder.path}: this run has kept no personal models; {why}"
            )
        if path not in self._stacks:
            self._stacks[path] = run_folder.open_personal_models(path)
        stack = self._stacks[path]
        if stack.clients != len(self.names):
            raise RunError(f"{path}: has {stack.clients} clients, not those of the run")
        return run_folder.model_like(stack.model(place), self._shapes, path)

    def preprocessing(self, seed: int | None = None) -> Preprocessing | None:
        """What turns the columns of a table into inputs; None where nothing does."""
        chosen = self.seeds[0] if seed is None else seed
        return run_folder.read_preprocessing(self.folder, chosen)

    def model(
        self, client: int | str | None = None, seed: int | None = None
    ) -> Portable:
        """A client's model, or the shared one, with all that predicting needs."""
        params = self.shared(seed) if client is None else self.personal(client, seed)
        round = self.summary["runs"][0]["round"]
        facts = {"seed": self.seeds[0] if seed is None else seed, "round": round}
        if client is not None:
            facts["client"] = self.names[self.client_id(client)]
        return Portable(
            self.config,
            self.task,
            params,
            self.preprocessing(seed),
            {name: str(fact) for name, fact in facts.items()},
        )

    def predictions(
        self,
        source: Any,
        client: int | str | None = None,
        *,
        shared: bool = False,
        seed: int | None = None,
    ) -> TablePredictions:
        """What models predict for the rows of a table, with probabilities.

        Args:
            source: a .csv, .parquet or .npz file, a pandas or polars frame, a dict of
                columns, or an array of inputs.
            client: whose model predicts all rows, by id or name. By default the column
                that named the clients in training selects the model of each row;
                without such a column the shared model predicts.
            shared: use the shared model whatever columns there are.
            seed: which seed of the run; the first if None.

        Raises:
            RunError: there is no such client or model.
            DataError: the table does not fit the model.
        """
        data = self.config.data
        others = [name for name in (data.target, data.client) if isinstance(name, str)]
        return predict_rows(
            lambda one: self.model(one, seed),
            lambda: self.names,
            data.client,
            source,
            client,
            shared=shared,
            others=others,
        )

    def predict(
        self,
        source: Any,
        client: int | str | None = None,
        *,
        shared: bool = False,
        seed: int | None = None,
    ) -> np.ndarray:
        """The prediction of each row of a table: a label or a number.

        Arguments are those of ``predictions``, which has the probabilities, too.
        """
        return self.predictions(source, client, shared=shared, seed=seed).labels

    def frame(self) -> Any:
        """The records as a pandas frame: a line for each measured number.

        Its columns are ``seed``, ``round``, the costs of the block, ``split``,
        ``model``, ``metric``, and the fields of a ``Spread`` over clients.
        """
        return frame(run_folder.read_rows(self.folder))

    def _file_seed(self, seed: int | None) -> int | None:
        """The seed as in the names of files: None in a run of one."""
        chosen = self.seeds[0] if seed is None else seed
        if chosen not in self.seeds:
            known = ", ".join(map(str, self.seeds))
            raise RunError(f"seed: {chosen} is not a seed of this run: {known}")
        return chosen if self._several else None

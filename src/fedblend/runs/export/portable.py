# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One model with all that predicting needs, in memory or in a file.

A .safetensors file has the parameters by name and, as metadata, the texts ``config``
(TOML), ``task`` and ``preprocessing`` (JSON) and facts such as ``client``, ``seed`` and
``round``. No file is ever unpickled, and none decides which code runs: one whose
configuration names a model or an algorithm by import path is refused, unless the caller
allows imports.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.config.config import Config, dump
from fedblend.config.imports import CodeError
from fedblend.config.tables.model import loss_name, model_of
from fedblend.core import PyTree
from fedblend.data.dataset import Task
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.errors import InputError, RunError
from fedblend.mixing import Apply, predict
from fedblend.models import Model
from fedblend.runs import run_folder
from fedblend.simulation.serialize import WireError, pack, unpack
from fedblend.trees import precision

BATCH = 1024
"""Rows that are computed at once: memory does not grow with the table."""
FORMAT = "fedblend model 1"
PROBABLE = ("cross_entropy", "logistic", "sequence_cross_entropy", "multilabel")
"""Losses whose scores become probabilities."""


class Portable:
    """A model with its configuration, task and preprocessing.

    ``facts`` say whose model it is and when it was trained.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        params: PyTree = None,
        preprocessing: Preprocessing | None = None,
        facts: Mapping[str, str] | None = None,
    ):
        self.config, self.task, self.params = config, task, params
        self.preprocessing, self.facts = preprocessing, dict(facts or {})

    @cached_property
    def model(self) -> Model:
        """The model: ``init`` and ``apply``, in the precision of the run."""
        with precision(self.config.run.precision):
            return model_of(self.config, self.task)

    @property
    def apply(self) -> Apply:
        """``apply(params, inputs) -> outputs``."""
        return self.model.apply

    @cached_property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the parameters."""
        with precision(self.config.run.precision):
            return jax.eval_shape(self.model.init, jax.random.key(0))

    @property
    def takes_numbers(self) -> bool:
        """Whether inputs are class numbers, such as those of characters."""
        return self.task.kind == "sequence"

    @property
    def probable(self) -> bool:
        """Whether outputs are scores that probabilities can be made of."""
        return loss_name(self.config, self.task) in PROBABLE

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """What the model computes for encoded rows, some rows at a time."""
        return outputs_of(self, self.params, inputs)

    def metadata(self) -> dict[str, str]:
        """Everything but the parameters, as texts."""
        found = {
            "format": FORMAT,
            "config": dump(self.config),
            "task": json.dumps(self.task._asdict()),
            **self.facts,
        }
        if self.preprocessing is not None:
            found["preprocessing"] = self.preprocessing.dump()
        return found


def outputs_of(portable: Portable, params: PyTree, inputs: np.ndarray) -> np.ndarray:
    """The raw outputs of these parameters for encoded rows, some rows at a time."""
    dtype = np.int32 if portable.takes_numbers else None
    rows = np.asarray(inputs, dtype)
    with precision(portable.config.run.precision):
        params = jax.tree.map(jnp.asarray, params)
        parts = [
            np.asarray(
                predict(portable.apply, params, jnp.asarray(rows[at : at + BATCH]))
            )
            for at in range(0, max(len(rows), 1), BATCH)
        ]
    return np.concatenate(parts)


def safetensors_bytes(portable: Portable) -> bytes:
    """A model as the bytes of a .safetensors file."""
    return pack(portable.params, portable.metadata())


def read_portable(path: Path, *, imports: bool = False) -> Portable:
    """The model of a .safetensors file.

    Args:
        path: the file.
        imports: whether code that the file names by import path may be imported.

    Raises:
        RunError: the file is not such a model, or it is damaged.
    """
    try:
        arrays, metadata = unpack(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except WireError as error:
        raise RunError(f"{path}: {error}") from None
    if metadata.get("format") != FORMAT:
        raise RunError(
            f"{path}: is not a model that fedblend export wrote for predictions; "
            "--to safetensors and --to onnx write such files"
        )
    portable = read_metadata(metadata, path, imports=imports)
    portable.params = run_folder.model_like(arrays, portable.shapes, path)
    return portable


def read_metadata(
    metadata: Mapping[str, str], path: Path, *, imports: bool = False
) -> Portable:
    """A model without its parameters, from the metadata of a file."""
    try:
        text = metadata["config"]
        config = run_folder.config_in(text, str(path), imports=imports)
        task = run_folder.task_from(json.loads(metadata["task"]))
    except CodeError:
        raise
    except (InputError, LookupError, TypeError, ValueError, RecursionError):
        raise RunError(f"{path}: is damaged: its metadata cannot be read") from None
    fitted = None
    if "preprocessing" in metadata:
        fitted = Preprocessing.parse(metadata["preprocessing"])
    texts = ("format", "config", "task", "preprocessing")
    facts = {name: text for name, text in metadata.items() if name not in texts}
    return Portable(config, task, None, fitted, facts)

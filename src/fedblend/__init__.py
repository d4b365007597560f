# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated learning by mixing: the public names, once.

``import fedblend as fb``: build a federation, pick an algorithm, ``fb.simulate`` it.

A name is imported when it is first used, so that the command line can answer
``fedblend --help`` without loading JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedblend import (
        clusters,
        compress,
        data,
        keys,
        metrics,
        mixing,
        models,
        objectives,
        pure_local,
        theory,
        trees,
        wrap,
    )
    from fedblend.algorithms import (
        agnostic,
        apfl,
        apfl_agnostic,
        apfl_averaged,
        apfl_fedjax,
        apfl_fedtorch,
        ditto,
        fedavg,
        fedopt,
        fedprox,
        fedrep,
        finetune,
        flix,
        fomaml,
        l2gd,
        local_only,
        mapper,
        perfedavg,
        pfedme,
        reptile,
        scaffold,
        svrg,
    )
    from fedblend.core import Algorithm, Batch, Down, Heard, Needs, Ragged, Shard, Up
    from fedblend.data import partition, sources
    from fedblend.data.federation import Federation, federate, joined, shard_of
    from fedblend.local import Epochs, Scheduled, descend
    from fedblend.mixing import Blend, predict
    from fedblend.models import Model
    from fedblend.runtime import checkpoint
    from fedblend.runtime.alone import train_alone
    from fedblend.runtime.cohort import Strata
    from fedblend.runtime.newcomers import Newcomers, personalise
    from fedblend.runtime.record import Record
    from fedblend.runtime.run import Run
    from fedblend.runtime.simulate import simulate
    from fedblend.runtime.tuning import tune
    from fedblend.wrap import (
        clipped,
        clipped_by_quantile,
        compressed,
        diana,
        ef21,
        mixed,
        private,
        private_by_tree,
        select,
    )

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Batch",
    "Blend",
    "Down",
    "Epochs",
    "Federation",
    "Heard",
    "Model",
    "Needs",
    "Newcomers",
    "Ragged",
    "Record",
    "Run",
    "Scheduled",
    "Shard",
    "Strata",
    "Up",
    "agnostic",
    "apfl",
    "apfl_agnostic",
    "apfl_averaged",
    "apfl_fedjax",
    "apfl_fedtorch",
    "checkpoint",
    "clipped",
    "clipped_by_quantile",
    "clusters",
    "compress",
    "compressed",
    "data",
    "descend",
    "diana",
    "ditto",
    "ef21",
    "fedavg",
    "federate",
    "fedopt",
    "fedprox",
    "fedrep",
    "finetune",
    "flix",
    "fomaml",
    "joined",
    "keys",
    "l2gd",
    "local_only",
    "mapper",
    "metrics",
    "mixed",
    "mixing",
    "models",
    "objectives",
    "partition",
    "perfedavg",
    "personalise",
    "pfedme",
    "predict",
    "private",
    "private_by_tree",
    "pure_local",
    "reptile",
    "scaffold",
    "select",
    "shard_of",
    "simulate",
    "sources",
    "svrg",
    "theory",
    "train_alone",
    "trees",
    "tune",
    "wrap",
]

_HOMES = {
    "algorithms": "agnostic apfl apfl_agnostic apfl_averaged apfl_fedjax "
    "apfl_fedtorch ditto fedavg fedopt fedprox fedrep finetune flix fomaml l2gd "
    "local_only mapper perfedavg pfedme reptile scaffold svrg",
    "core": "Algorithm Batch Down Heard Needs Ragged Shard Up",
    "data.federation": "Federation federate joined shard_of",
    "experiment.estimator": "FederatedClassifier FederatedRegressor",
    "experiment.joining": "personalise_from",
    "experiment.scoring": "client_scorer",
    "local": "Epochs Scheduled descend",
    "mixing": "Blend predict",
    "models": "Model",
    "runtime.alone": "train_alone",
    "runtime.cohort": "Strata",
    "runtime.newcomers": "Newcomers personalise",
    "runtime.record": "Record",
    "runtime.run": "Run",
    "runtime.simulate": "simulate",
    "runtime.tuning": "tune",
    "wrap": "clipped clipped_by_quantile compressed diana ef21 mixed private "
    "private_by_tree select",
}
"""Where each name lives; what needs scikit-learn or pydantic is not in __all__."""
_MODULES = {
    "": "clusters compress data keys metrics mixing models objectives pure_local "
    "theory trees wrap",
    ".data": "partition sources",
    ".runtime": "checkpoint",
}
"""Where each module lives."""


def __getattr__(name: str) -> Any:
    for package, modules in _MODULES.items():
        if name in modules.split():
            return import_module(f"fedblend{package}.{name}")
    for home, names in _HOMES.items():
        if name in names.split():
            value = getattr(import_module(f"fedblend.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'fedblend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

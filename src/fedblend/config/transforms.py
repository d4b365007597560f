# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The transforms that a configuration puts around its algorithm, by table.

``[attack]`` makes some clients lie, ``[privacy]`` clips and adds noise, ``[central]``
adds a loss of the server, ``[compress]`` encodes updates, ``[select]`` sends the rows
that a client uses. ``[privacy]`` is around ``[attack]``: a server clips what it gets.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np

from fedblend import models, transforms, trees
from fedblend.checks import below
from fedblend.config.compression import compressed, feedback_warnings, fitting
from fedblend.config.config import LOOKED_UP, Config
from fedblend.config.schema.table import arguments, check_lists
from fedblend.config.schema.tables import Central
from fedblend.core import Algorithm, Loss, Needs, PyTree
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError
from fedblend.models.dual_encoder import PAD
from fedblend.transforms._sparse_rows import Use, named, used_rows
from fedblend.transforms.central_loss import of_parameters, on_rows
from fedblend.transforms.fedselect import select_within

ALWAYS = {"dual_encoder": PAD + 1}
"""By model: rows from the first on that every client receives."""


def transformed(
    config: Config,
    algorithm: Algorithm,
    loss: Loss,
    params: PyTree,
    clients: int,
    cohort: int = 1,
) -> Algorithm:
    """The algorithm with clipping and noise, the server's loss and compression.

    Args:
        config: with the tables.
        algorithm: that of the configuration.
        loss: of the clients.
        params: shapes of the parameters.
        clients: how many there are.
        cohort: how many of them take part in a round, for ``[privacy]``.

    Raises:
        ConfigError: what the tables ask for does not go together.
    """
    options = config.algorithm
    for key in ("attack", "privacy", "central", "compress"):
        if getattr(config, key) is not None and not options.entry.sends:
            raise ConfigError(f"{key}: {options.name} sends nothing; leave it out")
        if getattr(config, key) is not None and options.entry.encodes:
            raise ConfigError(
                f"{key}: {options.name} compresses what it sends itself; leave it out"
            )
    lies = config.attack
    if lies is not None and lies.how != "flip_labels":
        who = lies.attackers(clients)
        algorithm = transforms.byzantine(
            algorithm, lies.how, attackers=who, factor=lies.factor
        )
    if config.privacy is not None:
        algorithm = _private(config, algorithm, cohort)
    if config.central is not None:
        if config.privacy is not None and config.central.upload:
            raise ConfigError("central.upload: would send gradients past [privacy]")
        algorithm = _mixed(config.central, algorithm, loss)
    dim = trees.size(_sent(config, params))
    answers = config.run.rounds * (config.run.cohort or clients) / clients
    if config.federation is not None and config.federation.secure:
        # Nobody sends a first answer whole: other clients may send theirs later.
        answers = 0.0
    return compressed(config.compress, algorithm, dim, clients, answers)


def _sent(config: Config, params: PyTree) -> PyTree:
    """The parameters that clients send, by shape."""
    keeps, leaves = config.algorithm.entry.keeps, named(params)
    mixed = getattr(config.algorithm, "mix", None)
    if isinstance(mixed, list):
        _require_parts("mix", mixed, leaves)
    if keeps is None:
        return params
    names = getattr(config.algorithm, keeps)
    _require_parts(keeps, names, leaves)
    return [
        leaf
        for path, leaf in leaves.items()
        if not any(below(name, path) for name in names)
    ]


def _require_parts(key: str, names: Sequence[str], leaves: Mapping[str, Any]) -> None:
    """Refuse a name that is no part of the model."""
    for name in names:
        if not any(below(name, path) for path in leaves):
            raise ConfigError(
                f'algorithm.{key}: "{name}" is no part of the model, whose '
                f"parameters are {', '.join(leaves)}"
            )


def _private(config: Config, algorithm: Algorithm, cohort: int) -> Algorithm:
    table, server = config.privacy, getattr(config.algorithm, "server", None)
    assert table is not None
    facts: dict[str, Any] = {"algorithm": algorithm, "cohort": cohort}
    transform = transforms.dp_fedavg if table.tree is None else transforms.dp_ftrl
    if table.buffers is not None:
        transform = transforms.dp_blt
        facts["strategy"] = table.strategy(config.run, server)
    if table.adaptive and table.quantile is None:
        facts["quantile"] = 0.5
    try:
        return transform(**arguments(transform, table, facts))
    except ValueError as error:
        raise ConfigError(f"privacy.{str(error).partition(': ')[2]}") from None


def _mixed(table: Central, algorithm: Algorithm, loss: Loss) -> Algorithm:
    merge = tuple(table.merge) if isinstance(table.merge, list) else table.merge
    settled: Any = {}
    if table.how != "one_way":
        settled = {"optimizer": table.rate, "merge": merge, "upload": table.upload}
    central = on_rows(loss, table.batch_size)
    if table.penalty is not None:
        strength = arguments(models.spreadout, table, {})
        central = of_parameters(partial(models.spreadout, **strength))
    with catch_warnings():
        simplefilter("ignore")  # ``warnings`` has the text
        made = transforms.mixed_fl(
            algorithm,
            central,
            how=table.how,
            weights=(1 - table.weight, table.weight),
            steps=table.steps,
            **settled,
        )
    if table.penalty is None:
        return made
    # The dense layer is not part of the penalty, and its gradient need not be sent.
    return transforms.partial_correction(made, ["embedding"])


def check_sizes(config: Config, clients: int, dim: int) -> None:
    """Refuse lists of ``[algorithm]`` that do not fit the clients, and its compressor.

    Args:
        config: what to run.
        clients: how many there are.
        dim: parameters of the model.
    """
    check_lists("algorithm", config.algorithm, clients)
    compressor = getattr(config.algorithm, "compressor", None)
    if compressor is not None:
        fitting("algorithm.compressor", compressor, dim)


def warnings(config: Config, clients: int, needs: Needs) -> list[str]:
    """What is odd about the tables, but no error; ``needs`` are the algorithm's."""
    found = feedback_warnings(config.compress, needs)
    hidden, table = config.privacy, config.central
    if hidden is not None and hidden.delta >= 1 / clients:
        found.append(
            f"privacy.delta: {hidden.delta:g} is not below 1/{clients}; it would allow "
            "to publish a whole client, and is to be much smaller"
        )
    if table is None or table.how != "parallel" or table.rate is None:
        return found
    found.append(
        f"central.rate: parallel training minimizes a mixture with weight "
        f"{table.weight:g} only if {table.rate:g} times {table.steps} steps is the "
        "clients' rate times their steps times the server's rate, all of them plain; "
        "without central.rate it follows them"
    )
    if hidden is not None:
        found.append(
            "central.how: [privacy] clips the clients' side alone, so that parallel "
            f"training minimizes another mixture than one with weight {table.weight:g};"
            ' "one_way" does not'
        )
    return found


def selected(
    config: Config, algorithm: Algorithm, federations: Sequence[FederatedData]
) -> Algorithm:
    """The algorithm, with messages that hold the rows that a client uses.

    Raises:
        ConfigError: it is none that can do without the other rows, or there are several
            splits.
    """
    rows, always = tables(config)
    if not rows:
        return algorithm
    if len(federations) > 1:
        raise ConfigError(
            "data.split_seed: is missing; [select] knows which rows are used in one "
            "split, so that several run.seed need the same: data.split_seed=0"
        )
    try:
        return transforms.fedselect(algorithm, federations[0], rows=rows, always=always)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def tables(config: Config) -> tuple[dict[str, tuple[str, ...]], int]:
    """Tables with the fields that name their rows; rows that everybody gets."""
    if config.select is None:
        return {}, 0
    fields = LOOKED_UP[config.model.name]
    rows = {name: fields[name] for name in config.select.parameters}
    return rows, ALWAYS[config.model.name]


def rooms(
    config: Config, federated_data: FederatedData, params: PyTree
) -> dict[str, int]:
    """A bound on how many rows of each table any client uses.

    It is a power of two, or all rows: how many they are exactly stays with the client.

    Args:
        config: names the tables.
        federated_data: the clients.
        params: shapes of the parameters.
    """
    chosen, always = tables(config)
    sizes = table_sizes(config, params)
    found = {}
    for name, fields in chosen.items():
        most = int(used_rows(federated_data, fields, always).counts.max())
        found[name] = min(1 << (most - 1).bit_length(), sizes[name])
    return found


def table_sizes(config: Config, params: PyTree) -> dict[str, int]:
    """How many rows each table has."""
    leaves = named(params)
    return {name: int(leaves[name].shape[0]) for name in tables(config)[0]}


def selected_within(
    config: Config, algorithm: Algorithm, params: PyTree, room: Mapping[str, int]
) -> Algorithm:
    """The algorithm for clients whose examples nobody else has; ``room`` as ``rooms``.

    Raises:
        ConfigError: it is none that can do without the other rows.
    """
    rows, always = tables(config)
    if not rows:
        return algorithm
    sizes = table_sizes(config, params)
    most = {name: Use(np.array([room[name]]), sizes[name] - 1) for name in rows}
    try:
        return select_within(algorithm, most, rows=rows, always=always)
    except ValueError as error:
        raise ConfigError(str(error)) from None

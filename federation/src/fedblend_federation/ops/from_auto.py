# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A trial of what ``fedblend auto`` found: its experiment, policy, and rows of nodes.

The experiment has the method, its settings and rounds, and the columns and categories
of the table. Nodes compute what the simulation did, so the policy allows what the
method sends, and switches off the noise for rows, which would change the models.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config import toml
from fedblend.config.config import Config, check, dump
from fedblend.config.tables.data import load_dataset, share_out
from fedblend.data.preprocess.preprocessing import BINS
from fedblend.data.readers.tables import read_table
from fedblend.data.readers.targets import labels_of
from fedblend.errors import RunError
from fedblend.registry import OWN_MODEL
from fedblend.runs.run_folder import (
    AUTO,
    Folder,
    csv_text,
    read_comparison,
    read_config,
    refuse_survival,
    seeds_of,
)
from fedblend_federation.ops.credentials import template
from fedblend_federation.policy.policy import Accept
from fedblend_federation.raw_tables import data_of_nodes

TRUST = 1e6
"""Limits on updates: a trial has the rows of the simulation, and honest nodes."""
UNPROTECTED = (
    "the policies of the trial add no noise to gradients of rows, so that models are "
    "those of the run; before real rows are used, give each node the policy of "
    "fedblend federation init without --from"
)
Columns = dict[str, list[Any]]
SIMULATED = ("sampling", "store", "rows", "devices", "chunk")
"""Keys of [run] that say how a simulation is computed."""
USUAL = Accept()
"""The bounds of a node's policy; the trial has none where a client's rows need it."""


class Trial(NamedTuple):
    """What ``provision`` writes in place of its templates."""

    method: str
    """In words."""
    experiment: bytes
    policy: bytes
    target: str
    """The column to predict."""
    rows: dict[str, bytes]
    """A table for each node, by its name."""
    warnings: list[str]
    """What the policies of the trial allow, and those of real nodes should not."""


def trial_of(folder: Path) -> Trial:
    """The trial of a finished comparison; where its verdict is to train alone, of the
    best federated method.

    Raises:
        RunError: there is no such method, or no kept run of it.
    """
    if not (folder / AUTO).is_file():
        raise RunError(f"--from: {folder} is not the folder of fedblend auto")
    state = read_comparison(folder)
    refuse_survival(folder, state)
    choice = (state["findings"] or {}).get("choice")
    if choice is None:
        raise RunError(f"--from: {folder} has no verdict, so there is nothing to try")
    method = choice["candidate"]
    config = read_config(Folder(folder / "runs" / method))
    dataset = load_dataset(config.data)
    parts = share_out(config.data, dataset)
    content = tomllib.loads(dump(config))
    given = tomllib.loads(data_of_nodes(dataset, len(parts.rows)))["data"]
    kept = {key: content["data"][key] for key in ("validation", "test", "seed")}
    run = {key: of for key, of in content["run"].items() if key not in SIMULATED}
    content |= {"name": "trial", "data": given | kept}
    content["run"] = run | {"seed": seeds_of(config)[0]}
    content["measure"].pop("splits", None)
    limits = dict.fromkeys(("norm_ratio", "clip_ratio", "weight_ratio"), TRUST)
    content["federation"] = limits
    experiment = check(content, "trial.toml")
    columns = [one["name"] for one in given["raw"]]
    tables = _rows(config, [*columns, str(config.data.target)])
    least = 1 + state["seen"]["inputs"]
    ranks = BINS if config.model.name == "tabular" else 1
    refused = {
        "fewest_rows": _small(tables, 1 - kept["test"], least),
        "min_batch_rows": _sparse(tables, 2 * ranks * USUAL.min_part_rows),
    }
    warnings = [UNPROTECTED]
    warnings += [
        f"accept.{key} = 0 in the policies of the trial, and a real node would refuse: "
        f"{', '.join(few[:5])}{' ...' if few[5:] else ''}"
        for key, few in refused.items()
        if few
    ]
    nodes = zip(node_names(list(tables)), tables.values(), strict=True)
    return Trial(
        str(state["methods"][method]["title"]),
        dump(experiment).encode(),
        _policy(config, [key for key, few in refused.items() if few]).encode(),
        str(config.data.target),
        {
            name: csv_text(of, zip(*of.values(), strict=True)).encode()
            for name, of in nodes
        },
        warnings,
    )


def node_names(clients: Sequence[str]) -> list[str]:
    """A name for each node, by that of its client; "node-3" where it gives none.

    >>> node_names(["St. Mary's", "9", "São"])
    ['st-mary-s', '9', 's-o']
    """
    found: list[str] = []
    for number, client in enumerate(clients):
        name = re.sub(r"[^a-z0-9]+", "-", client.lower())[:32].strip("-")
        taken = not name or name in (*found, "server", "ca", "nodes")
        found.append(f"node-{number}" if taken else name)
    return found


def _rows(config: Config, columns: Sequence[str]) -> dict[str, Columns]:
    """Each client's rows of the table, as cells; what is missing is an empty one."""
    data = config.data
    table = read_table(data.file)
    keys, present = labels_of(table.columns[str(data.client)])
    owner = np.where(present, [str(key) for key in keys], "")
    # In the order in which the simulation numbers them.
    clients = share_out(data, load_dataset(data)).names
    return {
        client: {
            name: ["" if of is None or of != of else of for of in values.tolist()]
            for name, values in table.columns.items()
            if name in columns
            for values in [values[owner == client]]
        }
        for client in clients
    }


def _small(tables: Mapping[str, Columns], part: float, coefficients: int) -> list[str]:
    """Clients with too few training rows for second derivatives."""
    least = max(USUAL.fewest_rows, coefficients)
    return [
        f"{client} has fewer than {least} training rows"
        for client, of in tables.items()
        if part * len(next(iter(of.values()))) < least
    ]


def _sparse(tables: Mapping[str, Columns], least: int) -> list[str]:
    """Columns whose means would tell single rows."""
    return [
        f"{name} has {count} values at {client}"
        for client, of in tables.items()
        for name, cells in of.items()
        if 0 < (count := sum(cell != "" for cell in cells)) < least
    ]


def _policy(config: Config, without: Sequence[str]) -> str:
    """The policy of ``init``, with what the method sends, and without these bounds."""
    disclosed = ["statistics"]
    if getattr(config.algorithm, "batch_size", "all") != "all":
        disclosed.append("batches")
    if OWN_MODEL in config.algorithm.entry.sends:
        disclosed += ["own_models", "constants"]
    text = template("policy.toml")
    name = toml.literal([config.algorithm.name])
    changes = {
        'algorithms = "updates"': f"algorithms = {name}",
        "discloses = []": f"discloses = {toml.literal(disclosed)}",
        "noise = 0.2 ": "noise = 0.0 ",
        'names = ["loss", "accuracy"]': 'names = "any"',
        **{f"{key} = {getattr(USUAL, key)}": f"{key} = 0" for key in without},
    }
    for before, after in changes.items():
        text = text.replace(before, after, 1)
    return text

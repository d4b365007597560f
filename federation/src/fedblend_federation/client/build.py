# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node computes with in an experiment, protected as its policy says.

Clients of one node share what is built once for all of them.

A frozen base is put on a node once, by its operator: ``bases`` of ``node.toml`` names a
file, or a folder with files. A configuration that arrives in a message says which base
it means by its sha256 alone; its path is the server's, and never opened here.
"""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from fedblend.config.tables.adapt import hash_file
from fedblend.config.tables.data import splits_of
from fedblend.config.toml import parse
from fedblend.data.dataset import DataError
from fedblend.data.federated import Shards, gather, hold_out_rows
from fedblend.data.readers.read import read_new_rows
from fedblend.errors import ConfigError
from fedblend.metrics.metric import Metric, mean_and_rows, row_mask
from fedblend.transforms.local_dp import local_dp, secret_noise
from fedblend_federation import raw_tables
from fedblend_federation.client import executor
from fedblend_federation.client import state as states
from fedblend_federation.client.executor import Alone, ClientSetup
from fedblend_federation.contract import SPLITS, Contract, parse_contract
from fedblend_federation.ops.settings import ClientSettings
from fedblend_federation.policy.policy import Policy, Protect, Refusal

if TYPE_CHECKING:
    from fedblend.config.tables.privacy import ProtectRows


def rows_of(settings: ClientSettings, contract: Contract) -> dict[str, Shards]:
    """The client's rows, a part of them held out as the configuration says.

    The columns of a raw table are encoded, see ``raw_tables``.

    Raises:
        DataError: the file cannot be read, or its rows are not of the task.
    """
    data, source = contract.nodes, settings.data
    read = read_new_rows(
        source.file,
        contract.task,
        target=source.target,
        client=source.client,
        inputs=source.inputs,
        preprocessing=contract.schema,
    )
    assert not isinstance(data.test, str)
    parts = hold_out_rows(
        np.arange(len(read.rows[0])),
        settings.client,
        validation=data.validation,
        test=data.test,
        seed=data.seed,
        split=splits_of(data, contract.config.run.seed)[0],
    )
    if not len(parts[0]):
        raise DataError(f"{source.file}: no row is left to train on")
    return {
        name: gather(read.rows, [part])
        for name, part in zip(SPLITS, parts, strict=True)
        if name in contract.splits
    }


def client_setup(
    client: int,
    contract: Contract,
    terms: Mapping[str, Any],
    splits: Mapping[str, Shards],
    rows: "ProtectRows | None" = None,
) -> ClientSetup:
    """The setup of a client with these rows, under the terms of the server.

    ``rows`` is how gradients hide single rows.

    Raises:
        ConfigError: the terms do not fit the configuration or the rows.
    """
    built, config = (
        contract.method(contract.facts(terms, splits), rows),
        contract.config,
    )
    capacities = contract.capacities(terms, splits)
    if client >= contract.clients:
        raise ConfigError(
            f"data.clients: {contract.clients}, and this node is client {client}"
        )
    alone, budget = None, contract.budget_alone(built)
    if built.local is not None and budget is not None:
        metric, rounds = budget.metric or "loss", config.run.rounds
        alone = Alone(built.local, metric, rounds, budget.rounds)
    return ClientSetup(
        client=client,
        clients=contract.clients,
        algorithm=built.algorithm,
        params=contract.params,
        root=contract.root,
        splits=splits,
        capacities=capacities,
        measures=built.measures,
        rounds=config.run.rounds,
        precision=config.run.precision,
        central=contract.central_shapes(),
        alone=alone,
        hidden=built.hidden,
    )


def bound_metric(metric: Metric, most: float) -> Metric:
    """A mean over rows with what each contributes between 0 and ``most``, or 1.

    Without it one row that a model gets absurdly wrong is all that a mean shows. A row
    that is not finite counts as wrong as can be, so that every row is in every mean.
    """
    with_rows = metric.with_rows
    if not metric.mean_of_rows or with_rows is None:
        return metric
    top = 1.0 if metric.bounded else most
    worst = 0.0 if metric.higher_is_better else top

    def measure(model, batch):
        _, rows = with_rows(model, batch)
        cut = jnp.where(jnp.isfinite(rows), jnp.clip(rows, 0, top), worst)
        return mean_and_rows(cut, row_mask(batch, rows))

    return dataclasses.replace(
        metric, fn=lambda model, batch: measure(model, batch)[0], with_rows=measure
    )


def prepare(
    settings: ClientSettings,
    policy: Policy,
    contract: Contract,
    terms: Mapping[str, Any],
    splits: Mapping[str, Shards],
) -> ClientSetup:
    """The setup of a client with these rows, protected as its policy says.

    Raises:
        ConfigError: the terms do not fit the configuration or the rows.
        Refusal: the policy clips, and the algorithm sends what clipping does not cover.
    """
    protect, bound = policy.protect, policy.metrics.bound
    rows = states.fingerprint(splits)
    if contract.schema is not None:
        fitted = raw_tables.preprocessing_in(contract.schema, terms)
        splits = {name: split.preprocess(fitted) for name, split in splits.items()}
    rows_hidden = protect.rows if protect.rows.noise else None
    setup = client_setup(settings.client, contract, terms, splits, rows_hidden)
    measures = {name: bound_metric(one, bound) for name, one in setup.measures.items()}
    setup = setup._replace(measures=measures, fingerprint=rows)
    if "batches" not in policy.accept.discloses:
        # Nobody else draws these batches, so that no other client's rows matter. Powers
        # of two are few shapes, and few programs, for the many clients of a node.
        own = {
            name: min(room, 1 << max(splits[name].total - 1, 0).bit_length())
            for name, room in setup.capacities.items()
        }
        secret = states.read_secret(settings.folder)
        setup = setup._replace(secret=secret, capacities=own)
    return protect_setup(setup, protect)


def protect_setup(setup: ClientSetup, protect: Protect) -> ClientSetup:
    """The setup with the clip and the noise of a policy.

    Raises:
        Refusal: the algorithm sends what clipping does not cover.
    """
    if protect.rows.noise:
        setup = setup._replace(protection=f"rows {protect.rows} ")
    if protect.clip is None:
        return setup
    clipped = local_dp(
        setup.algorithm,
        protect.clip,
        lambda reason: Refusal(f"policy protect.clip: {reason}"),
    )
    setup = setup._replace(
        algorithm=clipped, protection=f"{setup.protection}clip {protect.clip}"
    )
    if not protect.noise:
        return setup
    return setup._replace(
        perturb=partial(secret_noise, std=protect.noise * protect.clip),
        squared=(2 / protect.noise) ** 2,
        protection="noise",
    )


EXPERIMENTS = 4
"""Experiments whose rows and compiled functions stay in memory."""


class SharedBuilds:
    """What the clients of one node have in common: contracts, and compiled functions.

    Functions are compiled for an algorithm. Clients whose algorithms were built from
    the same terms and policy use that of the first.

    Args:
        bases: of ``node.toml``.
    """

    def __init__(self, bases: Path | None) -> None:
        self.bases = bases
        self.parse = lru_cache(EXPERIMENTS)(self._parse)
        self._first: dict[tuple[str, str], ClientSetup] = {}

    def _parse(self, text: str) -> Contract:
        """The contract of a configuration, with the base of this node."""
        refused = base_refusal(text)
        if refused is not None:
            raise ConfigError(refused)
        return locate_base(parse_contract(text), self.bases)

    def common(
        self, terms: str, agreed: str, setup: ClientSetup, alike: bool
    ) -> ClientSetup:
        """A setup with the functions of the first one under these terms, if ``alike``.

        One experiment too many ends the oldest one's programs, and JAX can only drop
        all of them.
        """
        first = self._first.setdefault((terms, agreed), setup)
        while len(self._first) > EXPERIMENTS:
            del self._first[next(iter(self._first))]
            executor.forget()
        if not alike:
            return setup
        names = ("algorithm", "measures", "alone", "perturb", "hidden")
        return setup._replace(**{name: getattr(first, name) for name in names})


SUFFIX = ".safetensors"


def base_refusal(text: str) -> str | None:
    """Why the base of a configuration in a message is refused unread, or None.

    This comes before any check of the configuration, which would look for the file.
    """
    table = parse(text, "message").get("adapt")
    if not isinstance(table, dict) or "base" not in table or table.get("sha256"):
        return None
    return "adapt.sha256: is missing; this node finds a base by it"


def locate_base(contract: Contract, bases: Path | None) -> Contract:
    """The contract with the base of this node in place of the server's.

    Args:
        contract: from a message.
        bases: of ``node.toml``.

    Raises:
        ConfigError: there is no such base here.
    """
    table = contract.config.adapt
    if table is None or table.base is None:
        return contract
    if bases is None:
        raise ConfigError("adapt.base: this node has no bases; node.toml names none")
    for file in files_in(bases):
        if sha256_of(file) == table.sha256:
            own = table.model_copy(update={"base": str(file)})
            config = contract.config.model_copy(update={"adapt": own})
            return dataclasses.replace(contract, config=config)
    raise ConfigError(
        f"adapt.base: this node has no base with the sha256 {table.sha256}; its "
        "operator may put it in bases of node.toml"
    )


def files_in(bases: Path) -> list[Path]:
    """The files of bases: one, or those of a folder; none where nothing is there."""
    if bases.is_dir():
        return sorted(file for file in bases.glob(f"*{SUFFIX}") if file.is_file())
    return [bases] if bases.is_file() else []


def sha256_of(file: Path) -> str:
    """The sha256 of a file; one that did not change is read once."""
    found = file.stat()
    return _hash(file, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _hash(file: Path, inode: int, modified: int, size: int) -> str:
    del inode, modified, size
    return hash_file(file)

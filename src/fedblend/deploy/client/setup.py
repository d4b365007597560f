# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node, from its settings: its rows, policy and audit, and its half of the method."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.config.config import Config
from fedblend.config.data import splits_of
from fedblend.config.transforms import table_sizes
from fedblend.core import Shard
from fedblend.data.dataset import DataError
from fedblend.data.federated import Shards, gather, held_out
from fedblend.data.readers.read import read_new_rows
from fedblend.deploy.client.executor import Alone, Executor, Own
from fedblend.deploy.client.node import Node, Refusal, Rules
from fedblend.deploy.client.policy import Policy, Protect, load_policy
from fedblend.deploy.contract import (
    Facts,
    asks_constants,
    budget_alone,
    config_in,
    in_theory,
    method_of,
    nodes_of,
    own_constants,
    own_rooms,
    params_of,
    root_of,
    row_of,
    task_of,
)
from fedblend.deploy.messages import fingerprint
from fedblend.deploy.ops.audit import Audit, plain
from fedblend.deploy.ops.settings import Node as Settings
from fedblend.deploy.ops.settings import load_as
from fedblend.errors import ConfigError
from fedblend.simulation.precision import precision
from fedblend.transforms.local_dp import local_dp, secret_noise

UNFIT = "data: the rows are not as the configuration says; this node's audit says more"
PARTS = 4
"""Experiments whose rows and compiled functions stay in memory."""


def node_at(path: Path) -> Node:
    """The node whose node.toml this is."""
    return node_of(load_as(Settings, path))


def node_of(settings: Settings) -> Node:
    """The node that these settings describe; nothing is read yet but its folder."""
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    audit = Audit(settings.folder / "audit.jsonl")

    def policy() -> Policy:
        return _said(lambda: load_policy(settings.policy))

    def note(event: str, **fields: Any) -> str:
        return audit.append(event, **plain(fields))

    def agreed(words: Mapping[str, Any]) -> Config:
        config = _said(lambda: config_in(words))
        refusal = policy().refusal(config)
        if refusal:
            raise Refusal(refusal)
        return config

    def meet(words: Mapping[str, Any]) -> dict[str, Any]:
        config = agreed(words)
        with precision(config.run.precision):
            return _said(lambda: told_of(config))

    def enough_rows(config: Config) -> dict[str, Shards]:
        splits = own_rows(settings, config)
        refusal = policy().too_few(splits["train"].total)
        if refusal:
            raise Refusal(refusal)
        return splits

    def told_of(config: Config) -> dict[str, Any]:
        splits = enough_rows(config)
        told: dict[str, Any] = {
            "counts": {name: split.total for name, split in splits.items()},
            "row": fingerprint(row_of(task_of(config))),
            "rooms": own_rooms(config, splits),
        }
        own = own_constants(config, splits) if asks_constants(config) else None
        if own is not None and policy().constants:
            told["constants"] = [float(own.smooth[0]), float(own.convex[0]), own.exact]
        return told

    @lru_cache(maxsize=PARTS)
    def part_of(text: str, clip: float | None, noise: float) -> Executor:
        terms, protect = json.loads(text), Protect(clip=clip, noise=noise)
        with precision(config_in(terms).run.precision):
            return made(terms, protect)

    def made(terms: dict[str, Any], protect: Protect) -> Executor:
        config = config_in(terms)
        splits = _said(lambda: enough_rows(config))
        own = _said(lambda: _own(settings, config, splits, terms))
        if protect.clip is not None:
            guard = local_dp(own.algorithm, protect.clip, _unprotected)
            own = own._replace(algorithm=guard, manner=f"clip {protect.clip}")
            if protect.noise:
                add_noise = partial(secret_noise, std=protect.noise * protect.clip)
                own = own._replace(leave=add_noise, manner="noise")
        return Executor(own)

    def join(terms: Mapping[str, Any]) -> Executor:
        agreed(terms)
        if terms.get("constants") and not policy().constants:
            raise Refusal(
                "policy accept.constants: this experiment began with constants of this "
                "node's loss; allowed: none"
            )
        text, protect = json.dumps(dict(terms), sort_keys=True), policy().protect
        return part_of(text, protect.clip, protect.noise)

    return Node(
        settings.folder,
        settings.client,
        Rules(
            join=join,
            meet=meet,
            reveal=lambda seen, counts: policy().metrics(seen, counts),
            note=note,
            longest=lambda: policy().accept.max_message_bytes,
        ),
    )


def _said(make: Callable[[], Any]) -> Any:
    """What a function makes; what is wrong with files and configurations is refused.

    What is wrong with rows may quote them, and who writes the configuration chooses
    which: columns, classes. It is for the owner alone.
    """
    try:
        return make()
    except DataError as error:
        raise Refusal(UNFIT, str(error)) from None
    except ConfigError as error:
        raise Refusal(_nameless(str(error))) from None


def _unprotected(reason: str) -> Refusal:
    """The refusal of an algorithm that the policy's clipping does not cover."""
    return Refusal(f"policy protect.clip: {reason}")


def _nameless(text: str) -> str:
    """A line without the folders of this machine, which are nobody else's business."""
    return re.sub(r"(?<!\S)(?:/[^/\s:]+)+/", "", text)


def own_rows(settings: Settings, config: Config) -> dict[str, Shards]:
    """The node's rows, a part of them held out as the configuration asks."""
    data, rows = nodes_of(config), settings.data
    further = read_new_rows(
        rows.file,
        task_of(config),
        target=rows.target,
        client=rows.client,
        inputs=rows.inputs,
    )
    assert not isinstance(data.test, str)
    parts = held_out(
        np.arange(len(further.rows[0])),
        settings.client,
        validation=data.validation,
        test=data.test,
        seed=data.seed,
        split=splits_of(data, config.run.seed)[0],
    )
    if not len(parts[0]):
        raise DataError(f"{rows.file}: no row is left to train on")
    wanted = {
        "train": True,
        "validation": bool(data.validation),
        "test": bool(data.test),
    }
    return {
        name: gather(further.rows, [part])
        for (name, needed), part in zip(wanted.items(), parts, strict=True)
        if needed
    }


def _own(
    settings: Settings,
    config: Config,
    splits: dict[str, Shards],
    terms: Mapping[str, Any],
) -> Own:
    clients = nodes_of(config).clients
    built = method_of(config, clients, _facts(config, splits, terms))
    capacities = terms.get("capacities")
    if not isinstance(capacities, dict) or set(capacities) != set(splits):
        raise ConfigError("message: has no capacities")
    for name, split in splits.items():
        room = capacities[name]
        if not isinstance(room, int) or not split.total <= room <= 2**31 - 1:
            raise ConfigError(f"message: capacities.{name}: {room!r} is too small")
    if settings.client >= clients:
        raise ConfigError(
            f"data.clients: {clients}, and this node is client {settings.client}"
        )
    alone, budget = None, budget_alone(config, built)
    if built.local is not None and budget is not None:
        metric, rounds = budget.metric or "loss", config.run.rounds
        alone = Alone(built.local, metric, rounds, budget.rounds)
    return Own(
        client=settings.client,
        clients=clients,
        algorithm=built.algorithm,
        params=jax.eval_shape(built.model.init, jax.random.key(0)),
        root=root_of(config),
        splits=splits,
        capacities=capacities,
        measures=built.measures,
        rounds=config.run.rounds,
        precision=config.run.precision,
        central=_elsewhere(config),
        alone=alone,
    )


def _facts(
    config: Config, splits: Mapping[str, Shards], terms: Mapping[str, Any]
) -> Facts:
    """What a message says of all nodes' rows, and this node knows of its own."""
    rooms, rates, known = terms.get("rooms", {}), None, None
    needed, sizes = own_rooms(config, splits), table_sizes(config, params_of(config))
    if not isinstance(rooms, dict) or set(rooms) != set(needed):
        raise ConfigError("message: has no rooms")
    for name, least in needed.items():
        room = rooms[name]
        if not isinstance(room, int) or not least <= room <= sizes[name]:
            raise ConfigError(f"message: rooms.{name}: {room!r} does not fit")
    if in_theory(config):
        rates = _rates(terms.get("rates"))
    own = own_constants(config, splits) if asks_constants(config) else None
    if terms.get("constants") and own is not None:
        everywhere = np.ones(nodes_of(config).clients)
        known = own._replace(
            smooth=own.smooth * everywhere, convex=own.convex * everywhere
        )
    return Facts(rooms, known, rates)


def _rates(said: Any) -> tuple[float, float]:
    match said:
        case [float(together), float(alone)] if 0 < together < inf and 0 < alone < inf:
            return together, alone
    raise ConfigError("message: has no rates")


def _elsewhere(config: Config) -> Shard | None:
    """Shapes and dtypes of the server's rows, where it has some."""
    if config.central is None or config.central.file is None:
        return None
    # The server knows how many it has; here they need only be enough for a batch.
    count = config.central.batch_size or 1
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype),
        row_of(task_of(config)),
    )
    number: Any = jax.ShapeDtypeStruct((), np.dtype(np.int32))
    return Shard(rows, number, number, number, count)

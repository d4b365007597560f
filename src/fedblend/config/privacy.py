# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The privacy of a run: epsilon by the table ``[privacy]``, and what rules it out."""

from typing import Any

from fedblend.config.config import Config
from fedblend.config.schema.tables import Privacy
from fedblend.errors import ConfigError
from fedblend.theory.privacy import Guarantee, spent, spent_by_tree


def report(config: Config, clients: int) -> dict[str, Any]:
    """The privacy of a run for its summary; empty without ``[privacy]``."""
    table, seeds = config.privacy, config.run.seed
    if table is None:
        return {}
    found = _guarantee(config, clients, 1)
    sentence = str(found)
    if isinstance(seeds, list) and found.epsilon is not None:
        together = _guarantee(config, clients, len(seeds))
        sentence += (
            f" for each seed, {together.epsilon:.4g} for all {len(seeds)} together"
        )
    facts = {"epsilon": found.epsilon, "delta": found.delta}
    neighbors = {"adjacency": found.adjacency}
    return {"privacy": {"sentence": sentence, **facts, **neighbors}}


def _guarantee(config: Config, clients: int, seeds: int) -> Guarantee:
    table, run = config.privacy, config.run
    assert table is not None
    reason = _obstacle(config)
    if reason and table.noise:
        return Guarantee(None, table.delta, table.adjacency, reason)
    noise: Any = {key: getattr(table, key) for key in ("noise", "delta", "adjacency")}
    try:
        if table.tree is None and run.epoch is None:
            cohort = run.cohort or clients
            rounds = run.rounds * seeds
            return spent(**noise, cohort=cohort, clients=clients, rounds=rounds)
        tree, epoch = table.tree or 1, run.epoch
        return spent_by_tree(
            **noise, tree=tree, epoch=epoch, rounds=run.rounds, runs=seeds
        )
    except ImportError as error:
        raise ConfigError(str(error)) from None


def _obstacle(config: Config) -> str:
    """Why the accounting does not apply, if it does not."""
    if config.compress is not None:
        return (
            "[compress] changes answers after they are clipped, and may make them "
            "longer than the clip"
        )
    if getattr(config.algorithm, "rate", None) == "theory":
        return 'algorithm.rate = "theory" is computed from the clients\' rows'
    return ""


def refuse(table: Privacy | None, what: str) -> None:
    """Refuse ``[privacy]`` where something takes no account of it."""
    if table is not None:
        raise ConfigError(f"privacy: {what}; leave the table out")

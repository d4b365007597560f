# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node computes with in an experiment, with what its policy adds to it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedblend.data.federated import Shards
from fedblend.transforms.local_dp import local_dp, secret_noise
from fedblend_federation.client import state as states
from fedblend_federation.client.executor import ClientSetup, bounded, client_setup
from fedblend_federation.client.permissions import Refusal
from fedblend_federation.client.policy import Policy, Protect
from fedblend_federation.contract import Contract
from fedblend_federation.ops.settings import ClientSettings


def prepared(
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
    splits = contract.transformed(terms, splits)
    rows_hidden = protect.rows if protect.rows.noise else None
    setup = client_setup(settings.client, contract, terms, splits, rows_hidden)
    measures = {name: bounded(one, bound) for name, one in setup.measures.items()}
    setup = setup._replace(measures=measures, fingerprint=rows)
    if policy.rows.batches == "secret":
        # Nobody else draws these batches, so that no other client's rows matter. Powers
        # of two are few shapes, and few programs, for the many clients of a node.
        own = {
            name: min(room, 1 << max(splits[name].total - 1, 0).bit_length())
            for name, room in setup.capacities.items()
        }
        secret = states.read_secret(settings.folder)
        setup = setup._replace(secret=secret, capacities=own)
    return protected(setup, protect)


def protected(setup: ClientSetup, protect: Protect) -> ClientSetup:
    """The setup with the clip and the noise of a policy.

    Raises:
        Refusal: the algorithm sends what clipping does not cover.
    """
    if protect.rows.noise:
        setup = setup._replace(protection=f"rows {protect.rows} ")
    if protect.clip is None:
        return setup
    clipped = local_dp(setup.algorithm, protect.clip, _unprotected)
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


def _unprotected(reason: str) -> Refusal:
    """The refusal of an algorithm that the policy's clipping does not cover."""
    return Refusal(f"policy protect.clip: {reason}")

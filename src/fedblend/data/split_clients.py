# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that train and clients held out, to measure models of new clients."""

import numpy as np

from fedblend.checks import CHANCE, WHOLE, gate
from fedblend.data.dataset import DataError, generator
from fedblend.data.federated import FEDERATED_DATA, FederatedData


@gate(federated_data=FEDERATED_DATA, fraction=CHANCE, seed=WHOLE)
def split_clients(
    federated_data: FederatedData, fraction: float, seed: int = 0
) -> tuple[FederatedData, FederatedData]:
    """The clients that train, and those held out, whom no training sees.

    Args:
        federated_data: all clients.
        fraction: of clients held out, at least one client; in (0, 1).
        seed: of the choice, which depends on nothing else.
    """
    clients = federated_data.clients
    number = max(round(fraction * clients), 1)
    if number >= clients:
        raise DataError(
            f"unseen: {fraction:g} of {clients} clients leaves none to train"
        )
    held_out = np.sort(generator(seed, "unseen").permutation(clients)[:number])
    training = np.setdiff1d(np.arange(clients), held_out)
    return (
        federated_data.select(training.tolist()),
        federated_data.select(held_out.tolist()),
    )

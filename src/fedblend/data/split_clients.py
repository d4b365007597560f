# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Setting clients apart, to ask later what a federation is worth to newcomers."""

import numpy as np

from fedblend.checks import CHANCE, WHOLE, gate
from fedblend.data.dataset import DataError, generator
from fedblend.data.federated import FEDERATED_DATA, FederatedData


@gate(federated_data=FEDERATED_DATA, fraction=CHANCE, seed=WHOLE)
def set_apart(
    federated_data: FederatedData, fraction: float, seed: int = 0
) -> tuple[FederatedData, FederatedData]:
    """The clients that train, and those that nobody has seen.

    Args:
        federated_data: all clients.
        fraction: of clients that are set apart, one at least; in (0, 1).
        seed: of the choice, which depends on nothing else.
    """
    clients = federated_data.clients
    number = max(round(fraction * clients), 1)
    if number >= clients:
        raise DataError(
            f"unseen: {fraction:g} of {clients} clients leaves none to train"
        )
    chosen = generator(seed, "unseen").permutation(clients)[:number]
    unseen = np.sort(chosen).tolist()
    seen = [client for client in range(clients) if client not in set(unseen)]
    return federated_data.select(seen), federated_data.select(unseen)

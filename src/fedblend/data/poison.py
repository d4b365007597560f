# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Poisoned rows: attackers that follow the protocol, on labels that they changed.

Reference: Biggio, Nelson, Laskov, "Support vector machines under adversarial label
noise", ACML 2011; Fang, Cao, Jia, Gong, "Local model poisoning attacks to
Byzantine-robust federated learning", USENIX Security 2020, arXiv:1911.11815, whose
labels become C - 1 - y.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from fedblend.checks import MASK, gate
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.errors import UserError


@gate(federated_data=FEDERATED_DATA, attackers=MASK)
def flip_labels(
    federated_data: FederatedData, *, attackers: np.ndarray | jax.Array | Sequence[bool]
) -> FederatedData:
    """The same data, with the labels of the attackers' training rows in reverse order.

    The smallest class of all training rows becomes the largest, the next one the next:
    of classes 0 to C - 1, y becomes C - 1 - y. Rows for validation and test stay.

    Args:
        federated_data: the clients; examples are (inputs, labels).
        attackers: whose labels are flipped: an array over clients of True and False.

    >>> import fedblend as fb
    >>> data = fb.federate((np.zeros((4, 1)), np.array([0, 1, 2, 2])), [[0, 1], [2, 3]])
    >>> sorted(flip_labels(data, attackers=[True, False]).train.rows(0)[1].tolist())
    [1, 2]
    """
    train, attack = federated_data.train, np.asarray(attackers)
    inputs, labels, *others = train.examples
    classes = np.unique(labels)
    whole = np.issubdtype(labels.dtype, np.integer)
    if labels.ndim != 1 or not (whole or len(classes) == 2):
        allowed = "labels of classes, one for each row"
        said = f"{labels.dtype} of shape {labels.shape}"
        raise UserError("flip_labels: federated_data", labels, allowed, said)
    if len(attack) != federated_data.clients:
        allowed = f"one for each of the {federated_data.clients} clients"
        raise UserError("flip_labels: attackers", attack, allowed)
    flipped = np.array(labels)
    for start, count in zip(train.starts[attack], train.counts[attack], strict=True):
        own = slice(start, start + count)
        flipped[own] = classes[0] + classes[-1] - labels[own]
    examples = (inputs, flipped, *others)
    return dataclasses.replace(
        federated_data, train=dataclasses.replace(train, examples=examples)
    )

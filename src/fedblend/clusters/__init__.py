# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local models from clusters of clients, for clients with too few rows of their own.

The authors of FLIX name the limit and propose this: group clients that are alike, and
let each group find one model, which then stands for x_i of all its members::

    signature   s_i <- a few numbers that client i computes on its own rows
    groups      k-means of all s_i, at the server
    models      every group trains one model, by any method, among its members only
    result      x_i <- the model of the group of client i, for ``pure_local.given``

What leaves a client: its signature, once, seen by the server on its own and not in a
mean, so that secure aggregation does not hide it; then the messages of an ordinary
federated run within its group. The signature is one of

``gradient_signatures``
    ``size`` numbers: the direction of the full local gradient at the initial model, on
    as many random axes that all draw from the same key. With ``size`` at the number of
    parameters it tells all of it, from which single rows may be guessed.
``label_signatures``
    as many numbers as there are classes: the share of each. It tells just that.

No noise is added: neither is private in any formal sense.

x_i of a group minimizes the group's loss and not f_i: promises that need minimizers,
such as those of ``theory.one_shot`` and ``theory.bounds``, do not hold for it.
"""

from fedblend.clusters.cluster_models import Clustered, train
from fedblend.clusters.kmeans import Groups, kmeans
from fedblend.clusters.signatures import (
    Signatures,
    gradient_signatures,
    label_signatures,
)

__all__ = [
    "Clustered",
    "Groups",
    "Signatures",
    "gradient_signatures",
    "kmeans",
    "label_signatures",
    "train",
]

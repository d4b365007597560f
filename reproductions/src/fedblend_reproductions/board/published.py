# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The published numbers that the board puts beside ours, in percent."""

from typing import NamedTuple


class Published(NamedTuple):
    """The numbers of a published table, by task and the authors' name of a method."""

    source: str
    numbers: dict[str, dict[str, float]]


_FASHION = {
    "FedAvg": (80.41, 85.85),
    "FedProx": (78.08, 85.63),
    "FedGen": (79.76, 84.90),
    "Per-FedAvg": (99.18, 95.10),
    "pFedMe": (99.35, 97.25),
    "Ditto": (99.44, 97.47),
    "APFL": (99.41, 97.25),
    "FedFomo": (99.46, 97.21),
    "FedAMP": (99.42, 97.20),
    "APPLE": (99.30, 97.06),
    "FedALA": (99.57, 97.66),
    "FedPer": (99.47, 97.44),
    "FedRep": (99.56, 97.56),
    "FedRoD": (99.52, 97.52),
    "FedBABU": (99.41, 97.46),
    "FedCP": (99.66, 97.89),
    "GPFL": (99.85, 97.81),
    "FedDBE": (99.74, 97.69),
    "FedDistill": (99.51, 97.43),
    "FedProto": (99.49, 97.40),
}

PFLLIB = Published(
    "Zhang et al., PFLlib: personalized federated learning algorithm library, "
    "arXiv:2312.04992, table of test accuracies on Fashion-MNIST",
    {
        "fashion_classes": {name: pair[0] for name, pair in _FASHION.items()},
        "fashion_dirichlet": {name: pair[1] for name, pair in _FASHION.items()},
    },
)

FEDEM = Published(
    "Marfoq et al., Federated multi-task learning under a mixture of distributions, "
    "NeurIPS 2021, arXiv:2108.10252, synthetic data (numbers quoted from memory)",
    {
        "fedem_synthetic": {
            "Local": 65.7,
            "FedAvg": 68.2,
            "FedAvg+": 68.9,
            "Clustered FL": 69.1,
            "pFedMe": 69.2,
            "FedEM": 74.7,
        }
    },
)

ON_TASK = {task: table for table in (PFLLIB, FEDEM) for task in table.numbers}
"""The published table of each task."""

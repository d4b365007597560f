# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How models and methods look in figures: colors, dashes, markers and names.

Colors are Okabe and Ito's, which readers with any color vision can tell apart.
"""

from typing import Any

from fedblend.report import measures

COLORS = {"shared": "#0072B2", "local": "#E69F00", "personal": "#009E73"}
HARM, UNSURE = "#D55E00", "#B0B0B0"
LOOKS: Any = {
    "shared": {"color": COLORS["shared"], "ls": "-", "marker": "o"},
    "local": {"color": COLORS["local"], "ls": (0, (5, 2))},
    "personal": {"color": COLORS["personal"], "ls": (0, (4, 1, 1, 1)), "marker": "^"},
}
"""Models differ in dashes and markers too, for readers and printers without colors."""
MARKERS, DASHES = "osD^vX", ("-", (0, (5, 2)), (0, (4, 1, 1, 1)), (0, (1, 1)))
"""Those of the values of a sweep."""
LABELS = {
    "shared": "the shared model",
    "local": "training alone",
    "personal": "the personal model",
}

Alone = dict[str, Any] | None
"""``Run.alone``: how long the clients trained alone that a run is compared with."""


def label(model: str, alone: Alone) -> str:
    """The name of a model; of training alone with its rounds."""
    rounds = measures.rounds_alone(alone) if model == "local" else ""
    return LABELS[model] + (f" ({rounds})" if rounds else "")

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What every process of Flower finds in its environment.

Unless told otherwise Flower sends telemetry, asks for updates and installs packages
from the network; even its ``--help`` does.
"""

from pathlib import Path

SILENCE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables that keep Flower from calling home."""


def environment(folder: Path) -> dict[str, str]:
    """The variables for a process of Flower whose state lies in that folder."""
    return {**SILENCE, "FLWR_HOME": str(folder / "flwr")}

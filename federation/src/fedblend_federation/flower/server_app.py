# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Flower's ServerApp, which runs the coordinator."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedblend_federation.flower.grid import GridTransport

INTERVAL = 0.5
"""Seconds between two looks whether the process that started this one is there."""


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended.

    Without its link a server cannot go on, and would hold its folder for as long as
    Flower tries to reach the link. Its checkpoint is whole at any moment.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def server_app(run: Callable[[Path, GridTransport], None]) -> ServerApp:
    """The app of a server; the run's configuration names the experiment's folder.

    Args:
        run: runs the experiment of a folder to its end.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with_parent()
        run(Path(str(context.run_config["folder"])), GridTransport(grid))

    return app

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m fedblend_reproductions``: the command where nothing is installed."""

import typer

from fedblend_reproductions.command import reproduce

if __name__ == "__main__":
    typer.run(reproduce)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m fedblend_reproductions``: ``fedblend reproduce``, installed or not."""

import sys

from fedblend.cli import app, entry
from fedblend_reproductions.command import reproduce

if __name__ == "__main__":
    app.command("reproduce")(reproduce)
    sys.argv.insert(1, "reproduce")
    entry()

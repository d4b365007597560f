# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the command line needs: this module is imported first, and needs nothing."""

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich", "pydantic")
"""Packages of the extra [cli] that every command uses."""

for _package in NEEDED:
    if find_spec(_package) is None:
        sys.stderr.write(
            f"error: the command line needs {_package}: pip install 'fedblend[cli]'\n"
        )
        raise SystemExit(2)

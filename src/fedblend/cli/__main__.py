# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m fedblend.cli``."""

import sys

from fedblend.cli import main

sys.exit(main())

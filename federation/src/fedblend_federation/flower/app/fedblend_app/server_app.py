# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a server."""

from fedblend_federation.flower.grid import server_app
from fedblend_federation.server.run import run_in_flower

app = server_app(run_in_flower)

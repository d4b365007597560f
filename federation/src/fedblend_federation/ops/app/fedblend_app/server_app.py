# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a server."""

from fedblend_federation.server.run import run_in_flower
from fedblend_federation.server_app import server_app

app = server_app(run_in_flower)

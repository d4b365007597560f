# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a server."""

from fedblend.deploy.server.run import run_in_flower
from fedblend.deploy.server_app import server_app

app = server_app(run_in_flower)

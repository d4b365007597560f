# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a server."""

from fedblend.experiment.federation.leading import lead_noted
from fedblend.runtime.flower.apps import server_app

app = server_app(lead_noted)

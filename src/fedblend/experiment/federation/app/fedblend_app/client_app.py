# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a node; JAX is imported only if no warm process answers."""

from collections.abc import Callable
from pathlib import Path

from fedblend.runtime.flower.apps import client_app


def _in_process(settings: Path) -> Callable[[bytes], bytes]:
    from fedblend.experiment.federation.taking_part import node_at

    return node_at(settings).answer


app = client_app(_in_process)

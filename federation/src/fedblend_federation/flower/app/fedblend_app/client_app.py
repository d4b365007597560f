# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a node; JAX is imported only if there is no worker."""

from collections.abc import Callable
from pathlib import Path

from fedblend_federation.flower.records import client_app


def _load_reply(settings: Path) -> Callable[[bytes], bytes]:
    from fedblend_federation.client.node import answering_at

    return answering_at(settings).reply


app = client_app(_load_reply)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The app of a node with Flower's SuperNode: it hands messages to the worker.

It imports no JAX.
"""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedblend_federation import worker
from fedblend_federation.flower.records import make_record, read_record

app = ClientApp()


@app.query()
def forward(request: Message, context: Context) -> Message:
    """The worker's reply to a message."""
    socket = Path(str(context.node_config["socket"]))
    reply = worker.request(socket, read_record(request.content))
    return Message(make_record(reply), reply_to=request)

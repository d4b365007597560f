# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The same work in Flower's simulation: clients in PyTorch, a Ray worker for each core.

The server asks all clients and averages what they answer, as Flower's ``FedAvg`` does;
nothing is measured. A worker keeps the rows of all clients after its first message.
"""

import functools

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

import torch_loop
import work

client = ClientApp()
server = ServerApp()


@functools.cache
def shards() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of every client; a worker draws them once."""
    torch.set_num_threads(1)  # workers fill the cores
    inputs, labels = (torch.from_numpy(part) for part in work.rows())
    parts = (part.split(work.EXAMPLES) for part in (inputs, labels.long()))
    return list(zip(*parts, strict=True))


@client.train()
def train(message: Message, context: Context) -> Message:
    """The local steps of one client."""
    state = message.content.array_records["arrays"].to_torch_state_dict()
    model = "mlp" if len(state) > 2 else "softmax"
    local = torch_loop.network(model)
    local.load_state_dict(state)
    torch_loop.train(local, *shards()[int(context.node_config["partition-id"])])
    reached = RecordDict({"arrays": ArrayRecord(local.state_dict())})
    return Message(content=reached, reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Rounds, as many as are asked for."""
    del context
    work.main(functools.partial(prepare, grid))


def prepare(grid: Grid, model: str, block: int):
    shared = torch_loop.network(model).state_dict()

    def one_round():
        content = RecordDict({"arrays": ArrayRecord(shared)})
        asked = [
            Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in grid.get_node_ids()
        ]
        answers = list(grid.send_and_receive(asked))
        if len(answers) < work.CLIENTS:
            raise RuntimeError(f"{len(answers)} of {work.CLIENTS} clients answered")
        records = [answer.content.array_records["arrays"] for answer in answers]
        reached = [record.to_torch_state_dict() for record in records]
        for name, value in shared.items():
            value.copy_(torch.stack([one[name] for one in reached]).mean(dim=0))

    def advance():
        for _ in range(block):
            one_round()
        values = [value.numpy() for value in shared.values()]
        return list(zip(values[::2], values[1::2], strict=True))

    return advance


if __name__ == "__main__":
    import flower_simulation  # by its name, as workers import it

    run_simulation(
        server_app=flower_simulation.server,
        client_app=flower_simulation.client,
        num_supernodes=work.CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )

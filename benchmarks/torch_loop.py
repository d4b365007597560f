# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The same work as a loop over clients in PyTorch, as most research code writes it."""

import torch
from torch import nn
from torch.nn import functional

import work


def network(model: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in work.first_params(model):
        layer = nn.Linear(*reversed(weight.shape))
        layer.load_state_dict(
            {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}
        )
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(local: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """The local steps of one client, on its rows."""
    optimizer = torch.optim.SGD(local.parameters(), lr=work.RATE)
    index = torch.randint(len(labels), (work.STEPS, work.BATCH), device=inputs.device)
    for picked in index:
        optimizer.zero_grad()
        scores = local(inputs[picked])
        functional.cross_entropy(scores, labels[picked]).backward()
        optimizer.step()


def prepare(model, block):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    inputs, labels = (torch.from_numpy(part).to(device) for part in work.rows())
    shards = list(
        zip(
            inputs.split(work.EXAMPLES),
            labels.long().split(work.EXAMPLES),
            strict=True,
        )
    )
    shared, local = network(model).to(device), network(model).to(device)

    def one_round():
        reached = {name: torch.zeros_like(v) for name, v in shared.state_dict().items()}
        for shard in shards:
            local.load_state_dict(shared.state_dict())
            train(local, *shard)
            for name, value in local.state_dict().items():
                reached[name] += value / len(shards)
        shared.load_state_dict(reached)

    def advance():
        for _ in range(block):
            one_round()
        values = [value.cpu().numpy() for value in shared.state_dict().values()]
        return list(zip(values[::2], values[1::2], strict=True))

    return advance


if __name__ == "__main__":
    work.main(prepare)

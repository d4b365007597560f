# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL of a PyTorch network on FEMNIST's writers: compiled, and as a loop in PyTorch.

The network is that of public tutorials, untouched: convolution, ReLU, pooling, twice,
then linear layers. Both sides take the same local steps with batches of the same size:
of every writer a step of the shared model, one of the personal model at the mixture,
and one of alpha. The loop is what research code does: a module for each of the two, one
writer after the other. Blocks of rounds take turns in one process. Prints JSON.

    FEDBLEND_DATA=... python benchmarks/torch_apfl.py --writers 20 --rounds 2
"""

import argparse
import json
import statistics
import sys
import time

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedblend as fb

RATE, ALPHA, ALPHA_RATE = 0.05, 0.5, 0.05


class Net(nn.Module):
    """The network of a public tutorial, for images of 28 x 28 and 62 characters."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 62)

    def forward(self, x):
        """The scores of images."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


def writers(count: int):
    """The rows of some writers."""
    data = fb.datasets.load("femnist")
    inputs, labels = data.rows
    keys = np.asarray(data.keys)
    names = sorted(set(keys.tolist()))[:count]
    return [(inputs[keys == name], labels[keys == name]) for name in names]


class Loop:
    """APFL as a loop over writers."""

    def __init__(self, rows, steps: int, batch: int):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.steps, self.batch = steps, batch
        self.rows = [
            (
                torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy()).to(self.device),
                torch.from_numpy(labels).long().to(self.device),
            )
            for inputs, labels in rows
        ]
        torch.manual_seed(0)
        self.shared = Net().to(self.device)
        self.local, self.mixed = Net().to(self.device), Net().to(self.device)
        self.personal = [self._state(self.shared) for _ in rows]
        self.alpha = [ALPHA] * len(rows)

    @staticmethod
    def _state(module):
        return [one.detach().clone() for one in module.parameters()]

    def _gradients(self, module, inputs, labels):
        loss = functional.cross_entropy(module(inputs), labels)
        return torch.autograd.grad(loss, list(module.parameters()))

    def client(self, place: int):
        """The local steps of one writer; its part of the mean of shared models."""
        inputs, labels = self.rows[place]
        personal, alpha = self.personal[place], self.alpha[place]
        self.local.load_state_dict(self.shared.state_dict())
        local, mixed = list(self.local.parameters()), list(self.mixed.parameters())
        for _ in range(self.steps):
            picked = torch.randint(len(labels), (self.batch,), device=self.device)
            own = inputs[picked], labels[picked]
            slopes = self._gradients(self.local, *own)
            with torch.no_grad():
                for mine, ours, theirs in zip(mixed, local, personal, strict=True):
                    mine.copy_(alpha * ours + (1 - alpha) * theirs)
            gradients = self._gradients(self.mixed, *own)
            with torch.no_grad():
                slope = sum(
                    (one * (ours - theirs)).sum()
                    for one, ours, theirs in zip(
                        gradients, local, personal, strict=True
                    )
                )
                for theirs, one in zip(personal, gradients, strict=True):
                    theirs -= RATE * (1 - alpha) * one
                for ours, one in zip(local, slopes, strict=True):
                    ours -= RATE * one
            alpha = float(np.clip(alpha - ALPHA_RATE * float(slope), 0, 1))
        self.alpha[place] = alpha
        return self._state(self.local)

    def advance(self, rounds: int):
        """Some rounds."""
        for _ in range(rounds):
            ends = [self.client(place) for place in range(len(self.rows))]
            with torch.no_grad():
                for place, one in enumerate(self.shared.parameters()):
                    one.copy_(torch.stack([end[place] for end in ends]).mean(dim=0))


def compiled(rows, steps: int, batch: int, rounds: int, blocks: int, chunk: int):
    """The run of fedblend, and the network that it is of."""
    inputs, labels = (np.concatenate(part) for part in zip(*rows, strict=True))
    ends = np.cumsum([len(own) for _, own in rows])[:-1]
    data = fb.federate((inputs, labels), np.split(np.arange(len(labels)), ends))
    torch.manual_seed(0)
    net = Net()
    model = fb.models.from_torch(net, torch.zeros(2, 1, 28, 28))
    algorithm = fb.apfl(
        fb.losses.cross_entropy(model.apply),
        fb.Work(RATE, steps=steps, batch_size=batch),
        alpha=ALPHA,
        alpha_rate=ALPHA_RATE,
    )
    run = fb.simulate(
        algorithm,
        model.init,
        data,
        jax.random.key(0),
        rounds=rounds * blocks,
        every=rounds,
        weights="uniform",
        chunk=chunk or None,
    )
    return run, net, model


def main():
    parser = argparse.ArgumentParser()
    for name, default in (
        ("writers", 20),
        ("rounds", 2),
        ("blocks", 5),
        ("steps", 10),
        ("batch", 20),
        ("threads", torch.get_num_threads()),
        ("chunk", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)  # one is faster where cores are busy
    rows = writers(given.writers)
    run, net, model = compiled(
        rows, given.steps, given.batch, given.rounds, given.blocks + 1, given.chunk
    )
    loop = Loop(rows, given.steps, given.batch)
    records = iter(run)
    next(records)  # before the first round
    next(records)  # compiles
    loop.advance(1)
    ours, theirs = [], []
    for _ in range(given.blocks):
        ours.append(next(records).seconds)
        start = time.perf_counter()
        loop.advance(given.rounds)
        theirs.append(time.perf_counter() - start)
    images = rows[0][0][:50]
    own = run.personal(0)
    loaded = Net()
    loaded.load_state_dict(fb.models.state_dict(own, net))
    with torch.no_grad():
        scores = loaded(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    json.dump(
        {
            "device": jax.default_backend(),
            **vars(given),
            "seconds a round": {
                "fedblend": statistics.median(ours) / given.rounds,
                "PyTorch, a loop": statistics.median(theirs) / given.rounds,
            },
            "ratio": statistics.median(
                b / a for a, b in zip(ours, theirs, strict=True)
            ),
            "ratio of least": min(theirs) / min(ours),
            "logits differ by": float(np.abs(scores - model.apply(own, images)).max()),
        },
        sys.stdout,
        indent=1,
    )


if __name__ == "__main__":
    main()

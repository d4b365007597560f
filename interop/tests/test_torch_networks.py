# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Networks as people write them train unchanged; their gradients are PyTorch's.

Gradients are those of training, on a full batch, with dropout off.
"""

import copy

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedblend as fb
from fedblend.core import Batch
from fedblend.losses import gradient

KEY = jax.random.key(0)
ROWS = 30


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short = nn.Sequential()
        if stride > 1:
            short = nn.Conv2d(before, after, 1, stride, bias=False)
            self.short = nn.Sequential(short, nn.BatchNorm2d(after))

    def forward(self, x):
        here = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(here)) + self.short(x)).relu()


class ResNet18(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks = [Block(width, width, 1), Block(width, width, 1)]
        for _ in range(3):
            blocks += [Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)]
            width *= 2
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 10)

    def forward(self, x):
        here = self.blocks(self.norm(self.stem(x)).relu())
        return self.head(here.mean((2, 3)))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16, 10)

    def forward(self, x):
        here = self.patches(x).flatten(2).transpose(1, 2)
        here = torch.cat([self.token.expand(x.shape[0], -1, -1), here], 1) + self.places
        return self.head(self.encoder(self.dropout(here))[:, 0])


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.GRU(8, 8, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x))[0][:, -1])


def convolutional():
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.LazyLinear(10)),
    )


def distilbert():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
    config = transformers.DistilBertConfig(
        max_position_embeddings=8, num_labels=10, **sizes
    )
    return transformers.DistilBertForSequenceClassification(config)


IMAGES, TOKENS = (3, 16, 16), (6,)
NETWORKS = {
    "CNN with batch norm and dropout": (convolutional, IMAGES),
    "ResNet-18 with batch norm": (ResNet18, IMAGES),
    "ViT with dropout": (ViT, IMAGES),
    "GRU with dropout": (Gru, TOKENS),
    "DistilBERT": (distilbert, TOKENS),
}


def switch_off(net):
    """The module in training, without dropout."""
    own = copy.deepcopy(net).train()
    for part in own.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "dropout_p", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    if hasattr(own, "config"):
        own.config.attention_dropout = 0.0
    return own


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_unchanged(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    net, rng = make(), np.random.default_rng(0)
    labels = rng.integers(0, 10, ROWS).astype(np.int32)
    inputs = rng.integers(0, 50, (ROWS, *shape)).astype(np.int64)
    if shape is IMAGES:
        inputs = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    example = torch.from_numpy(inputs)
    net(example)  # layers that find their shapes at first
    model = fb.models.from_torch(net, example)
    loss = fb.losses.cross_entropy(model.apply)
    data = fb.federate((inputs, labels), np.split(np.arange(ROWS), 3))
    work = fb.Work(0.05, steps=2, batch_size=5)
    run = fb.simulate(fb.fedavg(loss, work), model.init, data, KEY, rounds=1)
    start, end = model.init(KEY), run.complete().shared
    moved = jax.tree.map(lambda one, other: bool((one != other).any()), start, end)
    assert all(jax.tree.leaves(moved))
    off = fb.models.from_torch(net, example, dropout="off")
    rows = Batch((inputs, labels), key=KEY)
    ours = gradient(fb.losses.cross_entropy(off.apply))(off.init(KEY), rows)
    theirs = switch_off(net)
    scores = theirs(example)
    scores = scores if isinstance(scores, torch.Tensor) else scores["logits"]
    functional.cross_entropy(scores, torch.from_numpy(labels).long()).backward()
    for path, value in theirs.named_parameters():
        np.testing.assert_allclose(ours[path], value.grad, atol=1e-5, err_msg=path)

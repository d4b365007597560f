# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Small modules as people write them, by name, each with an example of two rows."""

import math

import torch
from torch import nn
from torch.nn import functional


class Tutorial(nn.Module):
    """Convolution, pooling, convolution, pooling, three linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(3, 4, 3)
        self.fc1 = nn.Linear(4 * 2 * 2, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        return self.fc2(functional.relu(self.fc1(x)))


class Block(nn.Module):
    """A residual block with group norm."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        here = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(here)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, 6, 2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        here = functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        return self.head(here.flatten(1))


class Recurrent(nn.Module):
    """An embedding, a recurrent layer, the last output."""

    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(11, 4, padding_idx=0)
        self.layer = layer
        width = getattr(layer, "proj_size", 0) or layer.hidden_size
        self.head = nn.Linear(width * (2 if layer.bidirectional else 1), 3)

    def forward(self, tokens):
        outputs, _ = self.layer(self.embedding(tokens))
        return self.head(outputs[:, -1])


class MeanEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(dim=1))


class Bag(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode=mode, padding_idx=1)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.bag(tokens))


class Encoder(nn.Module):
    """Tokens with sines of their places, an encoder, the mean without padding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        place = torch.arange(5)[:, None] * torch.exp(torch.arange(0, 8, 2) * -0.5)
        self.register_buffer(
            "places", torch.stack([place.sin(), place.cos()], -1).flatten(1)
        )
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        empty = tokens == 0
        here = self.embedding(tokens) * math.sqrt(8) + self.places
        here = self.encoder(here, src_key_padding_mask=empty)
        kept = (~empty).unsqueeze(-1)
        return self.head((here * kept).sum(1) / kept.sum(1).clamp(min=1))


class Masked(nn.Module):
    """Attention of three heads with a mask: nearby places only, and one sees none."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 3, 2).permute(2, 0, 3, 1, 4)
        at = torch.arange(length)
        mask = ((at[:, None] - at[None]).abs() <= 1) & (at[:, None] > 0)
        here = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(here.transpose(1, 2).reshape(rows, length, 6).mean(1))


class Decoder(nn.Module):
    """A causal block that scores the next token, its output tied to its input."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.qkv = nn.Linear(6, 18, bias=False)
        self.out = nn.Linear(6, 6)
        self.scores = nn.Linear(6, 7, bias=False)
        self.scores.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (
            one.unflatten(-1, (2, 3)).transpose(1, 2)
            for one in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        here = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.scores(x + self.out(here.transpose(1, 2).flatten(2)))


class HandWritten(nn.Module):
    """What people write by hand: einsum, softmax, masks, detach, no_grad, in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5) / 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.linspace(-1, 1, 5))

    def forward(self, x):
        here = torch.einsum("bi,ij->bj", x, self.weight) + self.offset
        with torch.no_grad():
            size = here.norm(dim=1, keepdim=True)
        here = here / (size + 1e-3) * self.scale
        here = here.masked_fill(here < -0.5, -1.0)
        top, place = here.max(dim=1, keepdim=True)
        mixed = torch.where(here > 0, here, here.detach() * 0.1 + here**3)
        mixed[:, 0] += 1
        spread = torch.log1p(mixed.std(1, keepdim=True)) + place
        return torch.cat([mixed.softmax(-1), top, spread, mixed.clamp(-0.2, 0.2)], 1)


def tokens(rows, length=5, most=11):
    return torch.randint(0, most, (rows, length))


def numbers(*shape):
    return lambda rows: torch.randn(rows, *shape)


def layers(*found):
    return lambda: nn.Sequential(*found)


ZOO = {
    "mlp": (layers(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), numbers(4)),
    "activations": (
        lambda: nn.Sequential(
            *(nn.Flatten(), nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU()),
            *(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6), nn.ELU(), nn.Mish()),
            *(nn.Hardswish(), nn.PReLU(), nn.Softplus(), nn.LeakyReLU(0.1)),
            *(nn.Hardtanh(), nn.Tanh(), nn.SELU(), nn.RMSNorm(6), nn.GLU()),
        ),
        numbers(2, 2),
    ),
    "tutorial CNN": (Tutorial, numbers(1, 16, 16)),
    "CNN with group norm": (
        layers(
            *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            nn.Conv2d(4, 4, 3, padding="same", bias=False),
            *(
                nn.InstanceNorm2d(4, affine=True),
                nn.AvgPool2d(2, padding=1),
                nn.Flatten(),
                nn.LazyLinear(3),
            ),
        ),
        numbers(2, 8, 8),
    ),
    "ResNet with group norm": (ResNet, numbers(3, 6, 6)),
    "depthwise separable CNN": (
        layers(
            *(nn.Conv2d(4, 8, 3, 2, 1, groups=4), nn.ReLU6(), nn.Conv2d(8, 6, 1)),
            *(nn.AdaptiveMaxPool2d((2, 3)), nn.ConvTranspose2d(6, 2, 3, 2, groups=2)),
            *(nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten()),
        ),
        numbers(4, 7, 7),
    ),
    "text CNN": (
        lambda: nn.Sequential(
            *(nn.Conv1d(3, 4, 3, dilation=2), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(4, 4, 2, stride=2), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        ),
        numbers(3, 14),
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM(4, 5, batch_first=True)), tokens),
    "LSTM, two ways, projected": (
        lambda: Recurrent(
            nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, proj_size=3)
        ),
        tokens,
    ),
    "GRU": (
        lambda: Recurrent(nn.GRU(4, 5, 2, batch_first=True, bias=False)),
        tokens,
    ),
    "RNN, two ways": (
        lambda: Recurrent(nn.RNN(4, 5, batch_first=True, bidirectional=True)),
        tokens,
    ),
    "mean of embeddings": (MeanEmbedding, tokens),
    "embedding bag": (lambda: Bag("mean"), tokens),
    "embedding bag, largest": (lambda: Bag("max"), tokens),
    "transformer encoder": (Encoder, tokens),
    "attention with a mask": (Masked, numbers(5, 6)),
    "causal decoder, tied": (Decoder, lambda rows: tokens(rows, 4, 7)),
    "by hand": (HandWritten, numbers(4)),
}
"""By name: a function that makes the module, one that draws this number of rows."""

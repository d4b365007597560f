# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Modules in training are PyTorch's own, given the same masks of dropout."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedblend as fb
from fedblend.batch_statistics import is_statistic, take_step
from fedblend.core import Batch
from fedblend.errors import InputError
from fedblend.losses import objective
from fedblend.models import feedforward

KEY = jax.random.key(0)
IMAGES = torch.from_numpy(
    np.random.default_rng(0).normal(1, 2, (8, 2, 6, 6)).astype(np.float32)
)
CLASSES = torch.arange(8) % 3


class Masked(nn.Module):
    """Multiplies by the next of some masks."""

    def __init__(self, masks):
        super().__init__()
        self.masks = masks

    def forward(self, inputs):
        return inputs * self.masks.pop(0)


@pytest.fixture
def masks(monkeypatch):
    """The factors of dropout, in the order in which a model computes them."""
    found, own = [], feedforward.dropout

    def record(key, rate, values):
        factors = own(key, rate, jnp.ones(values.shape, values.dtype))
        found.append(torch.from_numpy(np.array(factors)))
        return values * factors

    monkeypatch.setattr(feedforward, "dropout", record)
    return found


def network():
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=0.3), nn.ReLU()),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(48, 4)),
        *(nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5), nn.Linear(4, 3)),
    )


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_five_steps_of_training_are_pytorchs(masks):
    """Outputs, parameters and running statistics, with momentum and weight decay."""
    torch.manual_seed(0)
    net = network()
    model = fb.models.from_torch(net, IMAGES)
    loss = fb.losses.cross_entropy(model.apply)
    params = model.init(KEY)
    rule = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9))
    state = rule.init(params)
    theirs = copy.deepcopy(net).train()
    theirs[3] = theirs[7] = Masked(masks)
    descent = torch.optim.SGD(theirs.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    rows = IMAGES.numpy(), CLASSES.numpy()
    for step in range(5):
        key = jax.random.fold_in(KEY, step)
        outputs = model.apply(params, rows[0], key=key)
        expected = theirs(IMAGES)
        close(outputs, expected)
        functional.cross_entropy(expected, CLASSES).backward()
        descent.step()
        descent.zero_grad()
        batch = Batch(rows, key=key)
        push = jax.grad(lambda p, batch=batch: objective(loss, p, batch))(params)
        masks.clear()
        params, state = take_step(rule, push, state, params, push)
    assert not masks
    for name, value in fb.models.state_dict(params, net).items():
        if not name.endswith("num_batches_tracked"):
            close(value, theirs.state_dict()[name])
    net.load_state_dict(fb.models.state_dict(params, net))
    close(model.apply(params, rows[0]), net.eval()(IMAGES))


def test_a_client_with_padded_rows_keeps_the_statistics_of_its_own():
    """In epochs, whose last batch is not full, through the whole simulation."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Linear(72, 3))
    model = fb.models.from_torch(net, IMAGES)
    data = fb.federate((IMAGES.numpy(), CLASSES.numpy()), np.split(np.arange(8), [3]))
    work = fb.Work(0.1, fb.Epochs(2), 5)
    algorithm = fb.fedavg(fb.losses.cross_entropy(model.apply), work)
    run = fb.simulate(algorithm, model.init, data, KEY, rounds=1, weights="uniform")
    found = run.complete().shared
    ends = []
    for part in (IMAGES[:3], IMAGES[3:]):
        layer = nn.BatchNorm1d(72)
        for _ in range(2):
            layer(part.flatten(1))
        ends.append(layer)
    for name in ("running_mean", "running_var"):
        expected = sum(getattr(layer, name) for layer in ends) / 2
        close(found[f"1.{name}"].value, expected)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.GRU(4, 5, 2, batch_first=True, dropout=0.4)

    def forward(self, inputs):
        return self.layers(inputs)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, inputs):
        rate = 0.3 if self.training else 0.0
        query = self.first(inputs)
        return functional.scaled_dot_product_attention(
            query, inputs, inputs, None, rate
        )


def by_hand_gru(net, inputs, mask):
    first = nn.GRU(4, 5, batch_first=True)
    second = nn.GRU(5, 5, batch_first=True)
    own = net.layers.state_dict()
    for place, layer in enumerate((first, second)):
        end = f"l{place}"
        layer.load_state_dict(
            {
                name.replace(end, "l0"): value
                for name, value in own.items()
                if name.endswith(end)
            }
        )
    between = first(inputs)[0].swapaxes(0, 1) * mask
    return second(between.swapaxes(0, 1))[0]


def by_hand_attention(net, inputs, mask):
    scores = net.first(inputs) @ inputs.mT / 2
    return (scores.softmax(-1) * mask) @ inputs


@pytest.mark.parametrize(
    ("kind", "by_hand"), [(Recurrent, by_hand_gru), (Attention, by_hand_attention)]
)
def test_layers_that_draw_inside(kind, by_hand, masks):
    torch.manual_seed(0)
    net, inputs = kind(), torch.randn(3, 6, 4)
    model = fb.models.from_torch(net, inputs)
    params = model.init(KEY)
    found = model.apply(params, inputs.numpy(), key=KEY)
    (mask,) = masks
    assert (mask == 0).any()
    off = fb.models.from_torch(net, inputs, dropout="off")
    close(off.apply(params, inputs.numpy(), key=KEY), net.eval()(inputs))
    close(found, by_hand(net, inputs, mask))
    close(model.apply(params, inputs.numpy()), net.eval()(inputs))


def test_whole_channels_are_dropped():
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Dropout2d(0.5))
    model = fb.models.from_torch(net, IMAGES)
    params = model.init(KEY)
    plain = np.asarray(model.apply(params, IMAGES.numpy()))
    found = np.asarray(model.apply(params, IMAGES.numpy(), key=KEY))
    kept = (found != 0).any((2, 3))[..., None, None]
    np.testing.assert_allclose(found, np.where(kept, 2 * plain, 0), rtol=1e-6)
    assert 0 < kept.mean() < 1


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(72, 3)

    def forward(self, inputs):
        values = inputs.flatten(1)
        return {"features": values, "logits": self.last(values)}


def test_scores_of_a_dictionary_are_its_logits():
    net = Scores()
    model = fb.models.from_torch(net, IMAGES)
    found = model.apply(model.init(KEY), IMAGES.numpy())
    close(found, net(IMAGES)["logits"])


def test_switched_off_layers_are_no_parameters():
    net = network()
    off = fb.models.from_torch(net, IMAGES, dropout="off", freeze_batch_norm=True)
    params = off.init(KEY)
    assert not any(map(is_statistic, params.values()))
    same = off.apply(params, IMAGES.numpy(), key=KEY)
    np.testing.assert_array_equal(same, off.apply(params, IMAGES.numpy()))
    half = fb.models.from_torch(net, IMAGES, dropout="off")
    first, second = (
        half.apply(half.init(KEY), IMAGES.numpy(), key=jax.random.key(seed))
        for seed in (0, 1)
    )
    np.testing.assert_array_equal(first, second)
    close(first, without_dropout(net)(IMAGES))


def without_dropout(net):
    own = copy.deepcopy(net).train()
    own[3] = own[7] = nn.Identity()
    return own


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, inputs):
        return self.norm(self.first(self.norm(inputs)))


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (Twice(), "uses a batch normalization twice .in BatchNorm1d at 'norm'"),
        (
            nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
            "InstanceNorm1d at '0' with track_running_stats=True",
        ),
    ],
)
def test_statistics_that_would_not_be_pytorchs_are_refused(net, said):
    example = torch.randn(5, 4) if isinstance(net, Twice) else torch.randn(5, 3, 4)
    with pytest.raises(InputError, match=said) as caught:
        fb.models.from_torch(net, example)
    assert "\n" not in str(caught.value)
    model = fb.models.from_torch(net, example, freeze_batch_norm=True)
    close(model.apply(model.init(KEY), example.numpy(), key=KEY), net.eval()(example))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The work of a card's rounds by a peer: ``card_peers.py vmap A``; prints JSON.

Each is federated averaging on the rows of the card, without measuring. ``fedblend`` and
``hand`` need JAX, ``loop``, ``vmap`` and ``pfl`` need PyTorch, on the GPU if there is
one. All use TF32 where the hardware has it, as JAX does by default.
"""

import argparse
import importlib.util
import math
import sys
import types
from functools import partial
from typing import Any

import numpy as np

import card_tasks
import work
from card_tasks import Card

FOREVER = 1_000_000


def fedblend(card: Card, block: int):
    """``simulate`` with ``fedavg``, as a user would call it.

    A turn has a block's work on the host, and on the device that of the next one, which
    is begun meanwhile.
    """
    import card_runs

    data = card_runs.federation(card)
    run = card_runs.start(card, data, rounds=FOREVER, every=block, measure=None)
    records = iter(run)
    next(records)

    def advance():
        next(records)
        run.wait()

    return advance


def hand(card: Card, block: int):
    """JAX by hand, for this work alone: one compiled function for a block of rounds."""
    import jax
    import jax.numpy as jnp

    import card_runs

    model = card_runs.model_of(card)
    loss = card_runs.loss_of(card, model)
    inputs, labels = map(jnp.asarray, card_tasks.rows(card, card.clients * card.rows))
    chunk = card.cohort
    if jax.default_backend() == "cpu":
        # What is fast on a CPU: docs/benchmarks.md has the measurement.
        weights = sum(x.size for x in jax.tree.leaves(model.init(jax.random.key(0))))
        chunk = min(max(2**20 // weights, 1), 20, card.cohort)
        chunk = next(n for n in range(chunk, 0, -1) if card.cohort % n == 0)

    def train(params, client, key):
        index = jax.random.randint(key, (card.steps, card.batch), 0, card.rows)

        def step(here, some):
            rows = inputs[client * card.rows + some], labels[client * card.rows + some]
            slope = jax.grad(lambda params: loss(params, rows).mean())(here)
            return jax.tree.map(lambda p, s: p - card.rate * s, here, slope), None

        return jax.lax.scan(step, params, index)[0]

    def round(params, key):
        first, second = jax.random.split(key)
        everyone = jnp.arange(card.clients)
        if card.cohort < card.clients:
            everyone = jax.random.permutation(first, everyone)[: card.cohort]
        keys = jax.random.split(second, card.cohort)
        chunks = jax.tree.map(lambda x: x.reshape(-1, chunk), (everyone, keys))

        def add(total, members):
            reached = jax.vmap(train, in_axes=(None, 0, 0))(params, *members)
            return jax.tree.map(lambda t, r: t + r.sum(axis=0), total, reached), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)
        return jax.tree.map(lambda leaf: leaf / card.cohort, total), None

    @partial(jax.jit, donate_argnums=0)
    def rounds(params, key):
        return jax.lax.scan(round, params, jax.random.split(key, block))[0]

    params, count = model.init(jax.random.key(0)), 0

    def advance():
        nonlocal params, count
        count += 1
        params = rounds(params, jax.random.key(count))
        jax.block_until_ready(params)

    return advance


def torch_model(card: Card):
    """The network of a card in PyTorch."""
    from torch import nn

    if card.model == "mlp":
        return nn.Sequential(
            nn.Linear(math.prod(card.shape), 200),
            nn.ReLU(),
            nn.Linear(200, 200),
            nn.ReLU(),
            nn.Linear(200, card.classes),
        )
    height, width, channels = card.shape
    entries = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(entries, 128),
        nn.ReLU(),
        nn.Linear(128, card.classes),
    )


def torch_rows(card: Card):
    """Rows and labels by client, on the device; images have their channels first."""
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, labels = card_tasks.rows(card, card.clients * card.rows)
    if inputs.ndim == 4:
        inputs = np.ascontiguousarray(inputs.transpose(0, 3, 1, 2))
    shape = card.clients, card.rows
    return (
        torch.from_numpy(inputs).to(device).reshape(*shape, *inputs.shape[1:]),
        torch.from_numpy(labels).long().to(device).reshape(shape),
    )


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loop(card: Card, block: int):
    """A loop over clients in PyTorch, as most research code writes it."""
    import torch
    from torch.nn import functional

    inputs, labels = torch_rows(card)
    shared = torch_model(card).to(inputs.device)
    local = torch_model(card).to(inputs.device)

    def one_round():
        total = {name: torch.zeros_like(v) for name, v in shared.state_dict().items()}
        for client in torch.randperm(card.clients)[: card.cohort].tolist():
            local.load_state_dict(shared.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), lr=card.rate)
            index = torch.randint(
                card.rows, (card.steps, card.batch), device=inputs.device
            )
            for some in index:
                optimizer.zero_grad()
                scores = local(inputs[client, some])
                functional.cross_entropy(scores, labels[client, some]).backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                total[name] += value / card.cohort
        shared.load_state_dict(total)

    def advance():
        for _ in range(block):
            one_round()
        _wait()

    return advance


def vmap(card: Card, block: int, *, compiled: bool = True):
    """All clients of a round at once: ``torch.func.vmap``, and ``torch.compile``.

    Without the latter where it fails.
    """
    import torch
    from torch.func import functional_call, grad
    from torch.func import vmap as mapped
    from torch.nn import functional

    inputs, labels = torch_rows(card)
    network = torch_model(card).to(inputs.device)
    shared = {name: value.detach() for name, value in network.named_parameters()}

    def loss(params, rows, targets):
        return functional.cross_entropy(
            functional_call(network, params, (rows,)), targets
        )

    def step(params, rows, targets):
        slopes = mapped(grad(loss))(params, rows, targets)
        return {name: params[name] - card.rate * slopes[name] for name in params}

    fast: Any = torch.compile(step) if compiled else step
    members = torch.arange(card.cohort, device=inputs.device)[:, None]

    def one_round(shared):
        cohort = torch.randperm(card.clients, device=inputs.device)[: card.cohort]
        params = {
            name: value.expand(card.cohort, *value.shape).contiguous()
            for name, value in shared.items()
        }
        shape = card.steps, card.cohort, card.batch
        for some in torch.randint(card.rows, shape, device=inputs.device):
            rows = cohort[members], some
            params = fast(params, inputs[rows], labels[rows])
        return {name: value.mean(dim=0) for name, value in params.items()}

    def advance():
        nonlocal shared, fast
        for _ in range(block):
            try:
                shared = one_round(shared)
            except Exception as error:
                if fast is step:
                    raise
                print(f"torch.compile fails: {error}"[:300], file=sys.stderr)
                fast = step
                shared = one_round(shared)
        _wait()

    return advance


def _without_accountants() -> None:
    """Let pfl be imported without packages that only its privacy accountants use."""
    names = (
        "multiprocess",
        "prv_accountant",
        "dp_accounting",
        "dp_accounting.pld",
        "dp_accounting.rdp",
    )
    for name in names:
        parent = name.partition(".")[0]
        there = parent not in sys.modules or hasattr(sys.modules[parent], "__path__")
        if there and importlib.util.find_spec(parent) is not None:
            continue
        sys.modules[name] = _Absent(name)


class _Absent(types.ModuleType):
    """A module whose classes nobody may use."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def pfl(card: Card, block: int):
    """Pfl's federated averaging with its simulated backend."""
    _without_accountants()
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import ArtificialFederatedDataset
    from pfl.data.sampling import get_data_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional

    inputs, labels = (part.flatten(0, 1) for part in torch_rows(card))

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch_model(card)

        def forward(self, rows):
            return self.inner(rows)

        def loss(self, rows, targets, eval=False):
            del eval
            return functional.cross_entropy(self(rows), targets)

        def metrics(self, rows, targets, eval=False):
            value = self.loss(rows, targets, eval).item()
            return {"loss": Weighted(value * len(rows), len(rows))}

    # pfl's benchmark draws the rows of a user, and one epoch is the card's steps.
    number = min(card.steps * card.batch, card.rows)
    data = ArtificialFederatedDataset.from_slices(
        [inputs, labels],
        get_data_sampler("minimize_reuse", max_bound=len(labels)),
        lambda: number,
        create_dataset_fn=lambda some: Dataset(some),
    )
    network = Network()
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    backend = SimulatedBackend(data, data, [WeightByUser()])
    settings = NNAlgorithmParams(
        central_num_iterations=block,
        evaluation_frequency=FOREVER,
        train_cohort_size=card.cohort,
        val_cohort_size=0,
    )
    epochs = card.steps * card.batch // number
    training = NNTrainHyperParams(
        local_batch_size=card.batch,
        local_num_epochs=epochs,
        local_learning_rate=card.rate,
    )

    def advance():
        FederatedAveraging().run(
            settings,
            backend,
            model,
            model_train_params=training,
            model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
            send_metrics_to_platform=False,
        )
        _wait()

    return advance


KINDS = {"fedblend": fedblend, "hand": hand, "loop": loop, "vmap": vmap, "pfl": pfl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("card", choices=card_tasks.CARDS)
    parser.add_argument("--block", type=int, default=5, help="rounds timed at once")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--hold", action="store_true", help="take turns, by stdin")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    card = card_tasks.CARDS[given.card]
    card = card.tiny() if given.tiny else card
    work.measure(
        lambda: KINDS[given.kind](card, given.block),
        block=given.block,
        repeats=given.repeats,
        hold=given.hold,
    )


if __name__ == "__main__":
    main()

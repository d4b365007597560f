# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2: adapters of fifty writers on a convolutional base that other writers trained."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedblend as fb
from fedblend import keys
from fedblend_reproductions.adapters.runs import Runs
from fedblend_reproductions.adapters.summary import (
    ALONE,
    PERSONAL,
    SHARED,
    WHOLE,
    figure_of,
    numbers_of,
    part_of_bits,
    table_of,
)
from fedblend_reproductions.adapters.task import Plan, Task, splits_of
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, lead
from fedblend_reproductions.flix.images import inked

CLOSE = 0.01
"""How much less accuracy adapters may have than full fine-tuning."""
CRITERION = (
    "Criterion, fixed before the run: the shared adapter's accuracy on test images "
    "(mean over clients and splits) is at most 1 point below that of full fine-tuning "
    "in the same rounds and steps, each with its best rate on validation images."
)


FIRST_RATES = {
    "verdict": "reproduced",
    "criterion": "The same, with rates of full fine-tuning of at least 0.0003 and of "
    "adapters of at most 0.01. These were the best ones, at the edge of what was "
    "tried, so that further ones were added.",
    "ours": "The shared adapter had accuracy 0.8318, full fine-tuning 0.8246, the base "
    "0.8307, FLIX 0.8372, adapters alone 0.8397; nobody was harmed.",
}


@dataclasses.dataclass(frozen=True)
class Images:
    """Who trains the base, and for how long."""

    clients: int = 50
    others: int = 250
    steps: int = 1000
    batch: int = 64
    rate: float = 1e-3
    network: str = "cnn"


FULL = Plan(
    batch=16,
    steps=5,
    rounds=4,
    splits=3,
    rank=8,
    adapter_rates=(1e-3, 3e-3, 1e-2, 3e-2),
    full_rates=(3e-5, 1e-4, 3e-4, 1e-3),
    alone_rates=(1e-4, 3e-4, 1e-3),
    rounds_alone=12,
)
QUICK_IMAGES = Images(clients=3, others=6, steps=5, batch=16, network="mlp")


def prepared(plan: Plan, images: Images, quick: bool) -> Task:
    """Clients spread evenly over the names of all writers; the others train a base."""
    data = inked(fb.datasets.load("femnist", digits_only=quick))
    assert data.test_rows is not None and data.test_keys is not None
    assert data.keys is not None
    rows = tuple(map(np.concatenate, zip(data.rows, data.test_rows, strict=True)))
    writer = np.concatenate([data.keys, data.test_keys])
    names = np.unique(writer)
    places = np.linspace(0, len(names) - 1, images.clients).astype(int)
    clients, others = names[places], np.delete(names, places)[: images.others]
    model = fb.models.build(images.network, (28, 28, 1), data.outputs)
    seen = np.flatnonzero(np.isin(writer, others))
    base = trained(model, [part[seen] for part in rows], images)
    partition = [np.flatnonzero(writer == name) for name in clients]
    return Task(
        plan,
        model,
        base,
        splits_of(rows, partition, plan, list(clients)),
        ("writers",) * len(clients),
        fb.losses.cross_entropy,
        lambda apply: {
            "accuracy": fb.metrics.accuracy(apply),
            "loss": fb.metrics.mean_loss(fb.losses.cross_entropy(apply)),
        },
    )


def trained(model: fb.Model, rows: list[np.ndarray], images: Images) -> Any:
    """A base: plain training on the rows of all other writers."""
    optimizer = optax.adam(optax.cosine_decay_schedule(images.rate, images.steps))
    loss = fb.losses.cross_entropy(model.apply)

    @jax.jit
    def step(state, batch):
        params, moments = state
        slope = jax.grad(lambda own: loss(own, batch).mean())(params)
        change, moments = optimizer.update(slope, moments, params)
        return optax.apply_updates(params, change), moments

    params = model.init(keys.derive(jax.random.key(0), "init"))
    state, draws = (params, optimizer.init(params)), np.random.default_rng(0)
    for _ in range(images.steps):
        chosen = draws.integers(0, len(rows[0]), images.batch)
        state = step(state, tuple(part[chosen] for part in rows))
    return state[0]


def check(quick: bool, folder: Path) -> Finding:
    """Every method, and who is harmed."""
    plan, images = (FULL.quick, QUICK_IMAGES) if quick else (FULL, Images())
    task = prepared(plan, images, quick)
    settings = {"plan": repr(plan), "images": repr(images)}
    numbers = numbers_of(Runs(task, Cache(folder, settings)), np.asarray)
    close = gap(numbers) >= -CLOSE
    return Finding(
        Verdict.reproduced if close else Verdict.differs,
        _ours(numbers),
        numbers,
        {"accuracy": figure_of(task.groups, numbers, "accuracy")},
        why=_setting(task, images),
        table=table_of(numbers, "accuracy", ".4f"),
        criterion=CRITERION,
        before={} if quick else FIRST_RATES,
    )


def gap(numbers: Numbers) -> float:
    """How much more accuracy the shared adapter has than full fine-tuning."""
    return numbers["score"][SHARED] - numbers["score"][WHOLE]


def _ours(numbers: Numbers) -> str:
    found = numbers["score"]
    best = max(PERSONAL, key=lambda name: found[name])
    return (
        f"The shared adapter has accuracy {found[SHARED]:.4f}, full fine-tuning "
        f"{found[WHOLE]:.4f}, the base {found['base']:.4f}; an adapter is "
        f"{100 * part_of_bits(numbers):.1f} % of the bits. The best personal one is "
        f"{best} with {found[best]:.4f}, which harms "
        f"{numbers['harm'][best]['harmed']} of {len(numbers['clients'])} clients; "
        f"adapters alone have {found[ALONE]:.4f}."
    )


def _setting(task: Task, images: Images) -> str:
    plan = task.plan
    return (
        f"{task.splits[0].clients} writers of FEMNIST as clients, {plan.splits} splits "
        f"of their images; `{images.network}` of {fb.trees.size(task.base):,} weights "
        f"as the base, trained on {images.others} other writers ({images.steps} steps "
        f"of {images.batch} images). All methods: {plan.rounds} rounds of all clients, "
        f"{plan.steps} steps of Adam on {plan.batch} images, adapters of rank "
        f"{plan.rank} on all weights but the last layer's; the rest as of L1."
    )


def headline(numbers: Numbers) -> str:
    """The deciding number in one sentence."""
    return f"the shared adapter is {lead(gap(numbers), 'full fine-tuning')}"


L2 = Claim(
    "L2",
    "Images: adapters against full fine-tuning",
    "Adapters of low rank perform on par with full fine-tuning, or better, with few "
    "trainable parameters (Hu et al. 2022, abstract); measured there on text.",
    check,
    headline,
    resumable=True,
)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Fifty clients on one frozen language model: their windows of text, and the work.

The clients are users of quantumcomputing.stackexchange.com and roles of Shakespeare
that the base has never seen. Windows of a client's text are shuffled, and split anew
for every seed; training, validation and test windows do not overlap.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fedblend as fb
from fedblend_reproductions.text.base import SMALL, TOKENIZER, Size
from fedblend_reproductions.text.corpus import Corpus, windows_of

VALIDATION, TEST = 0.15, 0.3
"""Parts of a client's windows."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run: those of the base, and how long all methods train."""

    base: Size
    length: int
    """Of the clients' windows, in tokens."""
    windows: int
    """Of a client at most."""
    batch: int
    steps: int
    rounds: int
    splits: int
    rank: int
    adapter_rates: tuple[float, ...]
    full_rates: tuple[float, ...]
    alpha: float
    lam: float

    def work(self, rate: Any, steps: int | None = None) -> fb.Work:
        """The local work of a round."""
        return fb.Work(optax.adam(rate), steps or self.steps, self.batch)


FULL = Plan(
    base=Size(),
    length=64,
    windows=32,
    batch=2,
    steps=4,
    rounds=4,
    splits=3,
    rank=8,
    adapter_rates=(1e-3, 3e-3, 1e-2),
    full_rates=(3e-4, 1e-3, 3e-3),
    alpha=0.5,
    lam=0.1,
)
QUICK = dataclasses.replace(
    FULL,
    base=dataclasses.replace(SMALL, clients=2),
    length=32,
    windows=10,
    steps=1,
    rounds=2,
    splits=2,
    rank=2,
    adapter_rates=(1e-2,),
    full_rates=(1e-3,),
)


class Task(NamedTuple):
    """The clients' data in all splits, and the base that they have in common."""

    plan: Plan
    model: fb.Model
    base: Any
    splits: Sequence[fb.FederatedData]
    kinds: tuple[str, ...]
    """"users" or "roles", by client."""

    def adapted(self, rank: int) -> fb.Model:
        """The base with adapters of this rank as its parameters."""
        rows = self.splits[0].train.examples[0][:1]
        return fb.adapt(self.model, self.base, how=fb.lora(rank), inputs=rows)

    @property
    def keys(self) -> jax.Array:
        """A seed for each of the splits."""
        return jax.random.split(jax.random.key(0), len(self.splits))


def task_of(plan: Plan, corpus: Corpus, folder: Path) -> Task:
    """The clients of a corpus, on the base in a folder, see ``save_base``."""
    model, base = fb.models.load_transformer(folder)
    tokenizer = fb.data.load_tokenizer(folder / TOKENIZER)
    writers = {**corpus.users, **corpus.roles}
    pieces = [windows_of([text], tokenizer, plan.length) for text in writers.values()]
    inputs, targets = (
        np.concatenate([piece[part][: plan.windows] for piece in pieces])
        for part in (0, 1)
    )
    ends = np.cumsum([min(len(piece.inputs), plan.windows) for piece in pieces])
    partition = np.split(np.arange(ends[-1]), ends[:-1])
    splits = [
        fb.federate(
            (inputs, targets),
            partition,
            validation=VALIDATION,
            test=TEST,
            names=list(writers),
            split=number,
        )
        for number in range(plan.splits)
    ]
    kinds = ("users",) * len(corpus.users) + ("roles",) * len(corpus.roles)
    return Task(plan, model, base, splits, kinds)

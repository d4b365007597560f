# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L1: personal language models, fifty clients on one frozen base.

The clients are users of quantumcomputing.stackexchange.com and roles of Shakespeare
that the base has never seen. Windows of a client's text are shuffled, and split anew
for every seed; training, validation and test windows do not overlap.
"""

import dataclasses
from pathlib import Path

import numpy as np

import fedblend as fb
from fedblend_reproductions.adapters.comparison import client_means
from fedblend_reproductions.adapters.runs import ADAPTERS, Runs
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
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.text.base import (
    SMALL,
    TOKENIZER,
    WEIGHTS,
    Size,
    load_base,
    save_base,
    train_base,
)
from fedblend_reproductions.text.corpus import Corpus, read_corpus, windows_of

CLOSE = 0.02
"""How much more perplexity adapters may have than full fine-tuning."""
OTHER_RANKS = (4, 16)
"""Which are tried if adapters are not close to full fine-tuning."""
CRITERION = (
    "Criterion, fixed before the run: the shared adapter's perplexity on test windows "
    "(exp of the mean over clients and splits of their mean loss by token) is at most "
    "2 % above that of full fine-tuning in the same rounds and steps, each with its "
    "best rate on validation windows."
)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The base, and the windows of each client."""

    base: Size
    length: int
    windows: int
    """Of a client at most."""


FULL = Plan(
    batch=2,
    steps=4,
    rounds=4,
    splits=3,
    rank=8,
    adapter_rates=(3e-3, 1e-2, 3e-2),
    full_rates=(3e-4, 1e-3, 3e-3),
    alone_rates=(1e-3, 3e-3),
    rounds_alone=8,
)
FULL_TEXTS = Texts(Size(), length=32, windows=48)
QUICK_TEXTS = Texts(dataclasses.replace(SMALL, clients=2), length=32, windows=10)


def prepared(plan: Plan, texts: Texts, folder: Path) -> Task:
    """The clients, and the base, which is trained where the folder has none."""
    corpus, place = read_corpus(texts.base.clients, texts.base.least), folder / "base"
    if not (place / WEIGHTS).exists():
        save_base(place, train_base(texts.base, corpus))
    return task_of(plan, texts, corpus, place)


def task_of(plan: Plan, texts: Texts, corpus: Corpus, folder: Path) -> Task:
    """The clients of a corpus, on the base in a folder, see ``save_base``."""
    model, base = load_base(folder)
    tokenizer = fb.data.load_tokenizer(folder / TOKENIZER)
    writers = {**corpus.users, **corpus.roles}
    pieces = [windows_of([text], tokenizer, texts.length) for text in writers.values()]
    inputs, targets = (
        np.concatenate([windows[: texts.windows] for windows in part])
        for part in zip(*(piece[:2] for piece in pieces), strict=True)
    )
    ends = np.cumsum([min(len(piece.inputs), texts.windows) for piece in pieces])
    partition = np.split(np.arange(ends[-1]), ends[:-1])
    groups = ("users",) * len(corpus.users) + ("roles",) * len(corpus.roles)
    loss = fb.losses.sequence_cross_entropy
    return Task(
        plan,
        model,
        base,
        splits_of((inputs, targets), partition, plan, list(writers)),
        groups,
        loss,
        lambda apply: {"loss": fb.metrics.mean_loss(loss(apply))},
    )


def check(quick: bool, folder: Path) -> Finding:
    """Every method, and who is harmed."""
    plan, texts = (FULL.quick, QUICK_TEXTS) if quick else (FULL, FULL_TEXTS)
    task = prepared(plan, texts, folder)
    settings = {"plan": repr(plan), "texts": repr(texts)}
    runs = Runs(task, Cache(folder, settings))
    numbers = numbers_of(runs, np.exp)
    close = excess(numbers) <= CLOSE
    if not close:  # is it for want of rank?
        numbers["ranks"] = {
            rank: float(np.exp(client_means(runs.shared(ADAPTERS, rank)).mean()))
            for rank in OTHER_RANKS
        }
    return Finding(
        Verdict.reproduced if close else Verdict.differs,
        _ours(numbers),
        numbers,
        {"perplexity": figure_of(task.groups, numbers, "perplexity")},
        why=_setting(task, texts),
        table=table_of(numbers, "perplexity", ".2f"),
        criterion=CRITERION,
    )


def excess(numbers: Numbers) -> float:
    """How much more perplexity the shared adapter has than full fine-tuning."""
    return numbers["score"][SHARED] / numbers["score"][WHOLE] - 1


def _ours(numbers: Numbers) -> str:
    found = numbers["score"]
    best = min(PERSONAL, key=lambda name: found[name])
    ranks = numbers.get("ranks", {})
    others = "".join(f" Rank {rank}: {value:.1f}." for rank, value in ranks.items())
    return (
        f"The shared adapter has perplexity {found[SHARED]:.1f}, full fine-tuning "
        f"{found[WHOLE]:.1f} ({100 * excess(numbers):+.1f} %), the base "
        f"{found['base']:.1f}; an adapter is {100 * part_of_bits(numbers):.1f} % of "
        f"the bits. The best personal one is {best} with {found[best]:.1f}, which "
        f"harms {numbers['harm'][best]['harmed']} of {len(numbers['clients'])} "
        f"clients; adapters alone have {found[ALONE]:.1f}.{others}"
    )


def _setting(task: Task, texts: Texts) -> str:
    plan = task.plan
    return (
        f"{task.splits[0].clients} clients, half of them users of "
        "quantumcomputing.stackexchange.com, half roles of Shakespeare, at most "
        f"{texts.windows} windows of {texts.length} tokens each; {plan.splits} splits "
        f"of these windows. The base has {fb.trees.size(task.base):,} weights and has "
        f"seen none of them. All methods: {plan.rounds} rounds of all clients, "
        f"{plan.steps} steps of Adam on {plan.batch} windows, adapters of rank "
        f"{plan.rank}. FLIX and APFL mix the products of factors, from alpha "
        f"{plan.alpha:g}; Ditto has lam {plan.lam:g}; FedAlt splits its steps between "
        "its two adapters. The rate and the rounds of training alone are chosen on "
        "validation windows; own adapters have that rate in all methods. Harmed is a "
        "client whose personal adapter is worse than the shared one, or than its own "
        "alone, with an interval that excludes zero."
    )


def headline(numbers: Numbers) -> str:
    """The deciding number in one sentence."""
    gap = f"{100 * excess(numbers):+.1f} %"
    return f"the shared adapter's perplexity is {gap} beside full fine-tuning's"


L1 = Claim(
    "L1",
    "Text: adapters against full fine-tuning",
    "Adapters of low rank perform on par with full fine-tuning, or better, with few "
    "trainable parameters (Hu et al. 2022, abstract).",
    check,
    headline,
    resumable=True,
)

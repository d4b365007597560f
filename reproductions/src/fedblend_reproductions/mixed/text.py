# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The language task: clients write posts, the server has articles of Wikipedia.

Shakespeare's plays are a third source, for testing alone. Rates
are tried by all methods alike, with two seeds, for a part of the rounds, and judged by
the accuracy on validation rows of both sides, in the mixture's weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedblend as fb
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.datasets import shakespeare, stackexchange_text, wikitext2
from fedblend_reproductions.flix.text import pairs
from fedblend_reproductions.mixed.task import (
    Curves,
    How,
    Method,
    Task,
    course,
    on_part,
    with_test,
)

WEIGHTS = (0.75, 0.25)
"""The weights of the federated and the central loss, as in the paper."""
SIDES = ("clients", "central")
TITLES = {"both": "posts and articles", "clients": "posts", "central": "articles"}
"""What rows of these are called in figures."""
TRIED = (100, 101)
"""Seeds with which rates are tried."""
MOST = 200
"""Windows of a user."""


class Size(NamedTuple):
    """How much is run on how much: rows held out of each source, work of a round.

    Of ``rates``, which are those of clients, the best after ``tuning`` rounds is run
    with other seeds; a single one is not tried. Windows have ``length`` characters, and
    users take part who have ``least`` of them. ``network`` is the embedding's width and
    the GRU's; a table of pairs if None. Central batches have ``central`` rows at most.
    """

    clients: int | None
    held_out: int
    cohort: int
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    tuning: int
    rounds: int
    seeds: int
    points: int
    length: int = 40
    least: int = 20
    network: tuple[int, int] | None = (64, 64)
    central: int = 6400


FULL = Size(None, 800, 10, 2, 5, (0.75, 1.5, 2.25), 150, 600, 5, 10)
PAPER_STEPS = Size(None, 800, 20, 8, 16, (1.5,), 0, 150, 5, 15)
"""With the paper's batches and steps, and a fifth of its cohort."""
QUICK = Size(20, 200, 4, 5, 2, (20.0,), 0, 40, 2, 2, network=None)


def described(task: Task, size: Size) -> str:
    """What is different from the paper."""
    network = "a table of pairs of characters"
    if size.network is not None:
        embedding, hidden = size.network
        network = f"a GRU of {hidden} with an embedding of {embedding}"
    batches = [central_batch(task, size, how) for how in ("parallel", "one_way")]
    return (
        f"Clients are {task.federated_data.clients} users of "
        f"quantumcomputing.stackexchange.com with {size.least} to {MOST} windows of "
        f"{size.length} characters each, {size.cohort} a round, batches of "
        f"{size.batch_size} and {size.steps} steps, where the paper has 342,477 users "
        "of Stack Overflow, 100 a round, windows of 100, batches of 8 and 16 steps; "
        f"the server has {len(task.held[0]):,} windows of WikiText-2, where the paper "
        "has five million articles, and central batches by its rule "
        f"({batches[0]} a step, {batches[1]} for one_way). The network is "
        f"{network}, the paper's a GRU of 1024 with one of 256; nothing is clipped. "
        "Users keep 10 % of their windows for testing and 10 % for validation; "
        "articles tested on are others than those trained on."
    )


def central_batch(task: Task, size: Size, how: How) -> int:
    """Rows of a central batch: the paper's rule, and at most ``size.central``."""
    return min(task.central_batch(how), size.central)


def task(size: Size) -> Task:
    """The sources and the network."""
    posts = stackexchange_text(length=size.length)
    articles = wikitext2(length=size.length)
    assert posts.keys is not None and articles.test_rows is not None
    users = [
        index[:MOST]
        for index in fb.partition.by_key(posts.keys).rows
        if len(index) >= size.least
    ]
    federated_data = fb.federate(
        posts.rows, users[: size.clients], validation=0.1, test=0.1
    )
    assert federated_data.validation is not None and federated_data.test is not None
    # The last articles are for validation, so that none is on both sides but one.
    first = len(articles.rows[0]) * 9 // 10
    train, last = (
        tuple(part[here] for part in articles.rows)
        for here in (slice(first), slice(first, None))
    )
    tested = [federated_data.test.examples, articles.test_rows]
    if size.network is not None:
        tested.append(shakespeare(length=size.length).rows)
    test = [_some(rows, size.held_out) for rows in tested]
    validation = [
        _some(rows, size.held_out)
        for rows in (federated_data.validation.examples, last)
    ]
    model = _network(posts.outputs, size.network)
    loss = fb.losses.sequence_cross_entropy(model.apply)
    ends = np.cumsum([0, *(len(rows[0]) for rows in test)])
    return Task(
        with_test(federated_data, _joined(test), _joined(validation)),
        train,
        model,
        loss,
        {
            f"{name}@{source}": on_part(measure, int(start), int(end))
            for source, start, end in zip(
                (*SIDES, "shakespeare"), ends, ends[1:], strict=False
            )
            for name, measure in (
                ("accuracy", fb.metrics.next_token_accuracy(model.apply)),
                ("loss", fb.metrics.mean_loss(loss)),
            )
        },
        weights=WEIGHTS,
        cohort=size.cohort,
        batch_size=size.batch_size,
        steps=size.steps,
    )


def _network(characters: int, widths: tuple[int, int] | None) -> fb.Model:
    if widths is None:
        return pairs(characters)
    embedding, hidden = widths
    return fb.models.char_rnn(
        characters, embedding=embedding, hidden=hidden, layers=1, cell="gru"
    )


def _some(rows: tuple, count: int) -> tuple:
    """``count`` rows, drawn uniformly."""
    chosen = np.random.default_rng(0).permutation(len(rows[0]))[:count]
    assert len(chosen) == count
    return tuple(part[chosen] for part in rows)


def _joined(pieces: list[tuple]) -> tuple:
    return tuple(np.concatenate(parts) for parts in zip(*pieces, strict=True))


def measured_on(source: str, values: Mapping[str, Any], metric: str) -> np.ndarray:
    """A metric on a source's rows; "both" are the sides, weighed as in training."""
    if source != "both":
        return np.asarray(values[f"{metric}@{source}"], np.float64)
    ours, theirs = (measured_on(side, values, metric) for side in SIDES)
    return WEIGHTS[0] * ours + WEIGHTS[1] * theirs


def far_apart(found: Mapping[str, np.ndarray], most: float) -> str:
    """A sentence on methods whose seeds differ by more than ``most``."""
    listed = [
        f"{name} {values.min():.3g} to {values.max():.3g} (median "
        f"{np.median(values):.3g})"
        for name, values in found.items()
        if values.max() - values.min() > most
    ]
    if not listed:
        return ""
    return (
        f" Seeds are far apart for {', '.join(listed)}: the rate that was best in the "
        "short trial is too large for some of the seeds in the long run."
    )


def cache_in(folder: Path, task: Task, size: Size, **more: Any) -> Cache:
    """The cache of results, whose settings are these."""
    counts = {name: part.counts for name, part in task.federated_data.splits.items()}
    settings = {**size._asdict(), "held": len(task.held[0]), "counts": counts}
    return Cache(folder, {**settings, "weights": WEIGHTS, **more})


def curves(cache: Cache, name: str, compute: Callable[[], Curves]) -> Curves:
    """The curves from the cache, or computed now."""
    known = cache(name, lambda: compute()._asdict())
    values = {metric: np.array(v, float) for metric, v in known["values"].items()}
    return Curves(np.array(known["rounds"]), values)


def tuned(task: Task, size: Size, name: str, method: Method, cache: Cache) -> float:
    """The rate that is best on validation rows of both sides."""
    if len(size.rates) == 1:
        return size.rates[0]
    accuracies = {
        name: measure
        for name, measure in task.measures.items()
        if name in [f"accuracy@{side}" for side in SIDES]
    }
    tries = len(TRIED)
    tried = cache(
        f"{name} tried",
        lambda: (
            course(
                task._replace(measures=accuracies),
                method,
                rates=np.repeat(size.rates, tries).tolist(),
                seeds=TRIED * len(size.rates),
                rounds=size.tuning,
                every=size.tuning,
                split="validation",
            ).values
        ),
    )
    found = (
        measured_on("both", tried, "accuracy")[:, -1].reshape(-1, tries).mean(axis=1)
    )
    return size.rates[int(np.nan_to_num(found).argmax())]

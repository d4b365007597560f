# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Keyboards with a central corpus: clients write posts, the server has articles.

Users of a site on quantum computing hold their posts; the server holds articles of
Wikipedia. A network is to guess the next character of both. Mixed FL trains it on both
without moving a post to the server or the articles to the users.

    python examples/stories/keyboards.py [FOLDER]     the figure goes to FOLDER
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

import fedblend as fb
from fedblend.transforms import central_loss
from fedblend_reproductions.datasets import stackexchange_text, wikitext2

TINY = os.environ.get("FEDBLEND_TINY") == "1"
USERS, ROUNDS, HELD, WIDTH = (4, 2, 20, 4) if TINY else (40, 150, 300, 48)
SEEDS, EVERY = 2, max(ROUNDS // 10, 1)
ROUND_NUMBERS = range(0, ROUNDS + 1, EVERY)
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

# --- data
posts = stackexchange_text(length=30)
articles = wikitext2(length=30)
users = fb.partition.by_key(posts.keys, minimum=20).rows[:USERS]
keyboards = fb.federate(posts.rows, [rows[:100] for rows in users], test=0.2)
server = fb.shard_of(articles.rows)


def some(rows, count=HELD) -> fb.Batch:
    """So many rows, spread over all of them."""
    at = np.linspace(0, len(rows[0]) - 1, count).astype(int)
    return fb.Batch(tuple(part[at] for part in rows))


tests = {
    "posts": some(keyboards.splits["test"].examples),
    "articles": some(articles.test_rows),
}
# --- end

# --- methods
model = fb.models.char_rnn(
    posts.outputs, embedding=WIDTH // 2, hidden=WIDTH, layers=1, cell="gru"
)
loss = fb.losses.sequence_cross_entropy(model.apply)
work = fb.Work(2.0, steps=5, batch_size=4)
clients = fb.fedavg(loss, work)
central = central_loss.row_loss(loss, batch_size=40)


def mixed(how):
    """Both losses count by half."""
    return fb.transforms.mixed_fl(
        clients, central, how=how, weights=(0.5, 0.5), steps=5
    )


METHODS = {
    "users alone": (clients, keyboards, None),
    "server alone": (
        fb.fedavg(loss, work._replace(batch_size=40)),
        fb.federate(articles.rows, [np.arange(len(articles.rows[0]))]),
        None,
    ),
    "parallel": (mixed("parallel"), keyboards, server),
    "one-way": (mixed("one_way"), keyboards, server),
    "two-way": (mixed("two_way"), keyboards, server),
}
# --- end


# --- run
accuracy = jax.jit(
    jax.vmap(fb.metrics.next_token_accuracy(model.apply), in_axes=(0, None))
)


def course(algorithm, data, own) -> dict[str, list[np.ndarray]]:
    """The accuracy on both kinds of text, by tenths of the rounds, of all seeds."""
    run = fb.simulate(
        algorithm,
        model.init,
        data,
        jax.random.split(jax.random.key(0), SEEDS),
        rounds=ROUNDS,
        every=EVERY,
        cohort=min(10, data.clients),
        central=own,
    )
    reached = {name: [] for name in tests}
    for _ in run:
        for name, rows in tests.items():
            reached[name].append(np.asarray(accuracy(run.shared, rows)))
    return reached


courses = {name: course(*method) for name, method in METHODS.items()}
# --- end


def table() -> str:
    """Accuracy at the end, a line for each method."""
    lines = ["| trained by | posts | articles | mean |", "|---|---|---|---|"]
    for name, reached in courses.items():
        last = [np.mean(reached[kind][-1]) for kind in tests]
        shown = " | ".join(f"{value:.1%}" for value in [*last, np.mean(last)])
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines)


def figure() -> Figure:
    """Accuracy over rounds on both kinds of text."""
    drawn = Figure(figsize=(7.5, 3.2), layout="constrained")
    both = drawn.subplots(1, len(tests), sharey=True)
    styles = ("-", "-", "--", "-.", ":")
    for axes, kind in zip(both, tests, strict=True):
        for style, (name, reached) in zip(styles, courses.items(), strict=True):
            values = 100 * np.array(reached[kind]).mean(axis=1)
            axes.plot(ROUND_NUMBERS, values, style, marker=".", label=name)
        axes.set_title(kind)
        axes.set_xlabel("round")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("next characters right, %")
    both[1].legend(frameon=False, fontsize=8)
    return drawn


ends = [np.ptp(reached[kind][-1]) for reached in courses.values() for kind in tests]
print(table())
print(f"both seeds are at most {100 * max(ends):.1f} points apart")
OUT.mkdir(parents=True, exist_ok=True)
figure().savefig(OUT / "keyboards.png", dpi=120)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tags of posts: how they are dealt out, the sweeps beside NumPy, the quick checks."""

import numpy as np
import pytest

from fedblend.data.dataset import Dataset
from fedblend_reproductions.flix import tag_steps, tags
from fedblend_reproductions.flix.tag_sweeps import QUICK, Scores, flix_sweeps
from fedblend_reproductions.flix.tag_tasks import Deal, tag_task


def test_posts_are_dealt_to_the_workers_of_their_user():
    users = np.repeat([7, 8, 9], [9, 2, 12])
    data = Dataset((np.ones((23, 4)), np.ones((23, 6))), "tags", 6, keys=users)
    task = tag_task(
        "t", data, users=2, deal=lambda posts: Deal(2, 3, validation=1), seeds=3
    )
    splits = task.federated_data.splits
    assert [split.counts.tolist() for split in splits.values()] == [
        [3, 3, 3, 3],
        [1, 1, 1, 1],
        [5, 5, 2, 2],
    ]
    for seed in range(3):
        held = [
            {name: set(split.rows(worker)[:, seed]) for name, split in splits.items()}
            for worker in range(4)
        ]
        for first, user in ((0, 9), (2, 7)):
            one, two = held[first], held[first + 1]
            assert one["validation"] == two["validation"]
            assert one["test"] == two["test"]
            parts = [one["train"], two["train"], one["validation"], one["test"]]
            assert sum(map(len, parts)) == len(set.union(*parts))
            assert set.union(*parts) == set(np.flatnonzero(users == user))
    numbers = task.federated_data.train.examples
    assert (numbers[:, 0] != numbers[:, 1]).any()


def test_the_best_is_chosen_for_each_seed_and_never_a_diverged_run():
    loss = np.array([[[3.0, 1.0], [2.0, np.nan]], [[np.inf, 5.0], [4.0, 6.0]]])
    scores = Scores(loss, -loss, 10 * loss)
    assert scores.chosen(1).tested.tolist() == [[20, 10], [40, 50]]
    assert scores.chosen(2, "recall").tested.tolist() == [20, 10]


def in_numpy(task, seed, alpha, step, tolerance):
    """Validation loss and test recall@5 of FLIX, in plain loops and float64."""
    bags, labels = (np.asarray(part, float) for part in (task.bags, task.tags))
    splits = task.federated_data.splits
    rows = {
        name: [split.rows(w)[:, seed] for w in range(task.federated_data.clients)]
        for name, split in splits.items()
    }

    def gradient(weight, mine):
        chances = 1 / (1 + np.exp(-bags[mine] @ weight.T))
        return (chances - labels[mine]).T @ bags[mine] / labels[mine].size

    own = []
    for worker, mine in enumerate(rows["train"]):
        weight = np.zeros((labels.shape[1], bags.shape[1]))
        for _ in range(QUICK.local_steps):
            if np.linalg.norm(gradient(weight, mine)) <= tolerance:
                break
            weight = weight - gradient(weight, mine) / task.smooth[seed, worker]
        own.append(weight)
    shared = np.mean(own, axis=0)
    for _ in range(QUICK.rounds):
        mixed = [alpha * shared + (1 - alpha) * weight for weight in own]
        gradients = [
            alpha * gradient(*pair) for pair in zip(mixed, rows["train"], strict=True)
        ]
        shared = shared - step * np.mean(gradients, axis=0)
    losses, recalls = [], []
    held_out = (rows["validation"], rows["test"])
    for weight, held, tested in zip(own, *held_out, strict=True):
        weight = alpha * shared + (1 - alpha) * weight
        scores = bags[held] @ weight.T
        losses.append((np.logaddexp(0, scores) - labels[held] * scores).mean())
        top = np.argsort(-(bags[tested] @ weight.T), axis=1)[:, :5]
        hits = np.take_along_axis(labels[tested], top, axis=1).sum(axis=1)
        recalls.append((hits / labels[tested].sum(axis=1)).mean())
    return np.mean(losses), np.mean(recalls)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "seed"), [((0, 3), 1), ((1, 2), 0)])
def test_the_sweep_agrees_with_plain_loops(data_home, place, seed):
    (found,) = flix_sweeps(quick=True)
    alpha, step = QUICK.alphas[place[0]], QUICK.steps[place[1]]
    loss, recall = in_numpy(found.task, seed, alpha, step, found.tolerance[seed])
    assert found.scores.loss[*place, seed] == pytest.approx(loss, rel=1e-3)
    # A near tie may fall the other way in float32: one tag of one of 24 rows.
    assert found.scores.tested[*place, seed] == pytest.approx(recall, abs=0.02)


@pytest.mark.slow
def test_steps_by_alpha(data_home):
    found = tag_steps.F11.check(True)
    (numbers,) = found.numbers.values()
    best = numbers["log10 of best steps [alphas, seeds]"].mean(axis=1)
    assert (np.diff(best) <= 0).all()
    assert best[0] > best[-1]
    # The step that is best for the smallest alpha is far too long for the largest.
    losses = numbers["validation losses [alphas, steps, seeds]"].mean(axis=2)
    longest = losses[0].argmin()
    assert losses[-1, longest] > 1.3 * losses[-1].min()
    assert "steps" in found.figures
    assert "slope" in found.ours


@pytest.mark.slow
def test_recall_by_alpha(data_home):
    found = tags.F8.check(True)
    (numbers,) = found.numbers.values()
    compared = numbers["chosen by validation loss"]
    assert compared["flix"].shape == (len(QUICK.alphas) + 1, QUICK.seeds)
    assert set(compared["alpha"]) <= {0.2, 0.6}
    # Five tags of twelve drawn at random would have a recall of 0.42.
    for recalls in (compared["flix"], *compared["others"].values()):
        assert recalls.min() > 0.5
    within, wide = (
        compared["others"][name] for name in ("FOMAML", "FOMAML, larger inner steps")
    )
    assert within.shape == wide.shape == (QUICK.seeds,)
    assert "recall" in found.figures
    assert "stand-in" in found.why

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The sweeps behind Figures 1, 6 and 7: every grid times every seed, as replicas.

Everything is chosen for each seed by its own validation rows: those of another seed
may be this one's test rows. The tolerance of pure local models is one for all alphas,
as in the paper: that of FLIX's lowest validation loss at alphas inside (0, 1).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend import solvers
from fedblend.core import Algorithm, Loss
from fedblend.local import Work
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import simulate
from fedblend_reproductions.datasets import stackexchange
from fedblend_reproductions.flix.tag_tasks import Deal, TagTask, tag_task

PAPER_INNER = 10.0
"""The largest of the paper's inner step sizes; larger ones were added here."""


class Sizes(NamedTuple):
    """How much is run."""

    words: int
    tags: int
    workers: int
    """Of either user, in the first experiment."""
    users: int
    """In the second one, a worker each."""
    seeds: int
    rounds: int
    local_steps: int
    """Of a pure local model, at most."""
    tolerances: np.ndarray
    """On the gradient norms of pure local models."""
    alphas: np.ndarray
    """Without 0, which needs no sweep: it is the pure local models."""
    steps: np.ndarray
    """Step sizes of FLIX, and of the outer loops."""
    inner: np.ndarray
    """Step sizes of the inner loops, and of fine-tuning."""


FULL = Sizes(
    words=1000,
    tags=50,
    workers=10,
    users=25,
    seeds=5,
    rounds=500,
    local_steps=10_000,
    tolerances=10.0 ** -np.arange(3, 6),  # the paper's 1e-1 and 1e-2 hold at zero
    alphas=np.array([0.2, 0.4, 0.6, 0.8, 1.0]),
    steps=5 * 10.0 ** np.arange(-2, 7),
    inner=10.0 ** np.arange(-3, 5),
)
QUICK = FULL._replace(
    words=60,
    tags=12,
    workers=2,
    users=3,
    seeds=2,
    rounds=30,
    local_steps=100,
    tolerances=np.array([1e-2, 1e-3]),
    alphas=np.array([0.2, 0.6, 1.0]),
    steps=5 * 10.0 ** np.arange(1, 6),
    inner=10.0 ** np.arange(-2, 4),
)


class Scores(NamedTuple):
    """Means over workers, [*grid, seeds]; not finite where a run diverged."""

    loss: np.ndarray
    """On validation rows."""
    recall: np.ndarray
    """Recall@5 on validation rows."""
    tested: np.ndarray
    """Recall@5 on test rows."""

    def chosen(self, axes: int, by: str = "loss") -> "Scores":
        """At each seed's best validation loss, or recall, over the last grid axes."""
        ahead = self.loss.shape[: self.loss.ndim - 1 - axes]
        flat = Scores(*(part.reshape(*ahead, -1, part.shape[-1]) for part in self))
        best = lowest(flat.loss if by == "loss" else -flat.recall, axis=-2)
        return Scores(*(np.take_along_axis(p, best, axis=-2)[..., 0, :] for p in flat))


class FlixSweep(NamedTuple):
    """A task, its pure local models, and FLIX over alphas and steps."""

    task: TagTask
    sizes: Sizes
    local: Scores
    """[tolerances, seeds]."""
    norms: np.ndarray
    """The largest gradient norm of pure local models, [tolerances, seeds]."""
    tolerance: np.ndarray
    """Chosen for FLIX, [seeds]."""
    scores: Scores
    """With that tolerance, [alphas, steps, seeds]."""


def tag_tasks(sizes: Sizes) -> tuple[TagTask, TagTask]:
    """Two users' posts among many workers, and a user's posts at each worker."""

    def among_workers(posts: int) -> Deal:
        left = posts - 5 * sizes.workers
        return Deal(sizes.workers, training=5, validation=left // 3)

    def at_one(posts: int) -> Deal:
        training = min(posts // 2, 40)
        return Deal(1, training, validation=(posts - training) // 3)

    data = stackexchange(words=sizes.words, tags=sizes.tags)
    return (
        tag_task("two users", data, users=2, deal=among_workers, seeds=sizes.seeds),
        tag_task(
            "a user each", data, users=sizes.users, deal=at_one, seeds=sizes.seeds
        ),
    )


@functools.cache
def flix_sweeps(quick: bool) -> tuple[FlixSweep, ...]:
    """FLIX on both tasks, on the second alone if quick; run once in a process."""
    sizes = QUICK if quick else FULL
    tasks = tag_tasks(sizes)[1:] if quick else tag_tasks(sizes)
    return tuple(_flix_sweep(task, sizes) for task in tasks)


def _flix_sweep(task: TagTask, sizes: Sizes) -> FlixSweep:
    smooth: Any = jnp.asarray(task.smooth)

    def alone(loss: Loss, replica: dict[str, Any]) -> Algorithm:
        local = solvers.gradient_descent(
            loss,
            smooth[replica["seed"]],
            tolerance=replica["tolerance"],
            most=sizes.local_steps,
        )
        descent = functools.partial(_descent, 0.0)
        return fb.flix(loss, descent, alpha=0.0, local=local)

    run, local = sweep(task, alone, rounds=0, tolerance=sizes.tolerances)
    states = [run.client(worker) for worker in range(task.federated_data.clients)]
    models, norms, _ = jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *states)
    shape = local.loss.shape
    own = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), models)

    def mixed(loss: Loss, replica: dict[str, Any]) -> Algorithm:
        place = replica["place"], replica["seed"]
        given = solvers.given(jax.tree.map(lambda leaf: leaf[place], own))
        descent = functools.partial(_descent, replica["step"])
        return fb.flix(loss, descent, alpha=replica["alpha"], local=given)

    places = np.arange(len(sizes.tolerances))
    axes = {"place": places, "alpha": sizes.alphas, "step": sizes.steps}
    _, scores = sweep(task, mixed, rounds=sizes.rounds, **axes)
    inside = scores.loss[:, sizes.alphas < 1].reshape(len(places), -1, task.seeds)
    best = lowest(np.nan_to_num(inside, nan=np.inf).min(axis=1), axis=0)
    chosen = (np.take_along_axis(p, best[:, None, None], 0)[0] for p in scores)
    largest = np.asarray(norms).max(axis=1).reshape(shape)
    tolerance = sizes.tolerances[best[0]]
    return FlixSweep(task, sizes, local, largest, tolerance, Scores(*chosen))


def _descent(rate: Any, loss: Loss) -> Algorithm:
    """Distributed gradient descent."""
    return fb.fedavg(loss, Work(rate, steps=1, batch_size=None))


def fomaml(loss: Loss, replica: dict[str, Any]) -> Algorithm:
    """Five inner steps, as in the paper."""
    return fb.algorithms.fomaml(
        loss, Work(replica["inner"], steps=5, batch_size=None), replica["outer"]
    )


def reptile(loss: Loss, replica: dict[str, Any]) -> Algorithm:
    """Five inner steps, as in the paper."""
    return fb.algorithms.reptile(
        loss, Work(replica["inner"], steps=5, batch_size=None), replica["outer"]
    )


def tuned(loss: Loss, replica: dict[str, Any]) -> Algorithm:
    """A shared model by gradient descent, then five steps of every worker's own."""
    return fb.finetune(
        _descent(replica["outer"], loss),
        loss,
        Work(replica["inner"], steps=5, batch_size=None),
    )


def sweep(
    task: TagTask,
    build: Callable[[Loss, dict[str, Any]], Algorithm],
    *,
    rounds: int,
    **axes: np.ndarray,
) -> tuple[Run, Scores]:
    """Run an algorithm from zero for all combinations of these values and all seeds."""
    names = (*axes, "seed")
    grid = np.meshgrid(*axes.values(), np.arange(task.seeds), indexing="ij")
    over = {
        name: values.ravel().astype(
            np.int32 if values.dtype.kind == "i" else np.float32
        )
        for name, values in zip(names, grid, strict=True)
    }
    run = simulate(
        lambda replica: build(task.loss(replica["seed"]), replica),
        task.model.init,
        task.federated_data,
        jax.random.key(0),
        rounds=rounds,
        every=max(rounds, 1),
        weights="uniform",
        store="device",
        over=over,
    ).complete()
    values = _measured(task, run, over["seed"]).reshape(2, 2, *grid[0].shape)
    (loss, recall), (_, tested) = values
    return run, Scores(loss, recall, tested)


def _measured(task: TagTask, run: Run, seeds: np.ndarray) -> np.ndarray:
    """Means over workers, [validation and test, loss and recall, replicas]."""
    splits = [task.federated_data.splits[name] for name in ("validation", "test")]
    workers = range(task.federated_data.clients)
    total = np.zeros((2, 2, len(seeds)))
    for worker in workers:
        models = run.personal(worker)
        looks = [task.measured(models, seeds, s.shard(worker)) for s in splits]
        total += np.array(looks, float)
    return total / len(workers)


def lowest(values: np.ndarray, axis: int) -> np.ndarray:
    """The index of the lowest finite value, with the axis retained."""
    finite = np.where(np.isfinite(values), values, np.inf)
    return finite.argmin(axis=axis, keepdims=True)

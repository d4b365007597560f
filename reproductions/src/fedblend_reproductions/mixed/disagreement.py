# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M6: how far the two losses of each task disagree, as in Table 4 and Figure 4."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend import keys
from fedblend.batches import draw
from fedblend.losses import gradient
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.mixed import (
    characters,
    earlier_verdicts,
    faces,
    movies,
    text,
)
from fedblend_reproductions.mixed.dual_encoder import spreadout
from fedblend_reproductions.mixed.task import Method, Task, mixed_fl, simulated
from fedblend_reproductions.mixed.theory import disagreement
from fedblend_reproductions.plots import panels

PAPER = {
    "faces": {"gap": 49.04, "ratio": 1.26},
    "text": {"gap": 0.03, "ratio": 1.34},
    "movies": {"gap": 0.03, "ratio": 1.50},
}
FIRST = 10
"""Rounds before this one do not count."""
FACTORS = {"gap": 10.0, "ratio": 2.0}
"""A measured maximum is the paper's if it is within this factor. G^2 has the scale of
the inputs: the paper's faces have 84 x 84 pixels, 9 times ours, in a range it does not
tell.
"""
APART = 100.0
"""How many times G^2 of faces is that of either other task, at least; the paper has
1600 times."""
CRITERION = (
    f"on each of the three tasks G^2 within a factor of {FACTORS['gap']:g} of the "
    f"paper's and B^2 within {FACTORS['ratio']:g}, largest over rounds and runs, and "
    f"G^2 of faces at least {APART:g} times that of either other; partly if some"
)
SIZE = characters.PAPER._replace(network=(256, 512))
"""Text with the paper's sizes of a round, and half its width, which one step allows."""
STRENGTH = 0.03
"""The spreadout's lambda that M5 chose with plain steps at the paper's sizes."""
WORDS = {"gap": "G^2", "ratio": "B^2"}

Gradients = Callable[[Any, Any, Any], tuple[Any, Any]]


class Case(NamedTuple):
    """A task with one step a round, one_way on it, and its setting.

    ``gradients`` are sampled gradients of both losses at (params, setting, key).
    """

    task: Task
    method: Method
    setting: Any
    gradients: Gradients
    options: dict[str, Any]


def on_rows(this: Task, rate: float, central_batch: int | None = None) -> Case:
    """Of a task with rows on both sides: as many as a cohort sees in a step."""
    single = this._replace(steps=1)
    rows = this.cohort * this.batch_size
    sides = [
        fb.shard_of(part) for part in (this.federated_data.train.examples, this.held)
    ]
    gradient_at = gradient(this.loss)

    def gradients(params, setting, key):
        federated, central = (
            gradient_at(params, draw(side, keys.named(key, name), rows))
            for side, name in zip(sides, ("federated", "central"), strict=True)
        )
        return federated, central

    method = mixed_fl(single, "one_way", central_batch=central_batch)
    return Case(single, method, rate, gradients, {})


def on_movies(this: Task, strength: float) -> Case:
    """Clients weigh alike, and the server's loss needs no rows."""
    single = this._replace(steps=1)
    train = this.federated_data.train
    rows = this.cohort * this.batch_size
    gradient_at = gradient(this.loss)
    starts, counts = jnp.asarray(train.starts), jnp.asarray(train.counts)

    def gradients(params, setting, key):
        who = jax.random.randint(keys.named(key, "who"), (rows,), 0, len(counts))
        part = jax.random.uniform(keys.named(key, "rows"), (rows,))
        row = starts[who] + jnp.floor(part * counts[who]).astype(starts.dtype)
        batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[row], train.examples)
        pushed = jax.grad(spreadout)(params, setting[1])
        return gradient_at(params, fb.Batch(batch)), pushed

    method = movies.mixed_fl(single, "one_way", adaptive=False)
    setting = (movies.RATE, strength)
    return Case(single, method, setting, gradients, {"weights": "uniform"})


def cases(quick: bool, names: Sequence[str]) -> dict[str, Case]:
    """The paper's three tasks."""

    def of_text() -> Case:
        size = text.QUICK if quick else SIZE
        return on_rows(text.task(size), size.rates[0])

    makers = {
        "faces": lambda: on_rows(faces.task(quick), faces.RATE),
        "text": of_text,
        "movies": lambda: on_movies(movies.task(quick), STRENGTH),
    }
    return {name: makers[name]() for name in names}


def traces(case: Case, seeds: int, rounds: int) -> dict[str, np.ndarray]:
    """G^2 and B^2 ``[seeds, rounds + 1]`` at the models of one_way with one step."""

    def at(params, key):
        gradients = case.gradients(params, case.setting, key)
        return disagreement(*gradients, case.task.weights)

    run = simulated(
        case.task,
        case.method,
        [case.setting] * seeds,
        range(seeds),
        rounds=rounds,
        every=1,
        **case.options,
    )
    measured = jax.vmap(at)
    roots = jax.vmap(jax.random.key)(np.arange(seeds))
    points = []
    for number, _ in enumerate(run):
        own = jax.vmap(lambda root, number=number: jax.random.fold_in(root, number))
        points.append(measured(run.down.shared, own(roots)))
    return {
        name: np.stack([np.asarray(getattr(point, name)) for point in points], axis=1)
        for name in WORDS
    }


def found(
    folder: Path, quick: bool, names: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Traces of these tasks, from the folder where it has them."""
    seeds, rounds = (2, 12) if quick else (5, 100)
    settings = {"seeds": seeds, "rounds": rounds, "strength": STRENGTH}
    cache = Cache(folder, {**settings, "text": SIZE._asdict(), "quick": quick})

    def one(name: str) -> dict[str, np.ndarray]:
        known = cache(name, lambda: traces(cases(quick, [name])[name], seeds, rounds))
        return {which: np.array(values, float) for which, values in known.items()}

    return {name: one(name) for name in names}


def check(quick: bool, folder: Path) -> Finding:
    """The largest values over rounds and seeds, task by task."""
    names = ("faces", "text") if quick else tuple(PAPER)
    ran = found(folder, quick, names)
    most, mean = (
        {
            name: {which: float(pick(of[which][:, FIRST:])) for which in WORDS}
            for name, of in ran.items()
        }
        for pick in (np.max, np.mean)
    )
    holds = {
        f"{name}: {WORDS[which]} is the paper's": bool(
            1 / factor < most[name][which] / PAPER[name][which] < factor
        )
        for name in names
        for which, factor in FACTORS.items()
    }
    others = [most[name]["gap"] for name in names if name != "faces"]
    holds["G^2 of faces is by far the largest"] = bool(
        most["faces"]["gap"] >= APART * max(others)
    )
    apart = {name: float((of["ratio"] > 2).mean()) for name, of in ran.items()}
    verdict = Verdict.partly if any(holds.values()) else Verdict.differs
    rounds = ran["faces"]["gap"].shape[1] - 1
    return Finding(
        verdict=Verdict.reproduced if all(holds.values()) else verdict,
        ours=f"Largest in rounds {FIRST} to {rounds} of {len(ran['faces']['gap'])} "
        "runs: "
        + "; ".join(
            f"{name} G^2 {of['gap']:.3g} (mean {mean[name]['gap']:.3g}), B^2 "
            f"{of['ratio']:.3g} (mean {mean[name]['ratio']:.3g})"
            for name, of in most.items()
        )
        + ".",
        numbers={
            "traces": ran,
            "most": most,
            "mean": mean,
            "holds": holds,
            "apart": apart,
        },
        figures={"traces": _figure(ran)},
        why=f"Criterion: {CRITERION}: "
        + "; ".join(f"{name}: {'yes' if so else 'no'}" for name, so in holds.items())
        + ". The protocol is the paper's: one step a round, sampled gradients, the "
        "largest over rounds and runs. G^2 has the scale of the inputs: the paper's "
        "faces have 84 x 84 pixels, 9 times ours, in a range that it does not say. "
        "B^2 has no scale; it is large where the two gradients oppose each other, and "
        "on faces one side pushes all scores up and the other all down. The paper's "
        "1.26 as the largest value would need gradients that are nearly the same; why "
        "they should be is not known. G^2 of movies has lambda's scale, which the "
        f"paper does not say; here it is {STRENGTH:g}, M5's. Rates are the paper's. "
        f"{faces.DATA} {text.described(text.task(SIZE), SIZE)} {movies.DATA}"
        if not quick
        else CRITERION,
        before={} if quick else earlier_verdicts.M6,
    )


def _figure(ran: dict[str, dict[str, np.ndarray]]) -> Any:
    with panels(len(WORDS), len(ran), width=3.6) as (figure, axes):
        for column, (name, of) in enumerate(ran.items()):
            axes[0, column].set_title(name)
            for row, (which, word) in enumerate(WORDS.items()):
                here, those = axes[row, column], of[which]
                here.plot(those.max(axis=0), color="C0", label="largest of all runs")
                here.plot(those.mean(axis=0), color="C1", label="mean")
                here.axhline(
                    PAPER[name][which],
                    color="0.4",
                    linestyle=":",
                    label="the paper's largest",
                )
                here.axvline(FIRST, color="0.8", linewidth=1)
                here.set_yscale("log")
                axes[row, 0].set_ylabel(f"sampled {word}")
            axes[-1, column].set_xlabel("rounds, one step each")
        axes[0, 0].legend()
    return figure


def headline(numbers: Numbers) -> str:
    """The largest values on faces, the task on which the losses disagree most."""
    most = numbers["most"]["faces"]
    return f"On faces G^2 is {most['gap']:.1f} and B^2 {most['ratio']:.1f} at most"


M6 = Claim(
    "M6",
    "Disagreement of the two losses",
    "One step a round, largest over rounds 10 to 100 and 5 runs: G^2 49.04, 0.03 and "
    "0.03, B^2 1.26, 1.34 and 1.50 for smiling faces, text and movies (Table 4), so "
    "that parallel training is at a disadvantage on faces and competitive on text.",
    check,
    headline,
    "49.0 and 1.3",
    resumable=True,
)

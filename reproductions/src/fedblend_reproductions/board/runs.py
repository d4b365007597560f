# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring a row: first a run of every rate, then the seeds of the rates chosen.

Some runs are replicas of one simulation: the rates of the tuning seed, or the seeds of
one rate. With as many seeds as rates all simulations of a row are the same program,
which JAX's cache compiles once. A simulation that is stopped, by its budget or by a
signal, leaves a checkpoint that is at most ``SAVE_SECONDS`` old, and goes on from
there, bit for bit; a short one starts again.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.data.federated import FederatedData
from fedblend.local import Epochs, Work
from fedblend.simulation import checkpoint
from fedblend.simulation.run import Run
from fedblend_reproductions.board import cells, protocol
from fedblend_reproductions.board.cells import TUNING_SEED, Cell, Place
from fedblend_reproductions.board.methods import Method
from fedblend_reproductions.board.tasks import Task

SAVE_SECONDS = 120.0
"""Seconds of training after which a checkpoint is saved."""
HALVES = ("validation", "test")


class OutOfTime(Exception):
    """The budget is spent; the simulation has saved where it is."""


class Plan(NamedTuple):
    """How rows are measured.

    Attributes:
        folder: of the cells.
        rounds: of the reported runs; None for those of the published table.
        seeds: that are reported.
        theirs: whether to run the published rate too where another one is chosen.
        patience: rounds without a better one after which a run stops; 0 for never.
        deadline: on the clock of ``time.monotonic``; beyond it, stop.
        save_seconds: see ``SAVE_SECONDS``.
    """

    folder: Path
    rounds: int | None
    seeds: Sequence[int]
    theirs: bool = True
    patience: int = 0
    deadline: float = float("inf")
    save_seconds: float = SAVE_SECONDS


def measure_row(task: Task, method: Method, data: FederatedData, plan: Plan) -> None:
    """Measure all cells of a row that are not finished.

    Raises:
        OutOfTime: at the deadline.
        DataError: a finished cell has other settings.
    """
    rounds, early = plan.rounds or task.rounds, plan.patience
    short = task.tuning_rounds(rounds)
    trials = [
        Place(task, method, short, rate, TUNING_SEED, early) for rate in task.rates
    ]
    tuning = measure(trials, data, plan)
    found = {
        place.rate: cell["chosen"] for place, cell in zip(trials, tuning, strict=True)
    }
    wanted = set(protocol.chosen_rates(found).values())
    if plan.theirs:
        wanted.add(task.rates[0])
    for rate in sorted(wanted):
        places = [Place(task, method, rounds, rate, seed, early) for seed in plan.seeds]
        measure(places, data, plan)


def measure(places: Sequence[Place], data: FederatedData, plan: Plan) -> list[Cell]:
    """The cells of some places, which differ in rate and seed alone.

    Those that are not stored are measured as replicas of one simulation.
    """
    folder = plan.folder
    left = [place for place in places if cells.finished(folder, place) is None]
    if left:
        simulate(left, data, plan)
    return [cells.read(place.path(folder)) for place in places]


def set_up(places: Sequence[Place], data: FederatedData) -> Run:
    """The simulation whose replicas are these places."""
    task, method, rounds, *_ = places[0]
    model = method.form(task.model, data.train.examples[0].shape[1:])
    loss = fb.losses.cross_entropy(model.apply)

    def build(rate):
        return method.algorithm(loss, Work(rate, Epochs(1), task.batch_size), model)

    return fb.simulate(
        build,
        model.init,
        data,
        jnp.stack([jax.random.key(place.seed) for place in places]),
        rounds=rounds,
        every=task.every(rounds),
        over=np.array([place.rate for place in places], np.float32),
        measure={"accuracy": fb.metrics.accuracy(model.apply)},
        splits=HALVES,
        chunk=task.chunk,
    )


def right_rows(run: Run, counts: np.ndarray) -> np.ndarray:
    """The right rows of all replicas as they are now, [replicas, 2 halves, clients].

    A model that is not finite has none.
    """
    measured = [
        [replica[half]["personal"]["accuracy"] for half in HALVES]
        for replica in run.measured
    ]
    return np.rint(np.nan_to_num(np.asarray(measured)) * counts).astype(int)


def simulate(places: Sequence[Place], data: FederatedData, plan: Plan) -> None:
    """Run the simulation of some places, from its checkpoint if any; write the cells.

    Raises:
        OutOfTime: at the deadline, after saving a checkpoint.
    """
    if time.monotonic() > plan.deadline:
        raise OutOfTime
    run, rounds, patience = set_up(places, data), places[0].rounds, places[0].patience
    counts = np.stack([data.splits[half].counts for half in HALVES])
    name = cells.digest([place.settings for place in places])
    saved = places[0].path(plan.folder).with_name(f"{name}.checkpoint")
    history, seconds = [], 0.0
    if saved.exists():
        checkpoint.restore(saved, run)
        about = checkpoint.read_about(saved)
        history = [np.asarray(look) for look in json.loads(about["history"])]
        seconds = float(about["seconds"])
    last = time.monotonic()
    ends: list[int | None] = [None] * len(places)
    for record in run:
        if record[0].round:
            history.append(right_rows(run, counts))
            seconds += record[0].seconds
        looks = [one[0].round for one in run.records if one[0].round]
        if patience and history:
            ends = [
                protocol.stops_at(curve, looks, patience)
                for curve in np.stack(history, axis=1)
            ]
            if all(ends):
                break
        now = time.monotonic()
        late = now > plan.deadline
        if run.round < rounds and (late or now - last > plan.save_seconds):
            curves = json.dumps([look.tolist() for look in history])
            saved.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.save(saved, run, {"history": curves, "seconds": str(seconds)})
            last = time.monotonic()
            if late:
                raise OutOfTime
    looks = [record[0].round for record in run.records if record[0].round]
    # What a replica did while it waited for others is not reported.
    for place, correct, end in zip(
        places, np.stack(history, axis=1), ends, strict=True
    ):
        cell = cells.make(
            place,
            looks[:end],
            correct[:end],
            counts,
            seconds=seconds / len(places),
            compile_seconds=run.compile_seconds / len(places),
        )
        cells.write(place.path(plan.folder), cell)
    saved.unlink(missing_ok=True)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLamby's heart benchmark: its published rows again, and what its scaling costs.

Writes the section of the cross-silo board (``fedblend board silos``):

    python flamby_heart.py --out docs/results --minutes 3

A literal float64 transcription of what FLamby's configuration says, apart from the
library: logistic regression on 13 inputs, which are standardized **per hospital**, in
batches of 4. The federated methods have 15 rounds of 100 steps; training alone and on
pooled rows has 50 epochs of Adam. Random numbers are ours. Two rows are what FLamby's
program does, and not what their names say:

- *Cyclic* is the model of the first hospital, trained in its own turns alone: clients
  have copies of the model, and no copy is handed on.
- *pooled* is trained on rows scaled by all hospitals together, and tested on rows that
  are scaled per hospital.

``converge`` leaves training out: scikit-learn's logistic regression at its optimum.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from fedblend.cli.data import HEART
from fedblend.data.dataset import generator, task_of
from fedblend.data.federated import federate as federate_rows
from fedblend.data.federated import fit_preprocessing
from fedblend.data.partition import by_key, plain_arrays
from fedblend.data.readers.read import read
from fedblend.runs.auto.candidates import BY_NAME
from fedblend.runs.auto.tuning import Split, measure, predict
from fedblend_reproductions.claims import plain
from fedblend_reproductions.silos import command, comparison
from fedblend_reproductions.silos.tables import TABLES

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
CODES = {"cp": (2, 3, 4), "restecg": (1, 2)}
"""Categories of an input; the first one is left out."""
SEEDS = range(42, 47)
ROUNDS, STEPS, BATCH, EPOCHS = 15, 100, 4, 50
ADAM = (0.9, 0.999, 1e-8)
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Of ``converge``: lambda / 2 times the squared norm, next to the sum of the losses."""
PUBLISHED = {
    "alone": ((0.7462, 0.7596, 0.725, 0.7022), (0.0161, 0.0062, 0.1218, 0.0512)),
    "pooled": ((0.7827, 0.764, 0.75, 0.6444), (0.011, 0.0, 0.0, 0.0)),
    "FedAvg": ((0.7308, 0.7191, 0.65, 0.64), (0.0215, 0.0328, 0.1135, 0.0507)),
    "FedProx": ((0.7308, 0.7191, 0.65, 0.64), (0.0215, 0.0328, 0.1135, 0.0507)),
    "Scaffold": ((0.7269, 0.7191, 0.65, 0.64), (0.0187, 0.0328, 0.1135, 0.0507)),
    "Cyclic": ((0.7577, 0.7618, 0.7125, 0.64), (0.0143, 0.0146, 0.0948, 0.0186)),
    "FedAdam": ((0.7519, 0.7461, 0.7375, 0.6667), (0.0172, 0.0188, 0.028, 0.0444)),
}
"""Accuracies at ``HOSPITALS``, and their deviations over five seeds."""
FINE_TUNED = (0.747849, 0.724313, 0.73165, 0.7368, 0.734739)
"""Means over hospitals of its fine-tuned FedAvg, by seed."""


class Rows(NamedTuple):
    """Inputs [rows, inputs], and whether a patient is ill."""

    inputs: np.ndarray
    ill: np.ndarray


Halves = tuple[Rows, Rows]
"""The training rows and the test rows of a hospital."""
Feed = Iterator[Rows]


def read_split() -> tuple[list[dict[str, str]], np.ndarray]:
    """The rows of the table that is shipped, and which of them FLamby tests on.

    Only patients for whom the inputs are known count; its split is stratified.
    """
    from sklearn.model_selection import train_test_split

    with HEART.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if all(row[name] for name in (*NUMBERS, *CODES))
        ]
    test = np.zeros(len(rows), bool)
    for hospital in HOSPITALS:
        own = [place for place, row in enumerate(rows) if row["center"] == hospital]
        ill = np.array([rows[place]["disease"] == "yes" for place in own])
        enough = min(ill.sum(), (~ill).sum()) > 2
        _, held = train_test_split(
            own,
            train_size=0.66,
            test_size=1 - 0.66,
            random_state=43,
            stratify=ill if enough else None,
        )
        test[held] = True
    return rows, test


def read_hospitals() -> list[Halves]:
    """The 13 unscaled inputs of every hospital."""
    rows, test = read_split()
    inputs = np.array([[float(row[name]) for name in NUMBERS] for row in rows])
    codes = [
        [float(row[name]) == code for name, known in CODES.items() for code in known]
        for row in rows
    ]
    every = Rows(
        np.hstack([inputs, codes]), np.array([row["disease"] == "yes" for row in rows])
    )
    center = np.array([row["center"] for row in rows])

    def take(which: np.ndarray) -> Rows:
        return Rows(every.inputs[which], every.ill[which])

    return [
        (take((center == name) & ~test), take((center == name) & test))
        for name in HOSPITALS
    ]


def join(parts: Sequence[Rows]) -> Rows:
    """The rows of several hospitals."""
    return Rows(*map(np.concatenate, zip(*parts, strict=True)))


def scale(rows: Rows, like: Rows) -> Rows:
    """Rows with the scale at which others have mean 0 and deviation 1; ones first."""
    spread = like.inputs.std(axis=0, ddof=1) + 1e-9
    inputs = (rows.inputs - like.inputs.mean(axis=0)) / spread
    return Rows(np.hstack([np.ones((len(inputs), 1)), inputs]), rows.ill)


def scale_per_hospital(hospitals: Sequence[Halves]) -> list[Halves]:
    """FLamby's scaling, which removes what hospitals differ by in the mean."""
    return [(scale(train, train), scale(test, train)) for train, test in hospitals]


def scale_together(hospitals: Sequence[Halves]) -> list[Halves]:
    """One scale for all."""
    every = join([train for train, _ in hospitals])
    return [(scale(train, every), scale(test, every)) for train, test in hospitals]


def batches(rows: Rows, draws: np.random.Generator) -> Feed:
    """Batches of one epoch after the other, each in a new order."""
    while True:
        order = draws.permutation(len(rows.ill))
        for part in np.split(order, range(BATCH, len(order), BATCH)):
            yield Rows(rows.inputs[part], rows.ill[part])


def slope(model: np.ndarray, rows: Rows) -> np.ndarray:
    """The gradient of the mean log loss."""
    return rows.inputs.T @ (expit(rows.inputs @ model) - rows.ill) / len(rows.ill)


def descend(
    model: np.ndarray,
    feed: Feed,
    steps: int,
    rate: float,
    prox: float = 0.0,
    correction: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Plain SGD; ``prox`` pulls to the first model, ``correction`` is subtracted."""
    first = model
    for rows in islice(feed, steps):
        gradient = slope(model, rows) + prox * (model - first) - correction
        model = model - rate * gradient
    return model


def descend_adam(model: np.ndarray, feed: Feed, steps: int) -> np.ndarray:
    """Adam at the rate 0.001."""
    (fast, slow, tiny), first, second = ADAM, 0.0, 0.0
    for step, rows in enumerate(islice(feed, steps), 1):
        gradient = slope(model, rows)
        first = fast * first + (1 - fast) * gradient
        second = slow * second + (1 - slow) * gradient**2
        root = np.sqrt(second / (1 - slow**step)) + tiny
        model = model - 0.001 * first / (1 - fast**step) / root
    return model


def federate(
    start: np.ndarray,
    feeds: Sequence[Feed],
    weights: np.ndarray,
    rate: float,
    *,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    prox: float = 0.0,
    correct: bool = False,
    adaptive: bool = False,
) -> np.ndarray:
    """FedAvg, and what is added to it.

    Args:
        start: the first model.
        feeds: batches of each hospital.
        weights: its part of all rows.
        rate: of the local steps.
        rounds: of communication.
        steps: in a round.
        prox: FedProx's mu.
        correct: SCAFFOLD's control variates, as FLamby derives them from the models.
        adaptive: the server takes steps of Adam, without its correction of the bias.
    """
    here, (fast, slow, tiny) = start, ADAM
    corrections, ends = (
        np.zeros((len(feeds), len(start))),
        np.array([start] * len(feeds)),
    )
    first, second = np.zeros_like(start), np.zeros_like(start)
    for _ in range(rounds):
        if correct:
            corrections = corrections + (here - ends) / (rate * steps)

        pairs = zip(feeds, corrections, strict=True)
        ends = np.array(
            [descend(here, feed, steps, rate, prox, change) for feed, change in pairs]
        )
        move = weights @ (ends - here)
        if adaptive:
            first = fast * first + (1 - fast) * move
            second = slow * second + (1 - slow) * move**2
            move = 0.01 * first / (np.sqrt(second) + tiny)
        here = here + move
    return here


def accuracies(
    models: Sequence[np.ndarray], hospitals: Sequence[Halves]
) -> list[float]:
    """Of each hospital's model on its test rows."""
    return [
        float(np.mean((test.inputs @ model > 0) == test.ill))
        for model, (_, test) in zip(models, hospitals, strict=True)
    ]


def train_all(hospitals: Sequence[Halves], seed: int) -> dict[str, list[float]]:
    """The accuracies at all hospitals by each method, by FLamby's settings."""
    own = scale_per_hospital(hospitals)
    counts = np.array([len(train.ill) for train, _ in own])
    width = own[0][0].inputs.shape[1]
    bound = 1 / np.sqrt(width - 1)
    start = generator(seed, "first model").uniform(-bound, bound, width)

    def feeds(purpose: str) -> list[Feed]:
        return [
            batches(train, generator(seed, f"{purpose} {name}"))
            for name, (train, _) in zip(HOSPITALS, own, strict=True)
        ]

    def epochs(rows: Rows) -> int:
        return EPOCHS * -(-len(rows.ill) // BATCH)

    def together(purpose: str, rate: float = 0.001, **options: Any) -> np.ndarray:
        return federate(start, feeds(purpose), counts / counts.sum(), rate, **options)

    every = join([train for train, _ in hospitals])
    pooled = scale(every, every)
    tuned_feeds = feeds("fine-tuned")
    shared = federate(start, tuned_feeds, counts / counts.sum(), 0.00316227)
    order = generator(seed, "Cyclic").permuted(np.tile(range(4), (4, 1)), axis=1)
    turns = int((order.ravel()[:ROUNDS] == 0).sum())
    models = {
        "alone": [
            descend_adam(start, feed, epochs(train))
            for feed, (train, _) in zip(feeds("alone"), own, strict=True)
        ],
        "pooled": [
            descend_adam(
                start, batches(pooled, generator(seed, "pooled")), epochs(pooled)
            )
        ],
        "FedAvg": [together("FedAvg")],
        "FedProx": [together("FedAvg", prox=0.01)],
        "Scaffold": [together("FedAvg", correct=True)],
        "Cyclic": [descend(start, feeds("Cyclic")[0], turns * STEPS, 0.01)],
        "FedAdam": [together("FedAdam", rate=0.01, adaptive=True)],
        "fine-tuned": [
            descend(shared, feed, STEPS, 0.00316227) for feed in tuned_feeds
        ],
    }
    return {
        name: accuracies(found * (4 // len(found)), own)
        for name, found in models.items()
    }


def reproduce() -> dict[str, dict[str, Any]]:
    """The published rows next to ours, means over hospitals and five seeds.

    A row is reproduced if the means differ by no more than a deviation over seeds, the
    larger one of the published mean and of ours. Hospitals' published deviations are
    joined as of independent numbers.
    """
    hospitals, found = read_hospitals(), {}
    runs = [train_all(hospitals, seed) for seed in SEEDS]
    for name in runs[0]:
        each = np.array([run[name] for run in runs])
        if name in PUBLISHED:
            center, spread = np.array(PUBLISHED[name])
            published, theirs = center.mean(), np.sqrt((spread**2).sum()) / len(spread)
        else:
            published, theirs = np.mean(FINE_TUNED), np.std(FINE_TUNED, ddof=1)
        means = each.mean(axis=1)
        mean, deviation = means.mean(), means.std(ddof=1)
        found[name] = {
            "published": float(published),
            "published_deviation": float(theirs),
            "ours": float(mean),
            "deviation": float(deviation),
            "by_hospital": each.mean(axis=0).tolist(),
            "reproduced": bool(abs(mean - published) <= max(theirs, deviation)),
        }
    return found


def majority(hospitals: Sequence[Halves]) -> list[float]:
    """The accuracy of each hospital's more frequent class."""
    return [
        float(np.mean(test.ill == (train.ill.mean() > 0.5)))
        for train, test in hospitals
    ]


def converge() -> dict[str, dict[str, list[float]]]:
    """Accuracy and log loss of models at their optimum, mean of the hospitals.

    Each has a value for each of ``PENALTIES``; none is chosen.
    """
    hospitals = read_hospitals()
    own, common = scale_per_hospital(hospitals), scale_together(hospitals)
    levels = [_mark(halves, place, 1) for place, halves in enumerate(common)]
    width = common[0][0].inputs.shape[1]
    slopes = [_mark(halves, place, width) for place, halves in enumerate(common)]
    return {
        "one model, scaled per hospital": _optima(own),
        "alone": _optima(common, alone=True),
        "one model, one scale": _optima(common),
        "own intercepts, one scale": _optima(levels),
        "own intercepts and slopes, one scale": _optima(slopes),
    }


def _mark(halves: Halves, place: int, width: int) -> Halves:
    """Rows with the first inputs once more, in columns of the hospital's own."""

    def wide(rows: Rows) -> Rows:
        more = np.zeros((len(rows.ill), len(HOSPITALS), width))
        more[:, place] = rows.inputs[:, :width]
        return Rows(np.hstack([rows.inputs, more.reshape(len(more), -1)]), rows.ill)

    return wide(halves[0]), wide(halves[1])


def _optima(hospitals: Sequence[Halves], alone: bool = False) -> dict[str, list[float]]:
    every = join([train for train, _ in hospitals])
    found: dict[str, list[float]] = {"accuracy": [], "log_loss": []}
    for penalty in PENALTIES:
        models = [fit(train if alone else every, penalty) for train, _ in hospitals]
        found["accuracy"].append(float(np.mean(accuracies(models, hospitals))))
        losses = [
            np.logaddexp(0, np.where(test.ill, -1, 1) * (test.inputs @ model)).mean()
            for model, (_, test) in zip(models, hospitals, strict=True)
        ]
        found["log_loss"].append(float(np.mean(losses)))
    return found


def fit(rows: Rows, penalty: float) -> np.ndarray:
    """Logistic regression by scikit-learn; the first entry is not penalized.

    All patients for training are ill at one hospital: its model is that constant, by
    its frequency with one patient more of each kind.
    """
    from sklearn.linear_model import LogisticRegression

    ill, well = rows.ill.sum(), (~rows.ill).sum()
    if not ill or not well:
        constant = np.log((ill + 1) / (well + 1))
        return constant * np.eye(rows.inputs.shape[1])[0]
    model = LogisticRegression(C=1 / penalty, max_iter=10_000, tol=1e-8)
    model.fit(rows.inputs[:, 1:], rows.ill)
    return np.concatenate([model.intercept_, model.coef_[0]])


KNOWN = TABLES["heart"]._replace(drop=("slope", "ca", "thal"))
"""The table with FLamby's inputs."""


def score_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Accuracy and log loss of fedblend's linear methods on FLamby's test rows.

    Inputs are prepared as by ``fedblend auto``, on one scale for all hospitals.

    Args:
        settings: of each method.
    """
    rows, test = read_split()
    frame = {name: np.array([row[name] for row in rows], object) for name in rows[0]}
    for name in (*NUMBERS, *CODES):
        frame[name] = frame[name].astype(float)
    dataset = read(frame, target=KNOWN.target, client=KNOWN.client, drop=KNOWN.drop)
    assert dataset.schema is not None
    arrays, parts = plain_arrays(dataset.rows), by_key(dataset.keys)
    data = federate_rows(
        arrays,
        [part[~test[part]] for part in parts],
        test_rows=arrays,
        test_partition=[part[test[part]] for part in parts],
        names=parts.names,
    )
    data = data.preprocess(fit_preprocessing(dataset.schema, data))
    task = task_of(dataset)
    split, found = Split.read(data, "test", task), {}
    for name, setting in settings.items():
        if BY_NAME[name].model == "linear":
            one = measure(task, [split], predict(task, name, [split], setting))
            found[name] = {
                "accuracy": float(one["accuracy"].mean()),
                "log_loss": float(one["log_loss"].mean()),
                "by_hospital": one["accuracy"][0],
            }
    return found


def write_training_rows(place: Path) -> None:
    """The training rows as a CSV file."""
    rows, test = read_split()
    with place.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row for row, held in zip(rows, test, strict=True) if not held)


def main() -> None:
    """Compare, train and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "reproduced": reproduce(),
        "majority": majority(read_hospitals()),
        "converged": converge(),
    }
    if asked.out is None:
        print(found)
        return
    with TemporaryDirectory() as folder:
        place = Path(folder) / "training.csv"
        write_training_rows(place)
        entry = comparison.compare(KNOWN, place, asked.minutes, print)
    settings = {name: of["setting"] for name, of in entry["methods"].items()}
    found["ours"] = score_settings(settings)
    command.store(asked.out, "flamby_heart", {**entry, **plain(found)})


if __name__ == "__main__":
    main()

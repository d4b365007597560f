# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to choose alpha for every client, compared by what they gain and whom they harm.

``collect`` trains APFL at all alphas, training alone, and the ways that learn alpha, on
one federation, and saves what every row of every client contributed: rows held out in K
folds, and test rows of the models trained on all rows. ``decide`` makes every choice
from these files in seconds and writes the table of docs/results/choose.md.

    python benchmarks/nobody_harmed.py collect out --sets digits mnist2 --seeds 0 1 2
    python benchmarks/nobody_harmed.py decide out --seeds 0 1 2

Needs jax, optax and scikit-learn; MNIST and FEMNIST where FEDBLEND_DATA says.

The federations (test rows are in no client's training rows):

digits      20 clients, 3 classes and 20 to 60 rows each, up to 300 test rows
mnist2      30 clients, 2 classes, 20 to 200 rows, 2000 test rows, at 14 x 14
mnist4      the same with 4 classes
dirichlet   30 clients, Dirichlet(0.1), 20 to 470 rows, 2000 test rows, at 14 x 14
femnist     40 writers of LEAF, half of each writer's rows are test rows, at 14 x 14
synthetic   30 clients of synthetic(1, 1), 20 to 200 rows, 1000 test rows
cancer      breast_cancer; 8 sites, which the data do not name: clusters of its rows by
            k-means on three of its measurements; half of the rows are test rows
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.stats import binom

import fedblend as fb
from fedblend.data.folds import folds
from fedblend.simulation import shrinkage
from fedblend.simulation.choose import GUARD
from fedblend.simulation.simulate import RunSpec, set_up
from fedblend.simulation.train_alone import of_best_length, prolonged, trying

GRID = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The alphas that are tried."""


def shared_out(labels, weights, counts, tests, rng):
    """Rows of each client, drawn by its weights of classes, and others to test on."""
    free = {c: list(rng.permutation(np.flatnonzero(labels == c))) for c in range(10)}

    def drawn(weight, count, taken):
        many = rng.multinomial(count, weight)
        rows = []
        for label, number in enumerate(many):
            number = min(number, len(free[label]))
            if taken:
                rows += [free[label].pop() for _ in range(number)]
            else:
                rows += list(rng.choice(free[label], number, replace=False))
        return np.array(rows, np.int64)

    train = [drawn(w, n, True) for w, n in zip(weights, counts, strict=True)]
    test = [drawn(w, tests, False) for w in weights]
    return train, test


def some_classes(clients, classes, rng):
    """Equal weights of a few classes for every client, each class as often."""
    weights = np.zeros((clients, 10))
    deck = []
    for row in weights:
        while len(deck) < classes:
            deck += list(rng.permutation(10))
        mine = list(dict.fromkeys(deck))[:classes]
        for label in mine:
            deck.remove(label)
        row[mine] = 1 / classes
    return weights


def sizes(clients, least, most, rng):
    """Numbers of rows, of uniform logarithm; the largest is the same for all seeds."""
    drawn = np.exp(rng.uniform(np.log(least), np.log(most), clients)).astype(int)
    drawn[0] = most
    return drawn


def pooled(images):
    """Half as many pixels in either direction."""
    rows, height, width, _ = images.shape
    blocks = images.reshape(rows, height // 2, 2, width // 2, 2)
    return blocks.mean(axis=(2, 4), dtype=np.float32)[..., None]


def of_rows(rows, train, test):
    return fb.federate(rows, train, test_rows=rows, test_partition=test)


def all_rows(data):
    """The rows of a dataset, with those that it has for tests."""
    assert data.test_rows is not None
    both = zip(data.rows, data.test_rows, strict=True)
    return [np.concatenate(pair) for pair in both]


def mnist(weights, counts, rng):
    data = fb.datasets.load("mnist")
    images, labels = all_rows(data)
    some = rng.permutation(len(labels))[:30000]
    rows = pooled(images[some]), labels[some]
    train, test = shared_out(rows[1], weights, counts, 2000, rng)
    return of_rows(rows, train, test), 10


def digits(rng):
    rows = fb.datasets.load("digits").rows
    weights = some_classes(20, 3, rng)
    train, test = shared_out(rows[1], weights, sizes(20, 20, 60, rng), 300, rng)
    return of_rows(rows, train, test), 10


def mnist2(rng):
    return mnist(some_classes(30, 2, rng), sizes(30, 20, 200, rng), rng)


def mnist4(rng):
    return mnist(some_classes(30, 4, rng), sizes(30, 20, 200, rng), rng)


def dirichlet(rng):
    weights = rng.dirichlet(np.full(10, 0.1), 30)
    return mnist(weights, sizes(30, 20, 470, rng), rng)


def femnist(rng):
    data = fb.datasets.load("femnist")
    images, labels = all_rows(data)
    assert data.keys is not None and data.test_keys is not None
    keys = np.concatenate([data.keys, data.test_keys])
    parts = []
    for writer in rng.choice(np.unique(keys), 40, replace=False):
        order = rng.permutation(np.flatnonzero(keys == writer))
        parts.append(np.split(order, [len(order) // 2]))
    used = np.unique(np.concatenate([row for pair in parts for row in pair]))
    rows = 1 - pooled(images[used]), labels[used]  # ink on paper that is 0
    train, test = ([np.searchsorted(used, p[k]) for p in parts] for k in (0, 1))
    return of_rows(rows, train, test), 62


def synthetic(rng):
    clients, tests = 30, 1000
    data = fb.datasets.synthetic(
        1, 1, clients, least=1200, most=1200, seed=int(rng.integers(2**31))
    )
    counts = sizes(clients, 20, 200, rng)
    first = np.arange(clients) * 1200
    train = [np.arange(f, f + n) for f, n in zip(first, counts, strict=True)]
    test = [np.arange(f + 200, f + 200 + tests) for f in first]
    return of_rows(data.rows, train, test), 10


def cancer(rng):
    from sklearn.cluster import KMeans

    data = fb.datasets.load("breast_cancer")
    inputs, targets = data.rows
    rows = inputs, targets.astype(np.int32)
    seed = int(rng.integers(2**31))
    again: Any = 1
    sites = KMeans(8, n_init=again, random_state=seed).fit_predict(inputs[:, [1, 4, 8]])
    parts = []
    for site in range(8):
        order = rng.permutation(np.flatnonzero(sites == site))
        parts.append(np.split(order, [len(order) // 2]))
    return of_rows(rows, [p[0] for p in parts], [p[1] for p in parts]), 2


SETS = {
    one.__name__: one
    for one in (digits, mnist2, mnist4, dirichlet, femnist, synthetic, cancer)
}
RATES = {"digits": 0.1, "synthetic": 0.03, "cancer": 0.1}
"""The rate of all models, where it is not 0.3."""
ROUNDS = 50


def by_row(run, split, metric):
    """[replicas, clients, rows], NaN where there is no row."""
    return np.stack([np.asarray(of[split]["personal"][metric]) for of in run.by_row])


def compact(values):
    """What rows contributed, in few bytes."""
    right, loss = values
    return {
        "right": np.where(np.isnan(right), 2, right).astype(np.uint8),
        "loss": np.minimum(loss, 30).astype(np.float16),
    }


def collect(name, seed, number):
    """Everything that a way to choose may look at, and the test rows of all models."""
    rng = np.random.default_rng([seed, *name.encode()])
    data, outputs = SETS[name](rng)
    shape = data.train.examples[0].shape[1:]
    model = fb.models.build("softmax", shape, outputs)
    loss = fb.losses.cross_entropy(model.apply)
    work = fb.Work(RATES.get(name, 0.3), steps=10, batch_size=10)
    measure = {
        "accuracy": fb.metrics.accuracy(model.apply),
        "loss": fb.metrics.mean_loss(loss),
    }
    key = jax.random.key(seed)
    grid = np.array(GRID, np.float32)

    def apfl(alpha, **way):
        return fb.apfl(loss, work, alpha=alpha, **{"learn": "fixed", **way})

    def trained(algorithm, on, splits, rounds=ROUNDS, **more):
        run = fb.simulate(
            algorithm,
            model.init,
            on,
            more.pop("key", key),
            rounds=rounds,
            every=max(rounds, 1),
            measure=measure,
            splits=splits,
            **more,
        )
        return run.complete()

    def rows_of(run, split):
        return by_row(run, split, "accuracy"), by_row(run, split, "loss")

    parts = folds(data, number)
    fold_key = jax.numpy.stack([key] * number)
    alone = fb.local_only(loss, work)
    spec = RunSpec(alone, model.init, parts, fold_key, ROUNDS, measure=measure)
    trial = trying(spec, "accuracy")
    for _ in prolonged(trial, "accuracy", ROUNDS):
        pass
    rounds = of_best_length(set_up(spec), trial, "accuracy", ROUNDS).rounds
    own_folds = trained(alone, parts, ["validation"], rounds, key=fold_key)
    own = trained(alone, data, ["test"], rounds)
    mixed_folds = trained(
        apfl,
        [part for part in parts for _ in grid],
        ["validation"],
        key=jax.numpy.stack([key] * (number * len(grid))),
        over=jax.numpy.tile(grid, number),
    )
    mixed = trained(apfl, data, ["test"], over=grid)
    half = data.holding_out(0.25)
    split = trained(apfl, half, ["validation", "test"], over=grid)
    own_split = trained(alone, half, ["validation", "test"], rounds)
    learned = {
        "eq10": trained(apfl(0.5, learn="step"), data, ["test"]),
        "eq10_slow": trained(apfl(0.5, learn="step", alpha_rate=0.01), data, ["test"]),
        "held_out": trained(
            apfl(0.5, learn="step", alpha_rate=0.01, held_out=0.2), data, ["test"]
        ),
    }

    def arms(a, b):
        """Training alone first, then all alphas."""
        return [np.concatenate(pair) for pair in zip(a, b, strict=True)]

    def cross(run, replicas):
        """[arms, clients, folds x rows]."""
        found = []
        for values in rows_of(run, "validation"):
            values = values.reshape(number, replicas, *values.shape[1:])
            found.append(np.concatenate(list(values), axis=-1))
        return found

    groups = {
        "fold": arms(cross(own_folds, 1), cross(mixed_folds, len(grid))),
        "test": arms(rows_of(own, "test"), rows_of(mixed, "test")),
        "split": arms(rows_of(own_split, "validation"), rows_of(split, "validation")),
        "split_test": arms(rows_of(own_split, "test"), rows_of(split, "test")),
    }
    for way, run in learned.items():
        groups[way] = list(rows_of(run, "test"))
    return {
        f"{group}_{kind}": values
        for group, pair in groups.items()
        for kind, values in compact(pair).items()
    } | {"alone_rounds": rounds, "counts": data.train.counts, "grid": grid}


class Trained(NamedTuple):
    """One federation of one seed: errors and losses of rows, [arms, clients, rows].

    The first arm is training alone, the last the shared model.
    """

    folds: int
    counts: np.ndarray
    errors: dict[str, np.ndarray]
    losses: dict[str, np.ndarray]

    def means(self, group, of="errors"):
        """Over the rows of every client; NaN without."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # clients without rows
            return np.nanmean(getattr(self, of)[group], axis=-1)


def read(path):
    raw = np.load(path)
    errors, losses = {}, {}
    for group in (key[:-6] for key in raw if key.endswith("_right")):
        right = raw[f"{group}_right"].astype(float)
        missing = right == 2
        errors[group] = np.where(missing, np.nan, 1 - right)
        losses[group] = np.where(missing, np.nan, raw[f"{group}_loss"].astype(float))
    return Trained(int(path.stem.split("_")[1]), raw["counts"], errors, losses)


def least(costs):
    """The cheapest arm of every client; without rows, the cheapest for the others."""
    unknown = np.isnan(costs).all(axis=0)
    found = np.where(np.isnan(costs), np.inf, costs).argmin(axis=0)
    return np.where(unknown, np.nanmean(costs, axis=1).argmin(), found)


def shrunk(guard):
    def way(data):
        errors = data.errors["fold"]
        clients = []
        for client, count in enumerate(data.counts):
            rows = errors[:, client][:, ~np.isnan(errors[0, client])].T
            fold = int(count // data.folds)
            clients.append(shrinkage.Scores(rows, int(count) - fold, int(count)))
        federation = shrinkage.learn(clients)
        return np.array(
            [
                shrinkage.decide(
                    shrinkage.posterior(one, federation), (0, len(errors) - 1), guard
                ).arm
                for one in clients
            ]
        )

    return way


def one_split(data):
    """What a quarter of the rows chose, and models that never train on it."""
    arms = 1 + least(data.means("split", "losses")[1:])
    return data.errors["split_test"][arms, np.arange(len(arms))]


WAYS = {
    "alone": lambda data: np.zeros(len(data.counts), int),
    **{
        f"alpha {alpha:g}": lambda data, arm=arm: np.full(len(data.counts), arm)
        for arm, alpha in enumerate(GRID, start=1)
    },
    "one split, 25 % held out": one_split,
    "eq. (10), rate of the models": lambda data: data.errors["eq10"][0],
    "eq. (10), rate 0.01": lambda data: data.errors["eq10_slow"][0],
    "held-out rows, rate 0.01": lambda data: data.errors["held_out"][0],
    "K folds by loss": lambda data: least(data.means("fold", "losses")),
    "K folds by error": lambda data: least(data.means("fold")),
    "shrunk, no guard": shrunk(0.0),
    "shrunk, guarded": shrunk(GUARD),
    "oracle": lambda data: least(data.means("test")),
}
FIXED = [name for name in WAYS if name.startswith("alpha")]


def judged(data, chosen):
    """Of every client: accuracy, harm in three ways, and how sure it is."""
    test = data.errors["test"]
    clients = np.arange(test.shape[1])
    own = test[chosen, clients] if chosen.ndim == 1 else chosen
    draw = np.random.default_rng(0)
    found = {name: np.zeros(len(clients)) for name in JUDGED}
    for client in clients:
        known = np.flatnonzero(~np.isnan(test[0, client]))
        mine, rivals = own[client, known], test[[0, -1]][:, client, known]
        gaps = mine - rivals
        found["accuracy"][client] = 100 * (1 - mine.mean())
        found["plain"][client] = 100 * max(gaps.mean(axis=1).max(), 0)
        found["than_alone"][client] = 100 * max(gaps[0].mean(), 0)
        halves = np.array_split(draw.permutation(len(known)), 2)
        for one, other in (halves, halves[::-1]):
            # One half says who the better rival is, and whether it is better; the
            # other says by how much: what is chance in the first is not in the second.
            rival = gaps[:, one].mean(axis=1).argmax()
            if gaps[rival, one].mean() > 0:
                found["harm"][client] += 50 * gaps[rival, other].mean()
        sure = [binom.sf((gap > 0).sum() - 1, (gap != 0).sum(), 0.5) for gap in gaps]
        found["p_either"][client] = min(2 * min(sure), 1)
        found["p_both"][client] = max(sure)
    return found


JUDGED = ("accuracy", "harm", "plain", "than_alone", "p_either", "p_both")


def discoveries(p):
    """Benjamini and Hochberg: of those named, 5 % are false on average at most."""
    order = np.argsort(p)
    below = np.flatnonzero(p[order] <= 0.05 * np.arange(1, len(p) + 1) / len(p))
    named = np.zeros(len(p), bool)
    named[order[: below[-1] + 1 if below.size else 0]] = True
    return named


def worst_tenth(accuracy):
    return np.sort(accuracy)[: -(-len(accuracy) // 10)].mean()


def summary(seeds):
    """A way over all seeds of a set."""
    every = {name: np.concatenate([of[name] for of in seeds]) for name in JUDGED}
    both = discoveries(every["p_both"]) & (every["plain"] > 1)
    return {
        "mean": float(np.mean([of["accuracy"].mean() for of in seeds])),
        "worst_tenth": float(np.mean([worst_tenth(of["accuracy"]) for of in seeds])),
        "harm": float(every["harm"].mean()),
        "harm_error": float(every["harm"].std(ddof=1) / len(every["harm"]) ** 0.5),
        "harm_plain": float(every["plain"].mean()),
        "harm_than_alone": float(every["than_alone"].mean()),
        "harmed": int(discoveries(every["p_either"]).sum()),
        "below_both": int(both.sum()),
        "clients": len(every["harm"]),
        "means": [float(of["accuracy"].mean()) for of in seeds],
    }


def verdict(ours, fixed):
    """The bar, against the best fixed alpha in hindsight."""
    harms = fixed["harmed"] > 0 or fixed["harm"] > 2 * fixed["harm_error"]
    return {
        "harm": bool(not harms or ours["harm"] <= fixed["harm"] / 4),
        "harm, plain": bool(not harms or ours["harm_plain"] <= fixed["harm_plain"] / 4),
        "below both": ours["below_both"] == 0,
        "mean": ours["mean"] >= fixed["mean"] - 0.2,
        "worst tenth": ours["worst_tenth"] >= fixed["worst_tenth"] - 0.5,
    }


def decide(folder, sets, seeds, number):
    found = {}
    for name in sets:
        paths = [folder / f"{name}_{number}_{seed}.npz" for seed in seeds]
        trained = [read(path) for path in paths if path.exists()]
        if not trained:
            continue
        each = {
            way: summary([judged(data, choose(data)) for data in trained])
            for way, choose in WAYS.items()
        }
        best = max(FIXED, key=lambda way: each[way]["mean"])
        verdicts = {
            way: verdict(each[way], each[best]) for way in WAYS if way.startswith("shr")
        }
        found[name] = {"seeds": len(trained), "best": best, "ways": each} | verdicts
        print(f"\n### {name}: {len(trained)} seeds, best fixed: {best}\n")
        print(
            "| way | mean | worst tenth | harm | plain | than alone | harmed | both |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for way, row in each.items():
            print(
                f"| {way} | {row['mean']:.2f} | {row['worst_tenth']:.2f} | "
                f"{row['harm']:.3f} ({row['harm_error']:.3f}) | "
                f"{row['harm_plain']:.3f} | {row['harm_than_alone']:.3f} | "
                f"{row['harmed']} | {row['below_both']} |"
            )
        print("\nbar:", verdicts["shrunk, guarded"])
    (folder / f"decided_{number}.json").write_text(json.dumps(found, indent=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["collect", "decide"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folds", type=int, default=5)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(asked.folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if asked.stage == "collect":
        for name in asked.sets:
            for seed in asked.seeds:
                path = asked.folder / f"{name}_{asked.folds}_{seed}.npz"
                if path.exists():
                    continue
                begin = time.time()
                found = collect(name, seed, asked.folds)
                partial = path.with_suffix(".part.npz")
                np.savez_compressed(partial, **found)
                partial.rename(path)
                print(f"{path.name} {time.time() - begin:.0f} s", flush=True)
    else:
        decide(asked.folder, asked.sets, asked.seeds, asked.folds)


if __name__ == "__main__":
    main()

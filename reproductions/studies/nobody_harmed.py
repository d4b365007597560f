# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to choose alpha for every client, compared by what they gain and whom they harm.

``collect`` trains APFL at all alphas, training alone, and the ways that learn alpha, on
one federation, and saves what models say of every client's rows: rows held out in K
folds, and test rows of the models trained on all rows. ``decide`` makes every choice
from these files in seconds and prints the table of docs/alpha.md, with intervals.

    python nobody_harmed.py collect out --sets digits mnist2 --seeds 0 1 2
    python nobody_harmed.py decide out --seeds 0 1 2

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
from scipy.stats import binom, t

import fedblend as fb
from fedblend.data.variants import folds
from fedblend.selection import arm_costs
from fedblend.selection.choose import GUARD
from fedblend.simulation.simulate import RunSpec, set_up
from fedblend.simulation.train_alone import prolong, set_best_length, trial_run
from fedblend_reproductions.datasets import synthetic as linear_models

GRID = (0.0, 0.25, 0.5, 0.65, 0.75, 0.85, 0.9, 1.0)
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
    data = linear_models(
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
SIX = [0, *(1 + GRID.index(alpha) for alpha in (0, 0.25, 0.5, 0.75, 0.9, 1))]
"""Training alone and a coarser grid."""
EVERY = list(range(1 + len(GRID)))


def outputs_of(model, run, shards):
    """What the models of a run say of rows, [replicas, clients, rows, classes]."""
    clients = range(len(shards.counts))
    models = run.personal_models(clients)
    if run.replicas is None:
        models = [jax.tree.map(lambda leaf: leaf[None], one) for one in models]
    models = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *models)
    most = max(shards.counts)
    rows = [np.asarray(shards.rows(client)[0]) for client in clients]
    rows = [np.resize(of, (most, *of.shape[1:])) for of in rows]
    found = jax.jit(jax.vmap(jax.vmap(model.apply), (0, None)))(models, np.stack(rows))
    return np.asarray(found, np.float16)


def labels_of(shards):
    """[clients, rows], -1 where there is no row."""
    found = np.full((len(shards.counts), max(shards.counts)), -1, np.int16)
    for client, row in enumerate(found):
        labels = np.asarray(shards.rows(client)[1])
        row[: len(labels)] = labels
    return found


def collect(name, seed, number, learned):
    """Everything that a way to choose may look at, and the test rows of all models."""
    rng = np.random.default_rng([seed, *name.encode()])
    data, classes = SETS[name](rng)
    shape = data.train.examples[0].shape[1:]
    model = fb.models.build("softmax", shape, classes)
    loss = fb.losses.cross_entropy(model.apply)
    work = fb.Work(RATES.get(name, 0.3), steps=10, batch_size=10)
    measure = {
        "accuracy": fb.metrics.accuracy(model.apply),
        "loss": fb.metrics.mean_loss(loss),
    }
    key = jax.random.key(seed)
    grid = np.array(GRID, np.float32)
    parts = folds(data, number)
    fold_key = jax.numpy.stack([key] * number)
    alone = fb.local_only(loss, work)

    def apfl(alpha, **way):
        return fb.apfl(loss, work, alpha=alpha, **{"learn": "fixed", **way})

    def trained(algorithm, on, rounds=ROUNDS, key=key, **more):
        run = fb.simulate(
            algorithm, model.init, on, key, rounds=rounds, every=max(rounds, 1), **more
        )
        return run.complete()

    spec = RunSpec(alone, model.init, parts, fold_key, ROUNDS, measure=measure)
    trial = trial_run(spec, "accuracy")
    for _ in prolong(trial, "accuracy", ROUNDS):
        pass
    rounds = set_best_length(set_up(spec), trial, "accuracy", ROUNDS).rounds

    def both(on, shards):
        """Training alone first, then all alphas."""
        runs = trained(alone, on, rounds), trained(apfl, on, over=grid)
        return np.concatenate([outputs_of(model, run, shards) for run in runs])

    own = trained(alone, parts, rounds, fold_key)
    mixed = trained(
        apfl,
        [part for part in parts for _ in grid],
        key=jax.numpy.stack([key] * (number * len(grid))),
        over=jax.numpy.tile(grid, number),
    )
    crossed = []
    for fold, part in enumerate(parts):
        here = np.arange(len(grid)) + fold * len(grid)
        first = outputs_of(model, own, part.validation)[[fold]]
        crossed.append(
            np.concatenate([first, outputs_of(model, mixed, part.validation)[here]])
        )
    found = {
        "alone_rounds": rounds,
        "counts": data.train.counts,
        "fold_outputs": np.concatenate(crossed, axis=2),
        "fold_labels": np.concatenate([labels_of(p.validation) for p in parts], axis=1),
        "test_outputs": both(data, data.test),
        "test_labels": labels_of(data.test),
    }
    if not learned:
        return found
    half = data.holding_out(0.25)
    ways = {
        "eq10": {"alpha_rate": 0.01},
        "held_out": {"alpha_rate": 0.01, "held_out": 0.2},
    }
    return found | {
        "split_outputs": both(half, half.validation),
        "split_labels": labels_of(half.validation),
        "split_test_outputs": both(half, data.test),
        **{
            f"{way}_outputs": outputs_of(
                model, trained(apfl(0.5, learn="step", **options), data), data.test
            )
            for way, options in ways.items()
        },
    }


class Trained(NamedTuple):
    """One federation of one seed: what models say of rows, and the rows' labels.

    Outputs are [arms, clients, rows, classes], labels [clients, rows] with -1 where
    there is no row. The first arm is training alone, the last the shared model.
    """

    folds: int
    counts: np.ndarray
    outputs: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]

    def errors(self, group):
        """[arms, clients, rows], NaN where there is no row."""
        return wrong(self.outputs[group], self.labels[group])

    def losses(self, group):
        """Likewise, cross entropies."""
        outputs, labels = self.outputs[group].astype(np.float32), self.labels[group]
        place = np.broadcast_to(np.maximum(labels, 0), outputs.shape[:-1])[..., None]
        own = np.take_along_axis(outputs, place.astype(int), axis=-1)[..., 0]
        whole = np.logaddexp.reduce(outputs, axis=-1)
        return np.where(labels < 0, np.nan, whole - own)

    def deploying(self, arms):
        """Errors of test rows, [clients, rows], with one arm of each client."""
        arms = np.broadcast_to(arms, len(self.counts))
        return self.averaging(np.eye(1 + len(GRID))[arms])

    def averaging(self, weights):
        """The same with averages; outputs of a mean of linear models are the mean."""
        mean = np.einsum("ca,acrk->crk", weights, self.outputs["test"], dtype=float)
        return wrong(mean, self.labels["test"])


def wrong(outputs, labels):
    return np.where(labels < 0, np.nan, outputs.argmax(axis=-1) != labels)


def read(path):
    raw = np.load(path)
    outputs, labels = (
        {key.removesuffix(of): raw[key] for key in raw if key.endswith(of)}
        for of in ("_outputs", "_labels")
    )
    for group in outputs:
        labels.setdefault(group, labels["test"])
    return Trained(int(path.stem.split("_")[1]), raw["counts"], outputs, labels)


def least(costs):
    """The cheapest arm of every client; without rows, the cheapest for the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # clients without rows
        costs = np.nanmean(costs, axis=-1)
    unknown = np.isnan(costs).all(axis=0)
    found = np.where(np.isnan(costs), np.inf, costs).argmin(axis=0)
    return np.where(unknown, np.nanmean(costs, axis=1).argmin(), found)


def decisions(data, guard=GUARD, arms=EVERY):
    """What ``fb.choose`` decides among all arms, or some."""
    errors, clients = data.errors("fold")[arms], []
    for client, count in enumerate(data.counts):
        rows = errors[:, client][:, ~np.isnan(errors[0, client])].T
        fold = int(count // data.folds)
        clients.append(arm_costs.ClientCosts(rows, int(count) - fold, int(count)))
    federation = arm_costs.learn(clients)
    beliefs = [arm_costs.posterior(one, federation) for one in clients]
    return [arm_costs.decide(one, (0, len(errors) - 1), guard) for one in beliefs]


def single(data, guard=GUARD, arms=EVERY):
    chosen = [one.arm for one in decisions(data, guard, arms)]
    return data.deploying(np.array(arms)[chosen])


def averaged(data):
    return data.averaging(np.stack([one.best for one in decisions(data)]))


def one_split(data):
    """What a quarter of the rows chose, and models that never train on it."""
    arms = 1 + least(data.losses("split")[1:])
    return data.errors("split_test")[arms, np.arange(len(arms))]


WAYS = {
    "alone": lambda data: data.deploying(0),
    **{
        f"alpha {alpha:g}": lambda data, arm=arm: data.deploying(arm)
        for arm, alpha in enumerate(GRID, start=1)
    },
    "K folds by loss": lambda data: data.deploying(least(data.losses("fold"))),
    "K folds by error": lambda data: data.deploying(least(data.errors("fold"))),
    "one arm of six alphas, guarded": lambda data: single(data, arms=SIX),
    "one arm, no guard": lambda data: single(data, 0.0),
    "one arm, guarded": single,
    "averaged": averaged,
    "oracle": lambda data: data.deploying(least(data.errors("test"))),
}
LEARNED = {
    "one split, 25 % held out": one_split,
    "eq. (10), rate 0.01": lambda data: data.errors("eq10")[0],
    "held-out rows, rate 0.01": lambda data: data.errors("held_out")[0],
}
FIXED = [name for name in WAYS if name.startswith("alpha")]
ROUNDING = 1e-9
HALVES = 10
"""How often test rows are halved."""


def judged(data, own):
    """Of every client: accuracy, harm in two ways, and how sure it is."""
    rivals = data.errors("test")[[0, -1]]
    draw = np.random.default_rng(0)
    found = {name: np.zeros(len(own)) for name in JUDGED}
    for client, mine in enumerate(own):
        known = np.flatnonzero(~np.isnan(mine))
        gaps = mine[known] - rivals[:, client, known]
        found["accuracy"][client] = 100 * (1 - mine[known].mean())
        found["plain"][client] = 100 * max(gaps.mean(axis=1).max(), 0)
        for _ in range(HALVES):
            halves = np.array_split(draw.permutation(len(known)), 2)
            for one, other in (halves, halves[::-1]):
                # One half says who the better rival is, and whether it is better; the
                # other by how much: what is chance in the first is not in the second.
                rival = gaps[:, one].mean(axis=1).argmax()
                if gaps[rival, one].mean() > 0:
                    found["harm"][client] += 50 * gaps[rival, other].mean() / HALVES
        sure = [binom.sf((gap > 0).sum() - 1, (gap != 0).sum(), 0.5) for gap in gaps]
        found["p_either"][client] = min(2 * min(sure), 1)
        found["p_both"][client] = max(sure)
    return found


JUDGED = ("accuracy", "harm", "plain", "p_either", "p_both")


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
        "harmed": int(discoveries(every["p_either"]).sum()),
        "below_both": int(both.sum()),
        "clients": len(every["harm"]),
    }


def interval(differences):
    """Of the mean over seeds, with 95 %, by the distribution of Student."""
    values, number = np.asarray(differences), len(differences)
    if number < 2:
        return [float(values.mean()), float("nan")]
    error = values.std(ddof=1) / number**0.5
    return [float(values.mean()), float(t.ppf(0.975, number - 1) * error)]


def against(seeds, fixed):
    """The differences to the best fixed alpha, seed by seed, with their intervals.

    ``excess`` is the harm less a quarter of that of the fixed alpha: the bar is 0.
    """

    def of(measure):
        pairs = zip(seeds, fixed, strict=True)
        return interval([measure(own) - measure(other) for own, other in pairs])

    pairs = zip(seeds, fixed, strict=True)
    excess = [own["harm"].mean() - other["harm"].mean() / 4 for own, other in pairs]
    return {
        "mean": of(lambda one: one["accuracy"].mean()),
        "worst_tenth": of(lambda one: worst_tenth(one["accuracy"])),
        "excess": interval(excess),
    }


def verdict(ours, fixed):
    """The bar, against the best fixed alpha in hindsight."""
    harms = fixed["harmed"] > 0 or fixed["harm"] > 2 * fixed["harm_error"]
    return {
        "harm": bool(not harms or ours["harm"] <= fixed["harm"] / 4),
        "below both": ours["below_both"] == 0,
        "mean": ours["mean"] >= fixed["mean"] - 0.2 - ROUNDING,
        "worst tenth": ours["worst_tenth"] >= fixed["worst_tenth"] - 0.5 - ROUNDING,
    }


COMPARED = ("one arm, guarded", "averaged")


def decide(folder, sets, seeds, number):
    found = {}
    for name in sets:
        paths = [folder / f"{name}_{number}_{seed}.npz" for seed in seeds]
        trained = [read(path) for path in paths if path.exists()]
        if not trained:
            continue
        learned = all("split" in data.outputs for data in trained)
        ways = WAYS | LEARNED if learned else WAYS
        raw = {
            way: [judged(data, deployed(data)) for data in trained]
            for way, deployed in ways.items()
        }
        each = {way: summary(of) for way, of in raw.items()}
        best = max(FIXED, key=lambda way: each[way]["mean"])
        found[name] = {"seeds": len(trained), "best": best, "ways": each}
        print(f"\n### {name}: {len(trained)} seeds, best fixed: {best}\n")
        print("| way | mean | worst tenth | harm | plain | harmed | both |")
        print("|---|---|---|---|---|---|---|")
        for way, row in each.items():
            print(
                f"| {way} | {row['mean']:.2f} | {row['worst_tenth']:.2f} | "
                f"{row['harm']:.3f} ({row['harm_error']:.3f}) | "
                f"{row['harm_plain']:.3f} | {row['harmed']} of {row['clients']} | "
                f"{row['below_both']} |"
            )
        for way in COMPARED:
            gaps, held = against(raw[way], raw[best]), verdict(each[way], each[best])
            found[name][way] = {"against": gaps, "bar": held}
            said = (f"{key} {a:+.3f} +- {b:.3f}" for key, (a, b) in gaps.items())
            print(f"\n{way}: {', '.join(said)}\nbar: {held}")
    (folder / f"decided_{number}.json").write_text(json.dumps(found, indent=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["collect", "decide"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--learned", action="store_true", help="also learned alphas")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(asked.folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if asked.stage == "collect":
        for seed in asked.seeds:
            for name in asked.sets:
                path = asked.folder / f"{name}_{asked.folds}_{seed}.npz"
                if path.exists():
                    continue
                begin = time.time()
                found = collect(name, seed, asked.folds, asked.learned)
                partial = path.with_suffix(".part.npz")
                np.savez_compressed(partial, **found)
                partial.rename(path)
                print(f"{path.name} {time.time() - begin:.0f} s", flush=True)
    else:
        decide(asked.folder, asked.sets, asked.seeds, asked.folds)


if __name__ == "__main__":
    main()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The guard on generated federations, where what every model costs is known.

Linear models in closed form: training alone is ridge regression, with the penalty that
folds choose for all clients; the shared model is that of all rows; the arm of an alpha
mixes the shared model with the client's own. The rule of ``fb.choose`` was fixed here
with seeds 0 to 39, and without the federations of NEW.

    python guard_generated.py --first 200 --seeds 12

A line has harm as a fraction of what the better alternative costs, mean over clients:
of the best fixed alpha in hindsight, of what clients deploy (with its standard error),
and what they expect of it; how many clients lose more than 5 %; and the range of 80 %
of federations of what the mean harm of one is, by what it stated.
"""

import argparse

import numpy as np
from scipy.stats import norm

from fedblend.selection import arm_costs
from fedblend.selection.arm_costs import ClientCosts
from fedblend.selection.choose import GRID, GUARD

FOLDS = 5
PENALTIES = (0.1, 1.0, 5.0, 20.0)
POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
"""By which errors of classification are known, without the noise of test rows."""
NOISE = {
    "normal": lambda rng, rows: rng.standard_normal(rows),
    "t3": lambda rng, rows: rng.standard_t(3, rows) / 3**0.5,
    "laplace": lambda rng, rows: rng.laplace(size=rows) / 2**0.5,
    "lognormal": lambda rng, rows: (np.exp(rng.standard_normal(rows)) - 1.6487) / 2.16,
}
USUAL = {
    "clients": 30,
    "inputs": 8,
    "least": 15,
    "most": 200,
    "between": 0.5,
    "skew": 0.6,
    "noise": "normal",
    "levels": 0.5,
    "scales": 0.0,
    "classes": False,
}
WORLDS = {
    "equal noise": {"levels": 0.0},
    "other noise": {"levels": 0.7},
    "t3": {"noise": "t3"},
    "lognormal": {"noise": "lognormal", "levels": 0.7},
    "few rows": {"least": 8, "most": 40, "inputs": 5},
    "alike": {"between": 0.15, "noise": "t3"},
    "unlike": {"between": 1.5, "skew": 1.0, "levels": 0.7, "noise": "t3"},
    "many clients": {
        "clients": 80,
        "least": 8,
        "most": 100,
        "inputs": 6,
        "scales": 0.4,
        "levels": 0.7,
        "noise": "t3",
        "between": 0.3,
    },
    "classes": {"classes": True, "between": 0.6, "levels": 0.3},
    "classes, few rows": {"classes": True, "least": 10, "most": 60, "inputs": 5},
}
NEW = {
    "Laplace": {"noise": "laplace", "inputs": 12, "least": 30, "most": 300},
    "other inputs": {"clients": 50, "inputs": 4, "scales": 0.6, "between": 0.25},
}
"""What a federation has besides the usual; ``between`` and ``skew`` are how far clients
are, ``levels`` how much their noise differs, ``scales`` how much their inputs do."""


def ridge(inputs, targets, penalty):
    penalties = np.full(inputs.shape[1], penalty)
    penalties[0] = 1e-6 * max(len(inputs), 1)  # the intercept is free
    return np.linalg.solve(inputs.T @ inputs + np.diag(penalties), inputs.T @ targets)


def trained(data, penalty):
    """The models of all arms, [clients, arms, inputs]."""
    inputs, targets = map(np.concatenate, zip(*data, strict=True))
    shared = ridge(inputs, targets, 1.0)
    found = []
    for inputs, targets in data:
        away = 0.1 * np.eye(len(shared))
        step = inputs.T @ (targets - inputs @ shared)
        own = shared + np.linalg.solve(inputs.T @ inputs + away, step)
        alone = ridge(inputs, targets, penalty)
        found.append([alone, *(a * shared + (1 - a) * own for a in GRID)])
    return np.array(found)


class World:
    """A federation: what folds say of rows, and what models cost in truth."""

    def __init__(self, seed, name):
        rng = np.random.default_rng([seed, *name.encode()])
        self.of = of = {**USUAL, **(WORLDS | NEW)[name]}
        clients = of["clients"]
        span = np.log(of["least"]), np.log(of["most"])
        self.counts = np.exp(rng.uniform(*span, clients)).astype(int)
        rule = rng.standard_normal(of["inputs"])
        far = np.exp(of["skew"] * rng.standard_normal(clients) - of["skew"] ** 2 / 2)
        away = rng.standard_normal((clients, of["inputs"]))
        self.rules = rule + of["between"] * far[:, None] * away
        self.levels = np.exp(of["levels"] * rng.standard_normal(clients))
        self.scales = np.exp(of["scales"] * rng.standard_normal(clients))
        data = [self.drawn(rng, i, n) for i, n in enumerate(self.counts)]
        self.parts = parts = [rng.permutation(n) % FOLDS for n in self.counts]
        tried = [self.crossed(data, parts, penalty) for penalty in PENALTIES]
        alone = [np.mean([own[:, 0].mean() for own in self.costs(data, of)])
                 for of in tried]  # fmt: skip
        best = int(np.argmin(alone))
        self.data, self.said = data, tried[best]
        self.models = trained(data, PENALTIES[best])

    def drawn(self, rng, client, rows):
        """Rows of a client: inputs and targets."""
        inputs = rng.standard_normal((rows, self.of["inputs"])) * self.scales[client]
        inputs[:, 0] = 1
        exact, level = inputs @ self.rules[client], self.levels[client]
        if self.of["classes"]:
            chance = 1 / (1 + np.exp(-2 * exact / level))
            return inputs, np.where(rng.random(rows) < chance, 1.0, -1.0)
        return inputs, exact + level * NOISE[self.of["noise"]](rng, rows)

    def crossed(self, data, parts, penalty):
        """What the arms say of every row, by models that did not train on it."""
        said = [np.zeros((len(own), 1 + len(GRID))) for own in parts]
        for fold in range(FOLDS):
            pairs = list(zip(data, parts, strict=True))
            models = trained(
                [(x[p != fold], y[p != fold]) for (x, y), p in pairs], penalty
            )
            for own, ((x, _), p), of in zip(said, pairs, models, strict=True):
                own[p == fold] = x[p == fold] @ of.T
        return said

    def costs(self, data, said):
        """Of every row, [rows, arms]."""
        pairs = [(y[:, None], own) for (_, y), own in zip(data, said, strict=True)]
        if self.of["classes"]:
            return [(y * own <= 0).astype(float) for y, own in pairs]
        return [(y - own) ** 2 for y, own in pairs]

    def truth(self, weights):
        """What averages cost, by weights [clients, arms]."""
        models = np.einsum("ca,cai->ci", weights, self.models)
        if self.of["classes"]:
            return self.wrong(models)
        off = (models - self.rules) ** 2
        return off[:, 0] + self.scales**2 * off[:, 1:].sum(axis=1) + self.levels**2

    def wrong(self, models):
        """Chances to be wrong: given x @ rule, x @ model is normal."""
        (at, rules), (mean, slopes) = (
            (of[:, :1], self.scales[:, None] * of[:, 1:]) for of in (self.rules, models)
        )
        spread = np.linalg.norm(rules, axis=1, keepdims=True)
        along = (rules * slopes).sum(axis=1, keepdims=True) / spread
        rest = (slopes**2).sum(axis=1, keepdims=True) - along**2
        positive = norm.cdf((mean + along * POINTS) / np.sqrt(np.maximum(rest, 1e-12)))
        chance = 1 / (1 + np.exp(-2 * (at + spread * POINTS) / self.levels[:, None]))
        errors = chance * (1 - positive) + (1 - chance) * positive
        return errors @ WEIGHTS / WEIGHTS.sum()


def decided(world, costs):
    """What ``fb.choose`` believes, of the costs of rows."""
    clients = [
        ClientCosts(own, int(n - n // FOLDS), int(n))
        for own, n in zip(costs, world.counts, strict=True)
    ]
    federation = arm_costs.learn(clients)
    references = (0, 1) if costs[0].shape[1] == 3 else (0, len(GRID))
    return [
        arm_costs.decide(arm_costs.posterior(one, federation), references, GUARD)
        for one in clients
    ]


def judged(world):
    """[clients, arms] in truth, what averages cost in truth, and the harm expected."""
    arms, number = 1 + len(GRID), len(world.counts)
    truth = [world.truth(np.tile(row, (number, 1))) for row in np.eye(arms)]
    costs = world.costs(world.data, world.said)
    weights, *others = (
        np.stack([one.best for one in decided(world, rows)])
        for rows in (costs, *(without(world, costs, fold) for fold in range(FOLDS)))
    )
    # What a row says of the average is by weights that other folds chose.
    said = [
        (own * np.stack(others)[part, client]).sum(axis=1, keepdims=True)
        for client, (own, part) in enumerate(zip(world.said, world.parts, strict=True))
    ]
    averages = world.costs(world.data, said)
    rivals = [own[:, [0, -1]] for own in costs]
    both = [np.hstack(pair) for pair in zip(rivals, averages, strict=True)]
    stated = [one.harm[-1] for one in decided(world, both)]
    return np.stack(truth, axis=1), world.truth(weights), np.array(stated)


def without(world, costs, fold):
    return [own[part != fold] for own, part in zip(costs, world.parts, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--first", type=int, default=200)
    asked = parser.parse_args()
    print("federation: fixed alpha, its harm, deployed, stated, harmed by each, range")
    for name in WORLDS | NEW:
        seeds = range(asked.first, asked.first + asked.seeds)
        found = [judged(World(seed, name)) for seed in seeds]
        truth, mine, stated = map(np.concatenate, zip(*found, strict=True))
        best = truth[:, [0, -1]].min(axis=1)
        fixed = 1 + (truth[:, 1:] / best[:, None]).mean(axis=0).argmin()
        harms = [np.maximum(of / best - 1, 0) for of in (truth[:, fixed], mine)]
        error = harms[1].std() / len(best) ** 0.5
        much = [int((of > 0.05).sum()) for of in harms]
        each = [
            np.maximum(mine - truth[:, [0, -1]].min(axis=1), 0).mean() / stated.mean()
            for truth, mine, stated in found
        ]
        low, high = np.quantile(each, [0.1, 0.9])
        print(
            f"{name}: {GRID[fixed - 1]}, {harms[0].mean():.3f}, {harms[1].mean():.4f} "
            f"(+- {error:.4f}), {(stated / best).mean():.4f}, "
            f"{much[0]} and {much[1]} of {len(best)}, {low:.2f} to {high:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

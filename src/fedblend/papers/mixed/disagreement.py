# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M6: how far the two losses of the smile task disagree, as in Table 4 and Figure 4."""

from typing import Any

import jax
import numpy as np

import fedblend as fb
from fedblend import keys
from fedblend.data.batches import draw
from fedblend.objectives import gradient
from fedblend.papers.claims import Claim, Finding, Verdict
from fedblend.papers.drawing import panels
from fedblend.papers.mixed import smiles
from fedblend.papers.mixed.task import Task, simulated, way
from fedblend.theory.mixed import disagreement

PAPER = {"gap": 49.04, "ratio": 1.26}
FIRST = 10
"""Rounds before this one do not count."""
FACTORS = {"gap": 10.0, "ratio": 2.0}
"""A measured maximum is the paper's if it is within this factor. G^2 has the scale of
the inputs: the paper's have 84 x 84 pixels, 9 times ours, in a range it does not tell.
"""


def traces(this: Task, rate: float, seeds: int, rounds: int) -> dict[str, np.ndarray]:
    """G^2 and B^2 ``[seeds, rounds + 1]`` at the models of one_way with one step.

    Gradients are sampled, of as many rows as a cohort sees in a step, on either side.
    """
    single = this._replace(steps=1)
    rows = this.cohort * this.batch_size
    sides = [fb.shard_of(part) for part in (this.federation.train.examples, this.held)]
    slope_at = gradient(this.loss)

    def at(params, key):
        slopes = [
            slope_at(params, draw(side, keys.named(key, name), rows))
            for side, name in zip(sides, ("federated", "central"), strict=True)
        ]
        return disagreement(slopes[0], slopes[1], this.weights)

    run = simulated(
        *(single, way(single, "one_way"), [rate] * seeds, range(seeds)),
        rounds=rounds,
        every=1,
    )
    roots = jax.vmap(jax.random.key)(np.arange(seeds))
    points = []
    for number, _ in enumerate(run):
        draws = jax.vmap(lambda root, number=number: jax.random.fold_in(root, number))
        points.append(jax.vmap(at)(run.down.shared, draws(roots)))
    return {
        name: np.stack([np.asarray(getattr(point, name)) for point in points], axis=1)
        for name in ("gap", "ratio")
    }


def check(quick: bool) -> Finding:
    """The largest values over rounds and seeds."""
    this = smiles.task(quick)
    seeds, rounds = (2, 15) if quick else (5, 100)
    found = traces(this, smiles.RATE, seeds, rounds)
    most = {name: float(those[:, FIRST:].max()) for name, those in found.items()}
    near = {
        name: 1 / factor < most[name] / PAPER[name] < factor
        for name, factor in FACTORS.items()
    }
    verdict = Verdict.partly if any(near.values()) else Verdict.differs
    mean = {name: float(those[:, FIRST:].mean()) for name, those in found.items()}
    apart = float((found["ratio"] > 2).mean())
    return Finding(
        verdict=Verdict.reproduced if all(near.values()) else verdict,
        ours=f"Largest in rounds {FIRST} to {rounds} of {seeds} runs: G^2 "
        f"{most['gap']:.2f} (mean {mean['gap']:.2f}), B^2 {most['ratio']:.2f} (mean "
        f"{mean['ratio']:.2f}). The two gradients point to different sides (B^2 above "
        f"2) in {apart:.0%} of all rounds.",
        numbers={
            "traces": found,
            "most": most,
            "mean": mean,
            "near": near,
            "apart": apart,
        },
        figures={"traces": _figure(found)},
        why=f"Criterion: G^2 within a factor of {FACTORS['gap']:g} of the paper's and "
        f"B^2 of {FACTORS['ratio']:g}; partly if one. The protocol is the paper's: one "
        "step a round, sampled gradients, the largest over rounds and runs. G^2 has "
        "the scale of the inputs: the paper's images have 84 x 84 pixels, 9 times "
        "ours, in a range that it does not tell. B^2 has no scale. With weights 1/2 "
        "it is below 2 just where the two gradients have a positive inner product; as "
        "one side pushes all scores up and the other all down, they mostly have a "
        "negative one. The paper's 1.26 as the largest value would need gradients that "
        f"are nearly the same; why they should be is not known. {smiles.DATA}",
    )


def _figure(found: dict[str, np.ndarray]) -> Any:
    words = {"gap": "sampled G²", "ratio": "sampled B²"}
    with panels(1, 2, width=4.0) as (figure, axes):
        for place, (name, those) in enumerate(found.items()):
            here = axes[0, place]
            here.plot(those.max(axis=0), color="C0", label="largest of all runs")
            here.plot(those.mean(axis=0), color="C1", label="mean")
            here.axhline(
                PAPER[name], color="0.4", linestyle=":", label="the paper's largest"
            )
            here.axvline(FIRST, color="0.8", linewidth=1)
            here.set_yscale("log")
            here.set_xlabel("rounds, one step each")
            here.set_ylabel(words[name])
        axes[0, 0].legend()
    return figure


M6 = Claim(
    "M6",
    "disagreement of the two losses",
    "Smile task, one step a round, largest over rounds 10 to 100 and 5 runs: G^2 49.04 "
    "and B^2 1.26 (Table 4).",
    check,
)

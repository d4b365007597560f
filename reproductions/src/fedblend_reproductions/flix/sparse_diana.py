# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F4: DIANA with rand-k against gradient descent, as in Figures 3, 8 and 9."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.compress import Compressor, identity, rand_k
from fedblend.core import Shard, static_bits
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, span
from fedblend_reproductions.flix import logistic
from fedblend_reproductions.flix.bounds_and_plans import descent_rounds
from fedblend_reproductions.flix.logistic import Problem
from fedblend_reproductions.flix.solver import side_by_side
from fedblend_reproductions.flix.sparse import (
    AXES,
    Course,
    course,
    draw,
    evidence,
    linear_ks,
    rounds_to_settle,
)

TARGET = 1e-8
"""Of f~ - f~* at alpha 1; times alpha^2 elsewhere, as everything goes like it."""
WANTED = {"mushrooms": 3.0, "a6a": 3.0, "w6a": 3.0, "ijcnn1": 1.8}
"""How many times fewer floats than DGD the best k should need."""


class Saving(NamedTuple):
    """What DGD sends until ``TARGET`` at alpha 1, over what DIANA sends.

    All of it until the mean over seeds is there.
    """

    k: int
    memory: str
    rounds: int
    floats: float
    bits_with_places: float
    floats_with_first_message: float


def check(quick: bool) -> Finding:
    """Compare by rounds and by floats, over the paper's k and over smaller ones."""
    names, clients = (("ijcnn1",), 20) if quick else (logistic.NAMES, 50)
    alphas, seeds = ((1.0,), 2) if quick else ((0.1, 0.5, 1.0), 5)
    others = 2 if quick else 10
    problems = {
        name: logistic.problem(name, clients, intercept=quick) for name in names
    }
    tasks = []
    for name, of in problems.items():
        ks = [4] if quick else linear_ks(of.dim, 7)
        tasks += [(name, "dgd", of.dim), *((name, "diana", k) for k in ks)]

    def measure(task: tuple[str, str, int]) -> Course:
        name, solver, k = task
        of = problems[name]
        rounds = rounds_to_settle(of, solver, k, 14, 1000 if quick else 4000)
        return course(of, solver, k, alphas, rounds=rounds, seeds=_seeds(solver, seeds))

    found = side_by_side(measure, tasks)
    courses = {
        name: [one for task, one in zip(tasks, found, strict=True) if task[0] == name]
        for name in names
    }
    slower = {name: _slower(those, alphas) for name, those in courses.items()}
    cheaper = {name: _cheaper(those, alphas) for name, those in courses.items()}
    settings = [
        (name, intercept)
        for name in names
        for intercept in ((True,) if quick else (False, True))
    ]
    savings = {
        f"{name}{' with intercept' if intercept else ''}": _savings(
            logistic.problem(name, clients, intercept=intercept),
            [4] if quick else None,
            others,
        )
        for name, intercept in settings
    }
    both = {name: both_ways(those, alphas) for name, those in courses.items()}
    fewest = {
        name: fewest_floats_both_ways(
            courses[name][0], savings.get(name, savings.get(f"{name} with intercept"))
        )
        for name in names
    }
    good = [slower[name] and cheaper[name] for name in names]
    verdict = Verdict.partly if any(good) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(good) else verdict,
        ours=sentence(slower, cheaper, savings, both, fewest),
        table=table(savings),
        numbers={
            "alphas": alphas,
            "slower_by_rounds": slower,
            "cheaper_by_floats": cheaper,
            "numbers_both_ways_over_those_of_dgd": both,
            "both_ways_with_fewest_floats_up": fewest,
            "wanted": WANTED,
            "met": {name: _met(name, those) for name, those in savings.items()},
            "savings": {
                name: [one._asdict() for one in those]
                for name, those in savings.items()
            },
            **evidence(courses, problems, alphas),
        },
        figures={across: draw(courses, alphas, across) for across in AXES},
        why=explained(clients, seeds, others),
    )


def both_ways(those: list[Course], alphas) -> list[float]:
    """What the best k < d sends and receives over what DGD does, for each alpha."""
    dgd, *others = those
    targets = _targets(alphas)
    needed = [one.spent("both", targets) for one in others if one.k < dgd.k]
    return (np.min(needed, axis=0) / dgd.spent("both", targets)).tolist()


def fewest_floats_both_ways(dgd: Course, those: list[Saving] | None) -> float:
    """The same at alpha 1 for the k that sends the fewest floats, memories from 0."""
    assert those is not None
    zero = those[-2]
    needed = dgd.spent("both", np.full(len(dgd.gaps), TARGET))[-1]
    return float(zero.rounds * (zero.k + dgd.dim) / needed)


def sentence(
    slower: dict[str, bool],
    cheaper: dict[str, bool],
    savings: dict[str, list[Saving]],
    both: dict[str, list[float]],
    fewest: dict[str, float],
) -> str:
    """What was found, with both starts of the memories and the bars that are missed."""
    ratios = [ratio for those in both.values() for ratio in those]
    first = sum(ratio >= 1 for ratio in ratios)
    pairs = {name: those[-2:] for name, those in savings.items()}
    ahead = sum(first.floats > zero.floats for zero, first in pairs.values())
    missed = ", ".join(
        f"{name} {pair[0].floats:.2f} of {_wanted(name):g}"
        for name, pair in pairs.items()
        if not _met(name, pair)
    )
    return (
        f"No k < d needs fewer rounds than DGD on {_count(slower)} datasets, and some "
        f"k of the figure's needs fewer floats on {_count(cheaper)}. At alpha 1 DIANA "
        f"sends so many times fewer floats until {TARGET:g} with memories from 0, at "
        "the k best for that, and from the first gradient, at the same k: "
        + ", ".join(
            f"{name} {zero.floats:.2f} and {first.floats:.2f} (k = {zero.k})"
            for name, (zero, first) in pairs.items()
        )
        + f"; the gradient is the better start in {ahead} of {len(pairs)}. What we "
        f"asked for, with memories from 0, is missed by: {missed or 'none'}. Counted "
        "both ways, with the dense model that every round sends down, the ranking of k "
        "turns: those that send the fewest floats send and receive "
        f"{span(fewest.values(), '.1f')} times as many numbers as DGD, and the best k "
        f"< d of the figure {span(ratios, '.2f')} times as many; DGD is first in "
        f"{first} of {len(ratios)} (dataset, alpha)."
    )


def explained(clients: int, seeds: int, others: int) -> str:
    """What was run; ``others`` are the seeds that the savings are measured with."""
    return (
        f"{clients} clients, the paper's steps, from x_avg; bands are {seeds} "
        f"seeds, the floats are of the mean of {others} others. It tries "
        "k of 1, 2, 3, 4, 6, d/20, d/10, d/2 and 7d/8 with memories from 0, and "
        "measures the best of them again with other seeds, with memories from 0 and "
        "from the first gradient (sent whole, and counted), for which another k might "
        "be better still. Places are drawn from keys that both sides know; "
        "`bits_with_places` counts float32 values with packed places. The paper has no "
        "intercept; both are shown, as ijcnn1 is so well conditioned without (L/mu = "
        "1.9) that DGD needs only 7 rounds, while it takes several times d floats to "
        "fill the memories."
    )


def table(savings: dict[str, list[Saving]]) -> list[list[str]]:
    """How many times fewer floats: from either start, and how many we asked for."""
    head = ["dataset", "k", "memories from 0", "from the first gradient", "asked for"]
    rows = [
        [name, f"{zero.k}", f"{zero.floats:.2f}", f"{first.floats:.2f}"]
        for name, (*_, zero, first) in savings.items()
    ]
    return [head, *([*row, f"{_wanted(row[0]):g}"] for row in rows)]


def _wanted(name: str) -> float:
    return WANTED[name.split()[0]]


def _met(name: str, those: list[Saving]) -> bool:
    """Whether memories from 0 save as much as is wanted."""
    return bool(those[-2].floats >= _wanted(name))


def _seeds(solver: str, seeds: int) -> int:
    return 1 if solver == "dgd" else seeds


def _targets(alphas) -> np.ndarray:
    return TARGET * np.asarray(alphas) ** 2


def _slower(those: list[Course], alphas) -> bool:
    """Whether no k < d is at the target in fewer rounds than DGD, for any alpha."""
    dgd, *others = those
    ours = dgd.rounds[dgd.first_below(_targets(alphas))]
    compressed = [one for one in others if one.k < dgd.k]
    needed = [one.spent("rounds", _targets(alphas)) for one in compressed]
    return bool((np.array(needed) >= ours).all())


def _cheaper(those: list[Course], alphas) -> bool:
    """Whether for each alpha some k is at the target with fewer floats than DGD."""
    dgd, *others = those
    ours = dgd.spent("floats", _targets(alphas))
    needed = [one.spent("floats", _targets(alphas)) for one in others]
    return bool((np.min(needed, axis=0) < ours).all())


def _savings(of: Problem, ks: list[int] | None, seeds: int) -> list[Saving]:
    """For many k with memories from 0; last, the best k with other seeds, with
    memories from 0 and with memories that start at the gradient.
    """
    if ks is None:
        small = {1, 2, 3, 4, 6, max(of.dim // 20, 1), of.dim // 10}
        ks = sorted({*small, of.dim // 2, 7 * of.dim // 8})
    dgd = course(of, "dgd", of.dim, [1.0], rounds=descent_rounds(of), seeds=1,
                 records=descent_rounds(of), until=TARGET)  # fmt: skip
    spent = dgd.floats[-1]

    def measure(task: tuple[int, str, int]) -> Saving:
        k, memory, seed = task
        # A run that sends twice as much as DGD need not go on.
        one = course(of, "diana", k, [1.0], rounds=round(2 * spent / k), seeds=seeds,
                     records=300, memory=memory, until=TARGET, seed=seed)  # fmt: skip
        reached = one.first_below([TARGET])[0] >= 0
        rounds, floats = one.rounds[-1], one.floats[-1] if reached else np.inf
        with_places = rounds * message_bits(rand_k(k, places="sent"), of.dim)
        if memory == "first":
            with_places += message_bits(identity(), of.dim)
        everything = dgd.rounds[-1] * message_bits(identity(), of.dim)
        return Saving(
            k=k,
            memory=memory,
            rounds=int(rounds),
            floats=float(spent / floats),
            bits_with_places=float(everything / with_places) if reached else 0.0,
            floats_with_first_message=float(
                (spent + of.dim + 1) / (floats + of.dim + 1)
            ),
        )

    swept = side_by_side(measure, [(k, "zero", 0) for k in ks if len(ks) > 1])
    best = max(swept, key=lambda saving: saving.floats).k if swept else ks[0]
    # The best of many is lucky, too: what counts is measured again with other seeds.
    again = side_by_side(measure, [(best, "zero", 1), (best, "first", 1)])
    return [*swept, *again]


def message_bits(compressor: Compressor, dim: int) -> int:
    """Bits of one message with float32 values, from the arrays that would travel."""
    number = jnp.zeros((), jnp.int32)
    client = Shard((), number, number + 1, number, 1)
    message = jax.eval_shape(
        lambda entries, key: compressor.compress(entries, key, client),
        jax.ShapeDtypeStruct((dim,), jnp.float32),
        jax.random.key(0),
    )
    return static_bits(message)


def _count(held: dict[str, bool]) -> str:
    return f"{sum(held.values())} of {len(held)}"


def headline(numbers: Numbers) -> str:
    """What DIANA saves by floats, memories from 0, at the best k of each dataset."""
    saved = [those[-2]["floats"] for those in numbers["savings"].values()]
    return f"DIANA sends {span(saved, '.1f')} times fewer floats than DGD to {TARGET:g}"


F4 = Claim(
    "F4",
    "DIANA with rand-k",
    "Figures 3, 8, 9: compressed by rand-k, DIANA loses to gradient descent in rounds "
    "but is better in floats sent; smaller alpha start closer.",
    check,
    headline,
)

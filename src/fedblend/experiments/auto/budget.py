# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A plan that fits a time: how many splits, points of a grid, and rounds.

A few rounds of FedAvg are timed, and what compiling took. The first plan of the ladder
that fits is taken, for all methods alike.
"""

import dataclasses
import time
from typing import NamedTuple

import jax.numpy as jnp

from fedblend.config.build import Built
from fedblend.experiments.auto.candidates import FEW_CLIENTS
from fedblend.simulation.simulate import set_up

REPLICAS = 4
"""Runs side by side whose rounds are timed."""
WORK = 2.0
"""What a round costs on average over the methods, in rounds of FedAvg."""
PROGRAMS = 4.0
"""What a method takes to compile, in times of what is timed."""
WRITING = 2.0
"""Seconds that the files of a run take."""
SHARE = 0.8
"""The part of the time that is planned; the rest is for what was estimated wrongly."""
LEAST = 0.3
"""The part of the time that rounds get, even if compiling takes all of it: methods that
there is no time for are then left out, instead of all being starved."""


class Plan(NamedTuple):
    """What every method gets."""

    seeds: int
    grid: int
    rounds: int


LADDER = (
    Plan(5, 12, 100),
    Plan(5, 12, 60),
    Plan(5, 6, 60),
    Plan(5, 4, 40),
    Plan(3, 4, 30),
    Plan(3, 4, 20),
    Plan(3, 4, 10),
    Plan(3, 4, 5),
)
"""What a comparison would ideally have, and what is cut, step by step."""
MORE_SPLITS = 2
"""How many times as many splits few clients have, which are compared over splits."""


class Speed(NamedTuple):
    """Seconds that compiling a program takes, and a round of one run."""

    compiling: float
    round: float

    def computing(self, plan: Plan, methods: int) -> float:
        """What the rounds of a comparison take."""
        tuning = plan.grid * plan.seeds * plan.rounds * WORK
        final = plan.seeds * plan.rounds * WORK
        return methods * (tuning + final) * self.round

    def fixed(self, methods: int) -> float:
        """What a comparison takes besides, whatever the plan."""
        return methods * (PROGRAMS * self.compiling + WRITING)


def measured_speed(built: Built) -> Speed:
    """Time a few rounds of the algorithm that was built."""
    begun = time.perf_counter()
    key = jnp.stack([jnp.ravel(built.key)[0]] * REPLICAS)
    spec = dataclasses.replace(
        built.spec,
        federated_data=built.federated_data,
        key=key,
        rounds=3,
        every=1,
        measure={},
    )
    run = set_up(spec).complete()
    blocks = [record[0].seconds for record in run.records]
    compiling = time.perf_counter() - begun - sum(blocks)
    return Speed(max(compiling, 0.0), min(blocks[1:]) / REPLICAS)


def plan_for(seconds: float, speed: Speed, methods: int, clients: int) -> Plan:
    """The first plan of the ladder that fits, or the last."""
    more = MORE_SPLITS if clients < FEW_CLIENTS else 1
    ladder = [plan._replace(seeds=more * plan.seeds) for plan in LADDER]
    left = max(SHARE * seconds - speed.fixed(methods), LEAST * seconds)
    fits = (plan for plan in ladder if speed.computing(plan, methods) <= left)
    return next(fits, ladder[-1])


def cuts(plan: Plan) -> str:
    """What a plan leaves out of the ideal one; empty if nothing."""
    ideal = LADDER[0]
    parts = [
        f"{ours} of {theirs} {what}"
        for ours, theirs, what in zip(
            plan, ideal, ("splits", "points of each grid", "rounds"), strict=True
        )
        if ours < theirs
    ]
    return ", ".join(parts)

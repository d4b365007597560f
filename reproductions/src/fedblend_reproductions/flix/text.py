# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9b: the next character in Shakespeare's roles, with the recurrent network."""

from pathlib import Path

import jax.numpy as jnp
import optax

import fedblend as fb
from fedblend_reproductions.claims import Claim, Finding
from fedblend_reproductions.datasets import shakespeare
from fedblend_reproductions.flix.network_choice import measured
from fedblend_reproductions.flix.network_report import finding, headline
from fedblend_reproductions.flix.network_runs import ONE
from fedblend_reproductions.flix.network_task import Plan, Task, TunedWork, largest

ROLES, WINDOWS = 80, 150
"""Roles with most text, and how many windows of 80 characters of each."""
LACKING = " One gradient a round is not among these results: it is not wholly cached."
PAPER = {0.1: 0.5620, 0.3: 0.5291, 0.5: 0.5718, 0.7: 0.5146, 0.9: 0.5642, 1.0: 0.5629}

FULL = Plan(
    rounds=700,  # the paper has 3000
    trial=70,
    carried=3,
    seeds=4,
    cohort=10,
    replicas=24,
    clients=40,
    snapshots=10,
    own=TunedWork((1.0, 3.0), 100, 10),
    local=TunedWork((1.0, 2.0), 5, 10),
    shared_rates=(0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0),
    one=TunedWork((1.0, 3.0), 1, 20),
    power=2,
    one_rates=(0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0),
    tune=TunedWork((0.3, 1.0), 5, 10),
)
QUICK = Plan(
    rounds=6,
    trial=3,
    carried=2,
    seeds=2,
    cohort=4,
    replicas=32,
    clients=8,
    snapshots=2,
    own=TunedWork((0.5, 20.0), 20, 4),
    local=TunedWork((20.0,), 3, 4),
    shared_rates=(10.0, 20.0),
    one=None,
    power=2,
    one_rates=(),
    tune=TunedWork((5.0,), 5, 4),
)


def task(quick: bool) -> Task:
    """The data and the network; the quick network is a table of pairs."""
    dataset = shakespeare(length=20 if quick else 80)
    roles, windows = (QUICK.clients, 40) if quick else (ROLES, WINDOWS)
    dataset = largest(dataset, roles)
    partition = [index[:windows] for index in fb.partition.by_key(dataset.keys).rows]
    federated_data = fb.federate(dataset.rows, partition, validation=0.15, test=0.15)
    build = pairs if quick else fb.models.char_rnn
    model = build(dataset.outputs)
    return Task(
        federated_data,
        model,
        fb.losses.sequence_cross_entropy(model.apply),
        fb.metrics.next_token_accuracy(model.apply),
        optax.sgd,
        QUICK if quick else FULL,
    )


def pairs(characters: int) -> fb.Model:
    """A score for every pair of a character and the next one."""
    zeros = jnp.zeros((characters, characters))
    return fb.Model(lambda key: zeros, lambda params, rows: params[rows])


def check(quick: bool, folder: Path) -> Finding:
    """FLIX for five alphas beside FedAvg, local models and fine-tuning."""
    this = task(quick)
    why = (
        f"Scaled down: the {this.federated_data.clients} roles with most text (the "
        f"paper's data has 715), at most {WINDOWS} windows of each, {this.plan.rounds} "
        "rounds for 3000. The authors solve by one gradient a round (their tuned "
        "batches are of 1, here of 20); local steps, fine-tuning and training alone "
        "are not in the paper."
    )
    outcome = measured(this, folder)
    if this.plan.one is not None and not outcome.ran(ONE):
        why += LACKING
    return finding(this, outcome, PAPER, why)


F9B = Claim(
    "F9b",
    "Shakespeare: FLIX against FedAvg",
    "With the next-character network FLIX reaches accuracy .5620, .5291, .5718, .5146, "
    ".5642 for alpha .1, .3, .5, .7, .9, FedAvg .5629: FLIX is superior (Table 1, "
    "Figure 5).",
    check,
    headline,
    "0.89 points ahead",
    resumable=True,
    undecided="FedAvg is short of the paper's accuracy, the authors' solver is still "
    "further (in as many rounds it comes to less with mixing than without), and the "
    "trial was too short for models that start from nothing: after 70 rounds six of "
    "FedAvg's ten rates still had the accuracy of always naming the same character "
    "(0.187), and the one setting of alpha 1 with local steps that was carried on, "
    "rate 4, ended at 0.07 to 0.50 by seed, so that this control says nothing; at the "
    "end FedAvg still rises faster than FLIX",
)

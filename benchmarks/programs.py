# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How many programs a card compiles, and what that costs, step by step of a run.

``python programs.py A A-APFL --clients 20`` has as many clients as that in a card. CPU
seconds tell more than others on a machine that is busy, or that compiles with threads.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

import card_runs
import card_tasks
import fedblend as fb

COMPILED = "/jax/core/compile/backend_compile_duration"


def count(name: str, clients: int) -> None:
    """Run a block of a card after another, and print what each step compiles."""
    card = card_tasks.CARDS[name]
    cohort = min(card.cohort, clients)
    card = dataclasses.replace(card, clients=clients, cohort=cohort)
    model = card_runs.model_of(card)
    loss = card_runs.loss_of(card, model)
    federated_data, seen = card_runs.federation(card), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: (
            seen.append(duration_secs) if event == COMPILED else None
        )
    )

    def step(what: str, do: Callable[[], Any]) -> Any:
        seen.clear()
        began, cpu = time.perf_counter(), time.process_time()
        done = do()
        whole, used = time.perf_counter() - began, time.process_time() - cpu
        print(
            f"{name}, {what}: {len(seen)} programs in {sum(seen):.2f} s; "
            f"{whole:.2f} s, {used:.2f} CPU s",
            flush=True,
        )
        return done

    key = jax.random.key(0)
    run = step(
        "set up",
        lambda: fb.simulate(
            card_runs.algorithm_of(card, loss),
            model.init,
            federated_data,
            key,
            rounds=2,
            every=1,
            cohort=cohort,
            measure={"loss": fb.metrics.mean_loss(loss)},
            splits=card.measured or ("train",),
        ),
    )
    records = iter(run)
    for what in ("first record", "first block", "second block"):
        step(what, lambda: next(records))
    step("a personal model", lambda: jax.block_until_ready(run.personal(0)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cards", nargs="*", default=["A", "A-APFL", "D-CNN"])
    parser.add_argument("--clients", type=int, default=20)
    given = parser.parse_args()
    for card in given.cards:
        count(card, given.clients)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""When APFL's mixing weight moves, and that it stays in [0, 1].

``LEARN`` names the choices: "step" moves alpha with every local step, as equation (10)
of the paper is indexed; "round" once per round, as its text says, with the first local
step, that is at the broadcast w and the kept v and on the first batch; "fixed" never,
as in its Algorithm 1 and its theorems.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

LEARN = ("step", "round", "fixed")
"""When alpha moves."""
MOST_HELD_OUT = 0.9
"""The largest fraction of rows held out: every client keeps some to train on."""


def check(
    alpha, learn: str, held_out: float = 0.0, hand_back: float = math.inf
) -> None:
    """Refuse settings that make no sense; inside a sweep alpha is not known yet."""
    known = isinstance(alpha, float | int | np.ndarray)
    if known and not (np.min(alpha) >= 0 and np.max(alpha) <= 1):
        raise ValueError(f"alpha: {alpha} is not in [0, 1]")
    if learn not in LEARN:
        raise ValueError(f"learn: {learn!r} is unknown, it is one of {LEARN}")
    if not 0 <= held_out <= MOST_HELD_OUT:
        raise ValueError(f"held_out: {held_out} is not in [0, {MOST_HELD_OUT}]")
    if held_out and learn == "fixed":
        raise ValueError(
            f"held_out: {held_out} has no meaning with learn = 'fixed', nothing learns "
            "on those rows"
        )
    if hand_back != math.inf and not held_out:
        raise ValueError(f"hand_back: {hand_back} without rows that are held_out")
    if not hand_back >= 1:
        raise ValueError(f"hand_back: {hand_back} is not 1 round or more")


def moving(
    rule: optax.GradientTransformation, learn: str, able: jax.Array | bool = True
) -> optax.GradientTransformation:
    """The optimiser of alpha: ``rule`` when it moves, then back into [0, 1].

    Args:
        rule: how far a step goes.
        learn: one of ``LEARN``.
        able: whether there are rows to learn from; without, it stays, whatever the
            rule makes of no slope.
    """
    first = optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1.0, 0.0))
    moved = {
        "step": rule,
        "round": optax.chain(rule, first),
        "fixed": optax.set_to_zero(),
    }[learn]

    def inside(updates, alpha):
        return jax.tree.map(
            lambda step, old: jnp.where(able, jnp.clip(old + step, 0, 1) - old, 0),
            *(updates, alpha),
        )

    return optax.chain(moved, optax.stateless(inside))

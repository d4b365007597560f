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
import optax

from fedblend.checks import ALPHA, Number, optional, words
from fedblend.errors import UserError
from fedblend.local import OPTIMIZER

LEARN = ("step", "round", "fixed")
"""When alpha moves."""
MOST_HELD_OUT = 0.9
"""The largest fraction of rows held out: every client keeps some to train on."""

RULES = {
    "alpha": ALPHA,
    "learn": words(*LEARN),
    "alpha_rate": optional(OPTIMIZER),
    "held_out": Number(least=0, most=MOST_HELD_OUT),
}
"""The rules of ``checks`` for what tells how alpha is learned."""

HAND_BACK = Number(least=1, endless=True)


def check_held_out(learn: str, held_out: float, hand_back: float) -> None:
    """Refuse to hold out for nothing, and to hand back what is not held out."""
    if held_out and learn == "fixed":
        allowed = "0 with learn = 'fixed', where nothing learns on those rows"
        raise UserError("apfl: held_out", held_out, allowed)
    if hand_back != math.inf and not held_out:
        raise UserError("apfl: hand_back", hand_back, "infinity, without held_out rows")


def moving(
    rule: optax.GradientTransformation, learn: str, able: jax.Array | bool = True
) -> optax.GradientTransformation:
    """The optimizer of alpha: ``rule`` when it moves, then back into [0, 1].

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
            updates,
            alpha,
        )

    return optax.chain(moved, optax.stateless(inside))

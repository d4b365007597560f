# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How APFL learns alpha: when it moves, how fast, from which rows, and within [0, 1].

The paper has equation (10), on the batch of w and v. The choices here::

    learn       when alpha moves: "step", with every local step, as (10) is indexed;
                "round", with the first local step of a round, as the paper's text
                says; "fixed", never, as in Algorithm 1 and the theorems
    alpha_rate  the optimizer of alpha; None for that of w and v
    held_out    the fraction of a client's rows that alpha learns from, and w and v do
                not; 0 for one batch for all
    hand_back   the number of rounds after which w and v learn from all rows, and alpha
                stays; None for never

The rows that v is fitted to cannot tell which of both models generalizes: held-out rows
can.
"""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from fedblend.batches import part
from fedblend.checks import ALPHA, COUNT, Number, optional, words
from fedblend.core import Shard
from fedblend.errors import UserError
from fedblend.local import OPTIMIZER, Optimizer, resolve

Learn = Literal["step", "round", "fixed"]
MOST_HELD_OUT = 0.9
"""The largest fraction of rows held out: every client keeps some for its models."""
RULES = {
    "alpha": ALPHA,
    "learn": words(*get_args(Learn)),
    "alpha_rate": optional(OPTIMIZER),
    "held_out": Number(least=0, most=MOST_HELD_OUT),
}
"""The rules of ``checks`` for arguments that say how alpha is learned."""
HAND_BACK = optional(COUNT)


class Learning(NamedTuple):
    """How alpha is learned; the fields are explained above."""

    learn: Learn = "step"
    alpha_rate: Optimizer | None = None
    held_out: float = 0.0
    hand_back: int | None = None

    def checked(self) -> "Learning":
        """These choices, unless one has no meaning beside the others."""
        if self.held_out and self.learn == "fixed":
            allowed = "allowed with learn = 'fixed', where nothing learns on those rows"
            raise UserError("apfl: held_out", self.held_out, allowed)
        if self.alpha_rate is not None and self.learn == "fixed":
            allowed = "allowed with learn = 'fixed', where alpha does not move"
            raise UserError("apfl: alpha_rate", self.alpha_rate, allowed)
        if self.hand_back is not None and not self.held_out:
            allowed = "allowed without held_out rows"
            raise UserError("apfl: hand_back", self.hand_back, allowed)
        return self

    def split(self, shard: Shard, round: jax.Array) -> tuple[Shard, Shard | None]:
        """The rows of w and v in a round, and those of alpha if they are others."""
        if not self.held_out:
            return shard, None
        until = math.inf if self.hand_back is None else self.hand_back
        fraction = jnp.where(round < until, self.held_out, 0.0)
        return part(shard, fraction, 1.0), part(shard, 0.0, fraction)

    def optimizer(
        self,
        of_models: Optimizer,
        round: jax.Array,
        steps: int | jax.Array,
        held: Shard | None,
    ) -> optax.GradientTransformation:
        """The optimizer of alpha in a round, which keeps alpha in [0, 1].

        Args:
            of_models: the optimizer of w and v, for an alpha without its own.
            round: the round, for schedules.
            steps: number of local steps of the round, for schedules.
            held: the rows of alpha, if they are not those of w and v. Without any left
                alpha stays, even where its optimizer moves without a gradient.
        """
        rate = of_models if self.alpha_rate is None else self.alpha_rate
        rule = resolve(rate, round, steps)
        first = optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1.0, 0.0))
        moved = {
            "step": rule,
            "round": optax.chain(rule, first),
            "fixed": optax.set_to_zero(),
        }[self.learn]
        moves = True if held is None else held.count > 0

        def inside(updates, alpha):
            return jax.tree.map(
                lambda step, old: jnp.where(moves, jnp.clip(old + step, 0, 1) - old, 0),
                updates,
                alpha,
            )

        return optax.chain(moved, optax.stateless(inside))

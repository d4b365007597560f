# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What both halves of LoCoDL know: its options, and the steps of y."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.checks import ByClient
from fedblend.compress import one_mask
from fedblend.compress.compressor import Compressor
from fedblend.core import Key, Loss, PyTree, Shard
from fedblend.local import Work
from fedblend.theory.local_training import relaxed, stable_moved
from fedblend.transforms.mixed_fl.central_loss import Central


class Sent(NamedTuple):
    """Beside y: local steps; yhat of a central loss; with one mask, seed and change."""

    local: jax.Array
    target: PyTree
    seed: PyTree = ()
    past: PyTree = ()


class Settings(NamedTuple):
    """The options; see ``locodl``. ``central`` has the gradient of ``w_c/w_f f_c``."""

    loss: Loss
    work: Work
    rate: float
    p: float
    compressor: Compressor
    clients: int
    moved: float | None
    convex: ByClient | None
    masks: str
    central: Central | None

    @property
    def one(self) -> bool:
        """Whether all clients keep the same entries."""
        return self.masks == "one"

    def relaxed(self, tree: PyTree) -> tuple[float, float]:
        """The factor rho and P^2/p^2 of theory, for models like this one."""
        assert self.compressor.omega is not None
        largest = float(np.max(self.compressor.omega(trees.size(tree))))
        return relaxed(largest, self.clients, self.masks)

    def scales(self, tree: PyTree) -> tuple[float, float]:
        """The factors rho and eta, for models like this one."""
        relaxation, dual = self.relaxed(tree)
        return relaxation, self.p * dual / self.rate

    def moved_of(self, tree: PyTree) -> Any:
        """The value of ``moved``, or the one that is chosen for such models."""
        if self.moved is not None or self.central is not None:
            return self.moved or 0.0
        stable = stable_moved(self.rate, self.p, self.relaxed(tree)[1])
        least = jnp.min(jnp.asarray(0.0 if self.convex is None else self.convex))
        return jnp.where(least > 0, least / 2, stable)

    def at(self, seed: Any) -> Compressor:
        """The compressor of a round, whose mask may be that of a seed."""
        return one_mask.at(self.compressor, seed.value) if self.one else self.compressor

    def drifted(
        self, y: PyTree, v: PyTree, local: jax.Array, rows: Shard | None, key: Key
    ) -> PyTree:
        """The model yhat, after so many steps on g from y."""
        moved = self.moved_of(y)

        def step(number, y):
            push = trees.subtract(trees.scale(moved, y), v)
            if self.central is not None:
                own = jax.random.fold_in(key, number)
                push = trees.add(push, self.central(y, rows, own))
            return trees.subtract(y, trees.scale(self.rate, push))

        return jax.lax.fori_loop(0, local, step, y)

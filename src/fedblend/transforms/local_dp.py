# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local differential privacy: a client clips its update and adds noise before sending.

Unlike ``dp_fedavg``, where the server adds noise to a sum, nobody but the client sees
an update without noise. A round at client i, with clip C and noise z::

    delta_i <- delta_i * min(1, C / |delta_i|),  zeros if it is not finite
    delta_i <- delta_i + N(0, (z C)^2)

``local_dp`` clips, as part of the compiled algorithm; ``secret_noise`` draws the noise
outside of it, from the operating system and from no key (``noise``), so that nobody
else can reproduce it. Noise drawn again for the same update would cancel in the
difference of two messages, so a client must send the same noisy update whenever the
server asks again.

Reference: Duchi, Jordan, Wainwright, "Local privacy and statistical minimax rates",
FOCS 2013. Where this differs from the paper: the mechanism is Gaussian.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.checks import Positive
from fedblend.core import Algorithm, Up
from fedblend.registry import transform
from fedblend.transforms._compose import is_encoded
from fedblend.transforms.noise import add_on_grid, entries, new_secret, normal_of


@transform()
def local_dp(
    algorithm: Algorithm,
    clip: Positive,
    refusal: Callable[[str], Exception] = ValueError,
) -> Algorithm:
    """The algorithm, whose clients send nothing but updates of at most this norm.

    An update that is not finite becomes zero: no noise would hide it, and a server may
    choose a model that overflows on some rows and not on others.

    Args:
        algorithm: what to run.
        clip: C, the largest l2 norm of a client's ``delta``.
        refusal: makes the error for an algorithm that sends more than updates.
    """

    def enroll(params, shard, key):
        join, client = algorithm.enroll(params, shard, key)
        if jax.tree.leaves(join):
            raise refusal(
                "this algorithm sends a model of this client's own at enrollment, "
                "which clipping does not bound"
            )
        return join, client

    def ask(client, shard):
        request = algorithm.wire.ask(client, shard)
        if jax.tree.leaves(request):
            raise refusal(
                "this algorithm sends which part of the model this client's rows use, "
                "which clipping does not bound"
            )
        return request

    def client(down, client, shard, key):
        up, after = algorithm.client(down, client, shard, key)
        if jax.tree.leaves(up.extra):
            raise refusal(
                "this algorithm sends more than an update of the model, which clipping "
                "does not bound"
            )
        if is_encoded(up):
            raise refusal(
                "this algorithm sends encoded updates, whose numbers clipping does not "
                "bound"
            )
        norm = jnp.sqrt(trees.sum_squares(up.delta))
        factor = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-30))
        delta = trees.select(
            jnp.isfinite(norm),
            trees.scale(factor, up.delta),
            trees.zeros_like(up.delta),
        )
        return up._replace(delta=delta, mean_gradient=None, step_sum=None), after

    wire = algorithm.wire._replace(ask=ask)
    return algorithm._replace(enroll=enroll, wire=wire, client=client)


def secret_noise(up: Up, std: float) -> Up:
    """A clipped update plus noise of standard deviation ``std``, new in every call."""
    leaves, structure = jax.tree.flatten(up.delta)
    arrays = [np.asarray(leaf) for leaf in leaves]
    noise = normal_of(new_secret(), entries(arrays))
    noisy = add_on_grid(arrays, std, noise)
    return up._replace(delta=jax.tree.unflatten(structure, noisy))

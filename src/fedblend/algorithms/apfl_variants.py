# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL as other libraries run it, for comparison; ``apfl`` is the paper's method.

``fedtorch``, the authors' own code. With a = 1 - alpha, the weight of v, and F the loss
of the mixed OUTPUTS of the two models, each line uses the results of those before::

    w <- w - rate * grad f(w)
    v <- v - rate * grad in v of F
    a <- a - rate * (<v - w, a dF/dv + (1 - a) dF/dw> + 0.02 a)   with the first step

dF/dv and dF/dw carry the factors a and 1 - a already: in alpha's step they are there
twice, and the last term is in no equation of the paper. Models are deployed as they are
before the server averages.

``fedjax`` mixes parameters, every tensor with an alpha of its own; v steps along
``grad f(mix)`` without the factor ``1 - alpha``; clients count by their rows.

Where this differs from them: batches are drawn as everywhere here. FedTorch decays the
rate of w and not that of v, here both are constant. FedJAX begins v at the shared model
of the client's first round, here it is the initial one.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461; code: MLOPTPSU/FedTorch and google/fedjax on GitHub.
"""

import jax
import jax.numpy as jnp

from fedblend import mixing, trees
from fedblend.algorithms.apfl import apfl
from fedblend.algorithms.apfl_parts import Parts, Variables, assembled
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import ALPHA, NOT_NEGATIVE, ByClient, gate, words
from fedblend.core import Algorithm, Loss
from fedblend.local import WORK, Work
from fedblend.losses import gradient, objective
from fedblend.registry import STEP_BY_STEP, algorithm
from fedblend.shards import per_client

SHRINKAGE = 0.02
"""FedTorch's pull of v's weight to 0."""


LIKE_APFL = STEP_BY_STEP._replace(
    build=apfl, options={"learn": "fixed", "mix": mixing.outputs}
)
"""It deploys another model than it is told: a new client takes APFL's steps."""


@algorithm(new_client=LIKE_APFL)
@gate(**WORK, alpha=ALPHA, learn=words("round", "fixed"))
def apfl_fedtorch(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    learn: str = "round",
) -> Algorithm:
    """APFL as in FedTorch, with plain SGD.

    Args:
        loss: takes a ``Blend``, as all of ``losses`` do.
        work: local work, whose optimizer is a rate: that of w, v and alpha.
        alpha: weight of the shared model at first; a number, or an array over clients.
        learn: "round", as there, or "fixed".
    """
    rate = NOT_NEGATIVE("apfl_fedtorch: work: optimizer", work.optimizer)

    def ensemble(shared, personal, alpha, batch):
        return objective(loss, mixing.outputs(alpha, shared, personal), batch)

    def direction(here: Variables, batch, *unused) -> Variables:
        del unused
        mean_gradient = gradient(loss)(here.shared, batch)
        shared = trees.subtract(here.shared, trees.scale(rate, mean_gradient))
        by_shared, by_personal = jax.grad(ensemble, (0, 1))(
            shared, here.personal, here.alpha, batch
        )
        personal = trees.subtract(here.personal, trees.scale(rate, by_personal))
        twice = mixing.parameters(here.alpha, by_shared, by_personal)
        products = jax.tree.map(jnp.vdot, trees.subtract(shared, personal), twice)
        along = sum(jax.tree.leaves(products)) - SHRINKAGE * (1 - here.alpha)
        return Variables(mean_gradient, by_personal, along.astype(here.alpha.dtype))

    parts = Parts(
        lambda params, shard: per_client(alpha, shard),
        mixing.outputs,
        learn,
        aggregated=False,
    )
    inner = fedavg(loss, work)
    uniform = inner._replace(needs=inner.needs._replace(weights="uniform"))
    return assembled(uniform, direction, work, parts)


@algorithm(new_client=STEP_BY_STEP)
@gate(**WORK, alpha=ALPHA)
def apfl_fedjax(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
) -> Algorithm:
    """APFL as in FedJAX; arguments as of ``apfl``."""

    def leafwise(alphas, shared, personal):
        return jax.tree.map(mixing.parameters, alphas, shared, personal)

    def mixed(alphas, shared, personal, batch):
        return objective(loss, leafwise(alphas, shared, personal), batch)

    def first_alpha(params, shard):
        return jax.tree.map(lambda leaf: per_client(alpha, shard), params)

    def direction(here: Variables, batch, *unused) -> Variables:
        del unused
        mixture = leafwise(here.alpha, here.shared, here.personal)
        gradients = gradient(loss)(here.shared, batch), gradient(loss)(mixture, batch)
        return Variables(*gradients, jax.grad(mixed)(here.alpha, *here[:2], batch))

    parts = Parts(first_alpha, leafwise, "step")
    return assembled(fedavg(loss, work), direction, work, parts)

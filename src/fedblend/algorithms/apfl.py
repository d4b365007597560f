# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL: every client learns a model of its own, and how much of it to mix in.

Client i deploys ``mix_i = alpha_i w + (1 - alpha_i) v_i``: w is the shared model, v_i
its own. A round of Algorithm 1, for every client i of the cohort::

    w_i <- w, then steps times, all from the old w_i, v_i and alpha_i on one batch:
        w_i     <- w_i - rate * grad f_i(w_i)                              (6)
        v_i     <- v_i - rate * grad in v_i of f_i(mix_i)                  (7)
        alpha_i <- alpha_i - rate * <w_i - v_i, grad f_i(mix_i)>,          (10)
                   clipped to [0, 1]
    w <- mean of w_i                                                       (8)

Clients outside of the cohort keep v_i and alpha_i. Autodiff writes (7), with its factor
``1 - alpha_i``, and (10).

Where this differs from the paper: its alpha is the weight of v, here alpha is the
weight of the shared model, as everywhere in fedblend. Algorithm 1 as printed has tau -
1 steps between two averages, its text tau; ``steps`` is that of the text. (10) is
indexed by steps while the text says once per round: ``learn`` has both. (10) as printed
may leave [0, 1], which (9) forbids. Client weights other than uniform, any optimizer,
an optimizer of alpha's own and other rows for (7) and (10) are allowed, see
``Learning``. The output of Algorithm 1, an average over all steps, is
``apfl_averaged`` of the reproductions. For any fixed alpha < 1 long training leads
mix_i to client i's own minimizer, whatever w is (with more than one step a round up to
a drift that falls with the rate): alpha acts through how long and with which rates one
trains.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, mixing, trees
from fedblend.algorithms.agnostic import weigh_losses
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import client_entry, part
from fedblend.checks import (
    COUNT,
    Alpha,
    Count,
    NotNegative,
    Number,
    optional,
    words,
)
from fedblend.core import Algorithm, Batch, Down, Key, Loss, PyTree, Shard, Up
from fedblend.errors import UserError
from fedblend.local import (
    OPTIMIZER,
    Optimizer,
    Work,
    descend,
    plan_steps,
    resolve,
    step_sum_of,
)
from fedblend.losses import gradient, objective
from fedblend.mixing import Mixing
from fedblend.registry import STEP_BY_STEP, algorithm
from fedblend.solvers import Solver

Learn = Literal["step", "round", "fixed"]
MOST_HELD_OUT = 0.9
"""The largest fraction of rows held out: every client keeps some for its models."""

"""The rules of ``checks`` for arguments that say how alpha is learned."""
HAND_BACK = optional(COUNT)


class Learning(NamedTuple):
    """How alpha is learned; the paper has (10), on the batch of w and v.

    learn       when alpha moves: "step", with every local step, as (10) is indexed;
                "round", with the first local step of a round, as the paper's text
                says; "fixed", never, as in Algorithm 1 and the theorems
    alpha_rate  the optimizer of alpha; None for that of w and v
    held_out    the fraction of a client's rows that alpha learns from, and w and v do
                not; 0 for one batch for all. The rows that v is fitted to cannot tell
                which of both models generalizes: held-out rows can.
    hand_back   the number of rounds after which w and v learn from all rows, and alpha
                stays; None for never
    """

    learn: Learn = "step"
    alpha_rate: Optimizer | None = None
    held_out: float = 0.0
    hand_back: int | None = None

    def check(self) -> "Learning":
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

        def stay_inside(updates, alpha):
            return jax.tree.map(
                lambda step, old: jnp.where(moves, jnp.clip(old + step, 0, 1) - old, 0),
                updates,
                alpha,
            )

        return optax.chain(moved, optax.stateless(stay_inside))


class Variables(NamedTuple):
    """What client i descends in its local steps: w_i, v_i and alpha_i."""

    shared: PyTree
    personal: PyTree
    alpha: PyTree


Gradients = Callable[[Variables, Batch], Variables]
"""``gradients(variables, batch)``: those of all three variables, on one batch."""


def local_steps(
    gradients: Gradients,
    variables: Variables,
    down: Down,
    shard: Shard,
    key: Key,
    *,
    work: Work,
    learning: Learning,
    fresh: bool = False,
) -> tuple[Variables, Variables, Shard]:
    """Take the local steps of a round.

    Args:
        gradients: of the three variables.
        variables: where to start.
        down: the server's message.
        shard: the client's rows.
        key: randomness of the batches.
        work: local work; w and v each have an optimizer of this kind.
        learning: how alpha is learned.
        fresh: whether v (and alpha) have another batch than w.

    Returns:
        The variables reached, the mean gradients on the way, and the rows that w and v
        were trained on.
    """
    train, held = learning.split(shard, down.round)
    steps, _ = plan_steps(train, work)
    rule = resolve(work.optimizer, down.round, steps)
    of_alpha = learning.optimizer(work.optimizer, down.round, steps, held)
    rules = optax.partition(
        {"w": rule, "v": rule, "alpha": of_alpha}, Variables("w", "v", "alpha")
    )
    further: list[str | tuple[str, Shard]] = ["fresh batch"] if fresh else []
    further += [] if held is None else [("held-out batch", held)]

    def direction(here: Variables, batch: Batch, *others: Batch) -> Variables:
        of_w = gradients(here, batch)
        of_v = gradients(here, others[0]) if fresh else of_w
        of_alpha = of_v if held is None else gradients(here, others[-1])
        return Variables(of_w.shared, of_v.personal, of_alpha.alpha)

    reached, mean_gradients = descend(
        direction,
        variables,
        train,
        key,
        work=work._replace(optimizer=rules),
        round=down.round,
        correction=Variables(down.correction, None, None),
        further=further,
    )
    return reached, mean_gradients, train


class ApflClient(NamedTuple):
    """The state of client i: v_i, alpha_i, and w_i unless ``aggregated``."""

    personal: PyTree
    alpha: PyTree
    last: PyTree = ()


def gradients(loss: Loss, mix: Mixing = mixing.parameters) -> Gradients:
    """The gradients of the steps (6), (7) and (10), all on one batch."""

    def mixture_loss(here: Variables, batch: Batch) -> jax.Array:
        return objective(loss, mix(here.alpha, here.shared, here.personal), batch)

    def evaluate(here: Variables, batch: Batch) -> Variables:
        of_mixture = jax.grad(mixture_loss)(here, batch)  # (7) and (10)
        return of_mixture._replace(shared=gradient(loss)(here.shared, batch))  # (6)

    return evaluate


@algorithm(new_client=STEP_BY_STEP._replace(options={"aggregated": True}))
def apfl(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha,
    learn: Annotated[Learn, words(*get_args(Learn))] = "step",
    alpha_rate: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
    held_out: Annotated[float, Number(least=0, most=MOST_HELD_OUT)] = 0.0,
    hand_back: Annotated[int | None, HAND_BACK] = None,
    fresh: bool = False,
    mix: Mixing = mixing.parameters,
    local: Solver | None = None,
    aggregated: bool = True,
) -> Algorithm:
    """FedAvg's shared model, and a personal model and mixing weight on every client.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: local work of a round; w and v each have such an optimizer.
        alpha: first weight of the shared model; a number, or an array over clients.
        learn: when alpha moves: "step", "round" (with the first step) or "fixed".
        alpha_rate: optimizer of alpha, a number for plain steps; None for that of
            ``work``.
        held_out: fraction of a client's training rows on which alpha alone learns, in
            batches of the same size; 0 for the batches of v. A client with too few rows
            to hold out one keeps its alpha.
        hand_back: number of rounds after which w and v train on held-out rows too, and
            alpha stays; None for never.
        fresh: draw another batch for v (and alpha) than for w.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
        local: how v starts, from ``fedblend.solvers``; None for the initial parameters.
        aggregated: mix v with the shared model of the server; if False, with the
            client's last w_i, before the server averaged.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> data, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> loss = fb.datasets.quadratic_loss
        >>> work = fb.Work(0.1, steps=2, batch_size=None)
        >>> run = fb.simulate(fb.apfl(loss, work, alpha=0.5), jnp.zeros(2), data,
        ...                   jax.random.key(0), rounds=50).complete()
        >>> measured = fb.metrics.mean_loss(loss)
        >>> own = fb.Batch(data.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    learning = Learning(learn, alpha_rate, held_out, hand_back).check()
    train = partial(
        local_steps, gradients(loss, mix), work=work, learning=learning, fresh=fresh
    )
    inner = fedavg(loss, work)  # its server is (8)

    def enroll(params, shard, key):
        own = keys.named(key, "local model")
        personal = params if local is None else local(params, shard, own)[0]
        last = () if aggregated else params
        return (), ApflClient(personal, client_entry(alpha, shard), last)

    def client(down, client, shard, key):
        start = Variables(down.shared, client.personal, client.alpha)
        reached, mean, rows = train(start, down, shard, key)
        delta = trees.subtract(reached.shared, down.shared)
        step_sum = step_sum_of(work, rows, down.round)
        last = () if aggregated else reached.shared
        state = ApflClient(reached.personal, reached.alpha, last)
        return Up(delta, mean.shared, step_sum=step_sum), state

    def personal(down, client, shard, key):
        shared = down.shared if aggregated else client.last
        return mix(client.alpha, shared, client.personal)

    def info(client):
        return {"alpha": client.alpha}

    needs = inner.needs._replace(weights="uniform")
    return inner._replace(
        enroll=enroll, client=client, personal=personal, info=info, needs=needs
    )


@algorithm(
    sends=("update", "losses"),
    new_client=STEP_BY_STEP._replace(build=apfl),
    reads="losses",
)
def apfl_agnostic(
    loss: Loss,
    work: Work,
    *,
    clients: Count,
    q_rate: NotNegative,
    alpha: Alpha,
    learn: Annotated[Learn, words(*get_args(Learn))] = "step",
    alpha_rate: Annotated[Optimizer | None, optional(OPTIMIZER)] = None,
    held_out: Annotated[float, Number(least=0, most=MOST_HELD_OUT)] = 0.0,
) -> Algorithm:
    """Agnostic APFL: APFL over the shared model of agnostic FL.

    The shared problem is ``min over shared, max over q in the simplex of sum_i q_i
    f_i(shared)`` in place of the plain mean; client i deploys ``mix_i = alpha_i shared
    + (1 - alpha_i) v_i``. A round, for every client i of the cohort, n being all of
    them::

        w_i, v_i, alpha_i <- the local steps of ``apfl`` from shared, v_i, alpha_i
        shared <- shared + mean n q_i (w_i - shared)
        q      <- projection on the simplex of  q + q_rate * mean n f_i(shared) e_i

    with f_i at the old ``shared``, and q uniform at first. The local work is that of
    ``apfl``; the weights, the ascent in q and the messages for it are those of
    ``agnostic``. So the shared model and q are those of agnostic FL, whatever v and
    alpha do, and with alpha = 1 this is agnostic FL. A client whose q_i is 0 does not
    move the shared model, and trains v_i as any other does.

    Where this differs from the paper: the paper states the shared problem alone,
    without a method or its analysis. This is the composition of its Algorithm 1 with
    the descent and ascent of Mohri et al., and no theorem of either covers it. Alpha is
    the weight of the shared model. With ``held_out`` the ascent in q uses the losses of
    all training rows.

    Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
    arXiv:2003.13461, appendix; Mohri, Sivek, Suresh, "Agnostic federated learning",
    ICML 2019, arXiv:1902.00146.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        clients: number of clients.
        q_rate: step of the ascent in q, 0 or more.
        alpha: first weight of the shared model; a number, or an array over clients.
        learn: when alpha moves: "step", "round" (with the first step) or "fixed".
        alpha_rate: optimizer of alpha, a number for plain steps; None for that of
            ``work``.
        held_out: fraction of a client's training rows on which alpha alone learns.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.algorithms.apfl_agnostic(
        ...     fb.datasets.quadratic_loss,
        ...     fb.Work(0.1, steps=2, batch_size=None),
        ...     clients=4,
        ...     q_rate=0.1,
        ...     alpha=0.5,
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=20).complete()
        >>> run.down.extra["agnostic"].shape  # q
        (4,)
    """
    own = apfl(
        loss, work, alpha=alpha, learn=learn, alpha_rate=alpha_rate, held_out=held_out
    )
    return weigh_losses(
        own, loss, clients=clients, q_rate=q_rate, batch_size=work.batch_size
    )

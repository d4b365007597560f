# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where an algorithm under a transform ends, compared with the algorithm alone.

``python tests/contract/pairs.py`` runs every pair, or those of the algorithms it is
given, and writes the table of ``docs/pairs.md``; the tests compare both. A run is one
compiled loop: all clients take part with equal weights, and the engine has no part.

Transforms that only protect are set so that nothing is lost: clips are large and the
noise is 0. The loss of the server is that of all
clients, so that the optimum stays where it is.
"""

import re
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HOME = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HOME / "tests"), str(HOME / "tests" / "contract")]

from registry import FORMS  # noqa: E402

import example_arguments as examples  # noqa: E402
import fedblend as fb  # noqa: E402
import problems  # noqa: E402
from fedblend import compress, keys, transforms, trees  # noqa: E402
from fedblend.batches import everything  # noqa: E402
from fedblend.core import Aggregate, Algorithm, Sender  # noqa: E402, Sender
from fedblend.losses import objective  # noqa: E402
from fedblend.registry import ALGORITHMS, TRANSFORMS  # noqa: E402
from fedblend.theory.blt import Blt  # noqa: E402
from fedblend.transforms.central_loss import parameter_loss  # noqa: E402

PAGE = HOME / "docs" / "pairs.md"
CLIENTS, ROUNDS, RATE = 4, 800, 0.05
SEVERAL = (
    "scaffold",
    "scaffnew",
    "l2gd",
    *(n for n, one in ALGORITHMS.items() if one.coin),
)
"""Methods whose rounds have several steps and still end at the optimum, and L2GD, which
needs several; the others take one."""
SAME = 1e-3
"""Distance of two models of size 1 that is rounding: float32, 800 rounds, and coins."""
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiling takes longer than running."""
ENDS = {
    "=": "ends where the algorithm alone ends",
    "~": "ends near it: its loss decreases at least half as much",
    "!": "warns in one line, and may diverge",
    "-": "refused in one line",
}


class Flat(NamedTuple):
    """The parameters of the quadratics: two parts of a vector."""

    weight: jax.Array
    bias: jax.Array


class Ended(NamedTuple):
    """The shared model at the end, and the mean loss of what clients deploy."""

    shared: np.ndarray
    loss: float


@cache
def problem(algorithm: str) -> problems.Problem:
    """Quadratics; for an algorithm with a form of its own, classes in that form."""
    form = ALGORITHMS[algorithm].form
    if not form:
        return _quadratics()
    return FORMS[form](problems.classes((6,) * CLIENTS))


def _quadratics() -> problems.Problem:
    on = problems.quadratics((2,) * CLIENTS, dim=4)
    return on._replace(
        loss=lambda params, rows: on.loss(jnp.concatenate(params), rows),
        params=Flat(on.params[:2], on.params[2:]),
    )


def alone(name: str) -> Algorithm:
    """The algorithm without a transform."""
    # The server's example rate is a tenth.
    rate = 10 * RATE if "server_optimizer" in ALGORITHMS[name].parameters else RATE
    work = fb.Work(rate, steps=3 if name in SEVERAL else 1, batch_size=None)
    return examples.build(name, problem(name).loss, work, CLIENTS)


def _everything(on: problems.Problem):
    """The loss of all rows, which the server has as well."""
    rows = jax.tree.map(jnp.asarray, on.federated_data.train.examples)
    return parameter_loss(lambda params: on.loss(params, rows).mean())


PRIVATE: dict[str, Any] = {
    "clip": 1e3,
    "noise": 0.0,
    "cohort": CLIENTS,
    "noise_from": "seed",
}
WITH = {
    "adaptive_clip": lambda made, on: transforms.adaptive_clip(made, 1.0),
    "clip": lambda made, on: transforms.clip(made, 1e3),
    "common_mask": lambda made, on: transforms.common_mask(made, compress.rand_k(1)),
    "compressed": lambda made, on: transforms.compressed(made, compress.rand_k(1)),
    "diana": lambda made, on: transforms.diana(made, compress.rand_k(1)),
    "downlink": lambda made, on: transforms.downlink(made, compress.top_k(1)),
    "dp_blt": lambda made, on: transforms.dp_blt(
        made, **PRIVATE, strategy=Blt((0.75,), (0.6,))
    ),
    "dp_fedavg": lambda made, on: transforms.dp_fedavg(made, **PRIVATE),
    "ef21": lambda made, on: transforms.ef21(made, compress.top_k(1)),
    "local_dp": lambda made, on: transforms.local_dp(made, 1e3),
    "mixed_fl": lambda made, on: transforms.mixed_fl(
        made, _everything(on), how="one_way"
    ),
    "perm_k": lambda made, on: transforms.perm_k(made, clients=CLIENTS),
}
"""An example of every transform."""


def end(algorithm: Algorithm, on: problems.Problem) -> Ended:
    """Where a run ends, all clients taking part."""
    train, here = on.federated_data.train, jnp.arange(CLIENTS)
    shards = [jax.device_put(train.shard(client)) for client in range(CLIENTS)]
    shards = jax.tree.map(lambda *leaves: jnp.stack(leaves), *shards)

    def mean(messages):
        average = jax.tree.map(lambda leaf: leaf.mean(axis=0), messages)
        return Aggregate(average, jnp.ones(()), jnp.int32(CLIENTS))

    def client(down, state, shard, key):
        told = algorithm.wire.tell(down, algorithm.wire.ask(state, shard))
        up, after = algorithm.client(told, state, shard, key)
        up = up._replace(mean_gradient=None, step_sum=None)
        return algorithm.wire.decode(up, Sender(shard.id, key, down)), after

    def deployed(down, state, shard, key):
        told = algorithm.wire.tell(down, algorithm.wire.ask(state, shard))
        message = down if algorithm.needs.whole else told
        model = algorithm.personal(message, state, shard, key)
        return objective(on.loss, model, everything(shard))

    @partial(jax.jit, compiler_options=QUICKLY)
    def play(root):
        def of_all(purpose, number):
            return jax.vmap(lambda i: keys.derive(root, purpose, number, i))(here)

        joins, states = jax.vmap(partial(algorithm.enroll, on.params))(
            shards, of_all("enroll", 0)
        )
        first = keys.derive(root, "start")
        down, server = algorithm.start(on.params, mean(joins), None, first)

        def one_round(kept, number):
            down, server, states = kept
            down = down._replace(round=number)
            ups, states = jax.vmap(partial(client, down))(
                states, shards, of_all("client", number)
            )
            own = keys.derive(root, "server", number)
            down, server = algorithm.server(mean(ups), down, server, None, own)
            return (down, server, states), None

        rounds = jnp.arange(ROUNDS, dtype=jnp.int32)
        kept, _ = jax.lax.scan(one_round, (down, server, states), rounds)
        losses = jax.vmap(partial(deployed, kept[0]))(
            kept[2], shards, of_all("personal", ROUNDS)
        )
        return trees.ravel(kept[0].shared)[0], losses.mean()

    shared, loss = jax.device_get(play(jax.random.key(0)))
    return Ended(shared, float(loss))


@cache
def plain_end(algorithm: str) -> Ended:
    """Where the algorithm ends without a transform."""
    return end(alone(algorithm), problem(algorithm))


@cache
def start_loss(algorithm: str) -> float:
    """The loss of the initial model, for which a client need not be known."""
    on = problem(algorithm)
    return float(on.loss(on.params, on.federated_data.train.examples).mean())


def measured(algorithm: str, transform: str) -> str:
    """How a pair ends, a key of ``ENDS``; where it diverges, how far it is."""
    on = problem(algorithm)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            made = WITH[transform](alone(algorithm), on)
            if seen:
                return "!"
            ended = end(made, on)
        except ValueError as error:
            return "-" if is_one_line(error) else f"not refused in one line: {error}"
    return verdict(ended, plain_end(algorithm), start_loss(algorithm))


def is_one_line(error: ValueError) -> bool:
    """Whether an error says in one line who refuses what; JAX adds lines of its own."""
    line = str(error).partition("\n---")[0]
    return re.fullmatch(r"(\w+: |this algorithm sends ).+", line) is not None


def verdict(ended: Ended, plain: Ended, start: float) -> str:
    """How a run ended, compared with the plain one and with the loss at the start."""
    apart = np.abs(ended.shared - plain.shared).max()
    worse = ended.loss - plain.loss
    if apart <= SAME and abs(worse) <= SAME:
        return "="
    if np.isfinite(ended.shared).all() and worse <= (start - plain.loss) / 2:
        return "~"
    return f"diverges: {apart:.1e} away, loss {ended.loss:.3g} after {start:.3g}"


def page(text: str, cells: dict[tuple[str, str], str]) -> str:
    """The text of the page with these ends in its table."""
    heads = ["algorithm", *(f"`{name}`" for name in TRANSFORMS)]
    rows = [
        [f"`{name}`", *(f"`{cells[name, other]}`" for other in TRANSFORMS)]
        for name in ALGORITHMS
    ]
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    before, _, rest = text.partition("| algorithm |")
    return before + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2]


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """The end of every pair, from the text of the page."""
    table = text[text.index("| algorithm |") :].partition("\n\n")[0]
    (_, *heads), _, *rows = [
        [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        for line in table.splitlines()
    ]
    return {
        (name, head): cell
        for name, *ends in rows
        for head, cell in zip(heads, ends, strict=True)
    }


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    ends = cells_of(text)
    for name in sys.argv[1:] or ALGORITHMS:
        for other in TRANSFORMS:
            ends[name, other] = measured(name, other)
            print(name, other, ends[name, other], flush=True)
    PAGE.write_text(page(text, ends), encoding="utf-8")

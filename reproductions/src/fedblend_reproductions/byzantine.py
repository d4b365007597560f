# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Byzantine clients: some of the clients send something else than they computed.

Wraps an algorithm to measure how much its models depend on every client's honesty. An
attacker i trains as the algorithm says, and then sends, with ``c = factor``::

    negate          -c delta_i                          sign flipping
    scale            c delta_i
    noise            Gaussian, with c |delta_i| as root mean square of its norm
    inner_product   -c (shared - last shared)           against the server's last step

The first three change everything that a client sends, also ``up.extra`` and what it
sends at enrollment, array by array. ``inner_product`` changes the update alone: the
change of the shared model since the attacker's last round (since the initial parameters
in the first) says where the others go, and minus a small part of it lies among honest
updates where those differ much. No client's state is attacked, nor what others deploy.
All clients compute all of this; those that are no attackers send what they would have
sent.

Encoding transforms go outside. ``clip`` outside is a server that bounds what it gets,
``clip`` inside one that trusts its clients to do so. Nothing here is for nodes of a
federation.

Where this differs from the papers: attackers know the messages that they receive and
their own rows, not the updates of others. So the mean of honest updates in Xie et al.
is here the server's last step, and "a little is enough" (Baruch et al.), which needs
the deviations among the updates of several attackers, is not here.

Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries:
Byzantine tolerant gradient descent", NeurIPS 2017, arXiv:1703.02757; Xie, Koyejo,
Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation",
UAI 2019, arXiv:1903.03936; Baruch, Baruch, Goldberg, "A little is enough: circumventing
defenses for distributed learning", NeurIPS 2019, arXiv:1902.06156.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import client_entry
from fedblend.checks import Number, gate, is_traced, words
from fedblend.core import Algorithm, Key, PyTree, is_ragged
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.errors import UserError
from fedblend.transforms._compose import delta_of, wrap_inner_state

FACTORS = {"negate": 1.0, "scale": 10.0, "noise": 1.0, "inner_product": 1.0}
"""The attacks by name, and how strong they are by default."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A rule: which clients, as an array over clients of True and False."""

    clients: bool = True

    def __call__(self, key: str, value: Any) -> Any:
        """The array."""
        if is_traced(value):
            return value
        found = np.asarray(value) if isinstance(value, list | tuple) else value
        an_array = isinstance(found, np.ndarray | jax.Array) and found.ndim == 1
        if not an_array or found.dtype != bool:
            raise UserError(key, value, "an array over clients of True and False")
        return found


MASK = Mask()


class ByzantineClient(NamedTuple):
    """The state of a client: the wrapped algorithm's, and the last model it received.

    Only ``inner_product`` has it.
    """

    inner: PyTree
    last: PyTree


@gate()
def byzantine(
    algorithm: Algorithm,
    attack: Annotated[str, words(*FACTORS)],
    *,
    attackers: Annotated[np.ndarray | jax.Array | Sequence[bool], MASK],
    factor: Annotated[float | None, Number(optional=True)] = None,
) -> Algorithm:
    """The wrapped algorithm, some of whose clients send something else.

    Args:
        algorithm: what to run; encoding transforms go around this one.
        attack: "negate", "scale", "noise" or "inner_product".
        attackers: who attacks: an array over clients of True and False.
        factor: c, how strong the attack is; None for 10 with "scale", otherwise 1.
    """
    strength = FACTORS[attack] if factor is None else factor

    def choose(honest, changed, shard):
        return trees.select(client_entry(attackers, shard), changed, honest)

    def enroll(params, shard, key):
        join, state = algorithm.enroll(params, shard, key)
        return choose(join, _change(attack, strength, join, key), shard), state

    def client(down, client, shard, key):
        up, after = algorithm.client(down, client, shard, key)
        honest = up._replace(delta=delta_of(up, "byzantine"), step_sum=None)
        up_sent = choose(honest, _change(attack, strength, honest, key), shard)
        return up_sent._replace(step_sum=up.step_sum), after

    def remember(params, shard, key):
        join, inner = algorithm.enroll(params, shard, key)
        return join, ByzantineClient(inner, params)

    def oppose(down, client, shard, key):
        up, inner = algorithm.client(down, client.inner, shard, key)
        delta = delta_of(up, "byzantine")
        now = trees.fill(down.shared, client.last)
        against = trees.scale(-strength, trees.subtract(now, client.last))
        against = trees.where_given(delta, against)
        after = ByzantineClient(inner, now)
        return up._replace(delta=choose(delta, against, shard)), after

    if attack == "inner_product":
        inner = wrap_inner_state(algorithm)
        return inner._replace(enroll=remember, client=oppose)
    return algorithm._replace(enroll=enroll, client=client)


def _change(attack: str, factor: float, message: PyTree, key: Key) -> PyTree:
    """What an attacker sends instead, which only numbers that travel are part of."""
    leaves, structure = jax.tree.flatten(message, is_leaf=is_ragged)
    draws = jax.random.split(keys.named(key, "byzantine"), max(len(leaves), 1))

    def other(leaf, draw):
        if is_ragged(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        if attack != "noise":
            return trees.scale(-factor if attack == "negate" else factor, leaf)
        size = factor * jnp.sqrt(jnp.square(leaf).mean())
        return trees.scale(size, jax.random.normal(draw, leaf.shape, leaf.dtype))

    changed = [other(*pair) for pair in zip(leaves, draws, strict=False)]
    return jax.tree.unflatten(structure, changed)


@gate(federated_data=FEDERATED_DATA, attackers=MASK)
def flip_labels(
    federated_data: FederatedData, *, attackers: np.ndarray | jax.Array | Sequence[bool]
) -> FederatedData:
    """The same data, with the labels of the attackers' training rows in reverse order.

    The smallest class of all training rows becomes the largest, the next one the next:
    of classes 0 to C - 1, y becomes C - 1 - y. Rows for validation and test stay.

    Reference: Biggio, Nelson, Laskov, "Support vector machines under adversarial label
    noise", ACML 2011; Fang, Cao, Jia, Gong, "Local model poisoning attacks to
    Byzantine-robust federated learning", USENIX Security 2020, arXiv:1911.11815.

    Args:
        federated_data: the clients; examples are (inputs, labels).
        attackers: whose labels are flipped: an array over clients of True and False.

    >>> import fedblend as fb
    >>> data = fb.federate((np.zeros((4, 1)), np.array([0, 1, 2, 2])), [[0, 1], [2, 3]])
    >>> sorted(flip_labels(data, attackers=[True, False]).train.rows(0)[1].tolist())
    [1, 2]
    """
    train, attack = federated_data.train, np.asarray(attackers)
    inputs, labels, *others = train.examples
    classes = np.unique(labels)
    whole = np.issubdtype(labels.dtype, np.integer)
    if labels.ndim != 1 or not (whole or len(classes) == 2):
        allowed = "labels of classes, one for each row"
        said = f"{labels.dtype} of shape {labels.shape}"
        raise UserError("flip_labels: federated_data", labels, allowed, said)
    if len(attack) != federated_data.clients:
        allowed = f"one for each of the {federated_data.clients} clients"
        raise UserError("flip_labels: attackers", attack, allowed)
    flipped = np.array(labels)
    for start, count in zip(train.starts[attack], train.counts[attack], strict=True):
        own = slice(start, start + count)
        flipped[own] = classes[0] + classes[-1] - labels[own]
    examples = (inputs, flipped, *others)
    return dataclasses.replace(
        federated_data, train=dataclasses.replace(train, examples=examples)
    )

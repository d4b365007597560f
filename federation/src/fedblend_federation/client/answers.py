# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The answers of a node: to enrollment, to a round, to a measurement.

An answer that is on disk is sent again. Otherwise the request is checked against the
allowance, the audit gets a line before the work begins, the new state is written, and
then the ledger, before the answer itself.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend.core import PyTree
from fedblend.simulation.serialize import (
    build_tree,
    pack,
    traveling,
    unpack,
    write_atomically,
)
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.client.executor import Executor, Measured
from fedblend_federation.client.ledger import Charge, Ledger, row_key
from fedblend_federation.message import ENROLLED, Message, encode
from fedblend_federation.policy.limits import STEPS
from fedblend_federation.policy.policy import Permissions, Refusal, refusal_line


class Job(NamedTuple):
    """A request, and all that its answer depends on."""

    request: Message
    digest: str
    executor: Executor
    permissions: Permissions
    ledger: Ledger
    place: Path
    """The folder of the experiment, in that of the node."""
    note: Callable[..., str]
    told: Mapping[str, Any] = {}
    """What every reply tells the server."""
    secure: Any = None
    """What secure sums need, where the experiment has them; see ``secure.answers``."""

    def refusal(self, charge: Charge) -> str:
        """Why a charge exceeds the allowance, in one line; empty if it does not."""
        policy = self.permissions.policy
        return self.ledger.refusal(policy, self.request.experiment, charge)

    def begin(self, charge: Charge) -> float:
        """Refuse what exceeds the allowance, else note that work begins; the time."""
        refusal = self.refusal(charge)
        if refusal:
            raise Refusal(refusal)
        self.record("begins", message=self.request.kind, round=self.request.round)
        return time.monotonic()

    def add_row_cost(self, charge: Charge) -> Charge:
        """A charge with what the work since the last call cost single rows.

        Raises:
            Refusal: that exceeds the allowance; nothing of the work may leave.
        """
        steps = row_steps(self.executor)
        bare = steps is None and charge.answers > 0
        found = charge._replace(row_steps=steps or {}, bare_rows=bare)
        refusal = self.refusal(found)
        if refusal:
            raise Refusal(refusal)
        return found

    def look_at_clock(self, started: float) -> None:
        """Refuse to go on with a request that takes too long; the ledger counts it."""
        seconds = time.monotonic() - started
        limit = self.permissions.policy.limits.seconds
        if seconds > limit:
            self.charge(Charge(), started)
            found, most = f"{seconds:.1f} s", f"at most {limit:g} s"
            raise Refusal(refusal_line("limits.seconds", "a request", found, most))

    def charge(self, charge: Charge, started: float, *, over: bool = False) -> None:
        """Write to the ledger what is about to leave the node."""
        experiment, seconds = self.request.experiment, time.monotonic() - started
        self.ledger.charge(experiment, self.digest, charge, seconds)
        self.ledger.account(experiment).over = over
        self.ledger.write(self.place.parent)

    def record(self, event: str, **fields: Any) -> str:
        """Note what was done; the newest hash of the audit."""
        return self.note(event, experiment=self.request.experiment, **fields)

    def state(self) -> PyTree:
        """The state that the request starts from."""
        found = states.read_state(self.place, self.request.base, self.executor.state)
        return jax.tree.map(jnp.asarray, found)


def enroll(job: Job) -> bytes:
    """The node's part of enrollment."""
    executor, place, request = job.executor, job.place, job.request
    setup = executor.setup
    sent = states.read_reply(place, ENROLLED, job.digest, setup.protection)
    if sent is not None:
        job.record("enrolled")
        return sent
    params = jax.tree.map(jnp.asarray, build_tree(request.arrays, setup.params))
    cost = _cost(executor) if jax.tree.leaves(executor.join) else Charge()
    started = job.begin(cost)
    join, state = jax.block_until_ready(executor.enroll(params))
    cost = job.add_row_cost(cost)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(place / "params", pack(params))
    states.write_state(place, ENROLLED, state, job.digest)
    states.write_fingerprints(place, [executor.setup.fingerprint])
    states.write_terms(place, request.fields, job.digest)
    job.charge(cost, started)
    head = request.reply(audit=job.record("enrolled"), **job.told)
    reply = encode(head, (join, executor.ask(state)))
    states.write_reply(place, ENROLLED, job.digest, setup.protection, reply)
    return reply


def train(job: Job) -> bytes:
    """The client's update of a round."""
    place, round, protection = job.place, job.request.round, protection_of(job)
    sent = states.read_reply(place, round, job.digest, protection)
    if sent is not None:
        job.record("round", round=round)
        return sent
    reply = encode(*compute_update(job))
    states.write_reply(place, round, job.digest, protection, reply)
    return reply


def protection_of(job: Job) -> str:
    """Names what the update of a round depends on besides the request.

    Raises:
        Refusal: there is no such round, or its noise was drawn for another request.
    """
    setup, place, round = job.executor.setup, job.place, job.request.round
    if round >= setup.rounds:
        raise Refusal(f"message: round {round} of an experiment of {setup.rounds}")
    if setup.perturb is None:
        # Where messages are empty only the state tells two histories apart.
        origin = states.hash_of_state(place, job.request.base)
        return f"{setup.protection} from {origin}"
    if not states.is_first_request(place, round, job.digest):
        raise Refusal(
            f"message: round {round} was asked for with another message; under "
            "noise it is computed once"
        )
    return setup.protection


def compute_update(job: Job) -> tuple[Message, tuple[PyTree, PyTree]]:
    """The head of a reply, the client's update of a round and what it asks for."""
    executor, place, request = job.executor, job.place, job.request
    setup, round, state = executor.setup, request.round, job.state()
    down = read_payload(executor, request, executor.message)
    _check_counts(down.extra)
    cost = _cost(executor)
    started = job.begin(cost)
    up, after = jax.block_until_ready(executor.update(down, state))
    cost = job.add_row_cost(cost)
    states.write_state(place, round, after, job.digest)
    states.remove_old(place, request.base, round)
    ask = _new_ask(executor, state, after)
    asks = bool(jax.tree.leaves(ask))
    job.charge(cost, started)
    audit = job.record("round", round=round)
    head = request.reply(asked=asks, audit=audit, **job.told)
    return head, (up if setup.perturb is None else setup.perturb(up), ask)


def measure(job: Job) -> bytes:
    """The measures of the client's model that the policy discloses.

    The last measurement is always made, because the client deploys its model. If it is
    one too many, nothing of it is sent.
    """
    executor, place, request = job.executor, job.place, job.request
    setup, round, event = executor.setup, request.round, {}
    if round > setup.rounds:
        raise Refusal(
            f"message: a measure after round {round} of an experiment of {setup.rounds}"
        )
    origin = f"from {states.hash_of_state(place, request.base)}"
    sent = states.read_reply(place, "measures", job.digest, origin)
    if sent is not None:
        job.record("measured", round=round)
        return sent
    state = job.state()
    deployed = read_payload(executor, request, executor.deployment)
    _check_counts(deployed.message.extra)
    last, wanted = bool(request.fields.get("last")), Charge(measures=1)
    withheld = job.refusal(wanted) if last else ""
    started = job.begin(Charge() if withheld else wanted)
    model, measured = executor.measure(deployed, state)
    metadata = {"format": "fedblend", "round": str(round), "client": str(setup.client)}
    write_atomically(place / states.MODEL, pack(model, metadata))
    if last and setup.alone is not None:
        arrays, _ = unpack((place / "params").read_bytes())
        alone, budget = executor.train_alone(
            build_tree(arrays, setup.params), partial(job.look_at_clock, started)
        )
        for split, values in alone.items():
            measured[split]["local"] = values
        event["rounds_alone"] = budget.rounds
    counts = {name: split.total for name, split in setup.splits.items()}
    write_atomically(place / "measures.json", json.dumps(measured).encode())
    shown, cost = {}, Charge()
    if withheld:
        event["withheld"] = withheld
    else:
        shown = job.permissions.disclose(measured, counts)
        cost = _cost_of_measures(shown, job.permissions.policy.metrics.noise)
    # A personal model may have been trained for this, on noisy gradients.
    cost = cost._replace(row_steps=row_steps(executor) or {})
    job.charge(cost, started, over=last)
    sent_models = {split: sorted(models) for split, models in shown.items()}
    audit = job.record("measured", round=round, sent=sent_models, **event)
    reply = encode(request.reply(measures=shown, audit=audit, **job.told))
    states.write_reply(place, "measures", job.digest, origin, reply)
    return reply


ANSWERS = {"enroll": enroll, "round": train, "measure": measure}
"""By the kind of the message."""


def row_steps(executor: Executor) -> Mapping[str, int] | None:
    """Evaluations of noisy gradients since the last call; None without noise.

    A server that knows the batches chooses a seed by which a row is in all of them.
    """
    hidden, found = executor.setup.hidden, Counter[str]()
    if hidden is None:
        return None
    jax.effects_barrier()  # noise is added, and counted, on the host
    for share, times in hidden.take_spent().items():
        known = executor.setup.secret is None
        found[row_key(hidden.noise, 1.0 if known else share)] += times
    return found


def _cost(executor: Executor) -> Charge:
    """What an answer of this experiment costs."""
    setup = executor.setup
    return Charge(answers=1, rows=executor.train_rows, squared=setup.squared)


def _cost_of_measures(shown: Measured, noise: float) -> Charge:
    """What a measurement costs; each number is a Gaussian mechanism of its own."""
    numbers = sum(
        len(values) for models in shown.values() for values in models.values()
    )
    squared = inf if numbers and not noise else numbers / max(noise, 1e-9) ** 2
    return Charge(measures=1, measures_squared=squared)


def _check_counts(extra: PyTree) -> None:
    """Refuse a message that says how many steps to take, and says too many."""
    for leaf in jax.tree.leaves(extra):
        count = jnp.issubdtype(leaf.dtype, jnp.signedinteger) and leaf.ndim == 0
        if count and int(leaf) > STEPS:
            most = f"at most {STEPS}"
            where = "a number in the message"
            raise Refusal(refusal_line("limits", where, int(leaf), most))


def read_payload(executor: Executor, request: Message, template: Any) -> Any:
    """The server's message, or deployment; the number of its round is in the head."""
    found = messages.payload_of(request, _set_round(template, None))
    found = jax.tree.map(jnp.asarray, found)
    return _set_round(found, jnp.asarray(request.round, jnp.int32))


def _set_round(sent: Any, round: jax.Array | None) -> Any:
    if hasattr(sent, "message"):
        return sent._replace(message=sent.message._replace(round=round))
    return sent._replace(round=round)


def _new_ask(executor: Executor, before: PyTree, after: PyTree) -> PyTree:
    """What the client asks for, if a round has changed it; else nothing travels."""
    if not jax.tree.leaves(executor.request):
        return ()
    old, new = (pack(traveling(executor.ask(state))) for state in (before, after))
    return () if old == new else executor.ask(after)

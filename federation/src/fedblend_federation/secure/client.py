# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node answers in an experiment with secure sums, and when it refuses.

The update is computed as without masks, see ``client.answers``, and stays on the node's
disk: what leaves is masked, anew for every attempt at the sum of a round. A request
that comes again gets the same answer, another one for the same round a refusal.

It keeps, beside what ``client.state`` keeps of an experiment::

    secure.secret  drawn at random, once for an experiment
    masked-R       the newest attempt at round R that was answered: what the node was
                   told before, and its answer without masks
    opened-R       what the node gave to open the sum of round R

The node compares a request with the rounds before, by the ``story`` of messages in the
state of a round, and with the sums that it opened, which its ledger keeps over all
experiments.
"""

import base64
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedblend_federation.client import answers, state
from fedblend_federation.client.answers import Job
from fedblend_federation.message import (
    ENROLLED,
    UNKNOWN,
    decode,
    digest_of,
    encode,
    payload_of,
)
from fedblend_federation.policy.policy import Refusal, refusal_line
from fedblend_federation.secure import flatten
from fedblend_federation.secure.flatten import FixedPoint, coarse
from fedblend_federation.secure.masks import SecureError
from fedblend_federation.secure.session import (
    MAX_ATTEMPTS,
    Attempt,
    Party,
    View,
    least_of,
    most_colluding,
    some_of,
    story,
)

MOST_WEIGHT = 2.0**31
"""Beyond it rounding would leave the largest numbers of few clients."""
MOST_CLIPPED = 0.01
"""Fraction of an answer's numbers. What is clipped tells a sign, and nothing else of an
answer hides it."""


class Means(NamedTuple):
    """What a node needs for the secure sums of an experiment."""

    bits: int
    clip: float
    """Both as in ``FixedPoint``."""
    weights: str | None
    """"uniform", or "by_count" for training rows; the algorithm's own if None."""
    private: X25519PrivateKey
    roster: Mapping[int, bytes]
    """The public keys of all nodes, by client."""
    least: int
    """Nodes that a sum must have; a node's policy decides."""
    colluding: int = 0
    """Of other nodes, how many may collude with the server; they are in ``least``."""
    names: Mapping[int, str] = {}
    """Of the nodes, by client; a client without one is a node of its own."""

    def node(self, client: int) -> str:
        """The node that a client is on."""
        return self.names.get(client, str(client))


def enroll(job: Job) -> bytes:
    """Enrollment; what an algorithm sends with it stays here, for ``join``.

    States of one enrollment are not for rounds of another one.
    """
    _check_summable(job)
    with suppress(FileNotFoundError):
        if state.enrollment_digest(job.place) != job.digest:
            raise Refusal(
                "message: this node was enrolled in this experiment with other terms, "
                "or other first parameters"
            )
    return encode(decode(answers.enroll(job)))


def share(job: Job) -> bytes:
    """Shares of this node's secrets of an attempt, for its holders."""
    told, payload = _share_secrets(job)
    number = job.request.fields["attempt"]
    audit = job.record("shared", round=job.request.round, attempt=number)
    return encode(job.request.reply(**told, audit=audit), payload)


def _share_secrets(job: Job) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Words and numbers with which a node shares in the attempt of a request."""
    attempt = _attempt(job)
    refuse_opened(job)
    sent = _party(job, attempt).share()
    told = {"attempt": attempt.digest.hex(), "nonce": sent.nonce}
    payload = {"boxes": _table(sent.boxes), "seeds": _bytes(sent.seeds)}
    return {**told, "least": _means(job).least}, payload


def join(job: Job) -> bytes:
    """What the algorithm sends at enrollment, masked."""
    if job.request.round != ENROLLED:
        raise Refusal(f"message: nothing joins in round {job.request.round}")
    enrolled = state.read_record(job.place, f"reply-{ENROLLED}")
    if enrolled is None:
        raise Refusal("reply: this node has lost its reply to the enrollment")
    kept = decode(enrolled.data)

    def values() -> np.ndarray:
        own, _ = payload_of(kept, (job.executor.join, ()))
        return flatten.flatten(own)

    return _mask_answer(job, "", "", kept.digest, values)


def train(job: Job) -> bytes:
    """The client's update of a round, masked."""
    plain, attempt = job.request._replace(fields={}), _attempt(job).digest.hex()
    model = digest_of(plain._replace(round=UNKNOWN, base=UNKNOWN))
    broadcast = story(story_before(job), [model])
    if job.executor.setup.perturb is not None:
        # Noise is drawn once for a round, and hides what two cohorts differ by.
        attempt = f"{plain.experiment} {plain.round}"
    name = f"{broadcast} from {plain.base} in {attempt}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    executor = job.executor.request_executor(digest)
    # The state of the round keeps its story.
    kept = f"{digest} {broadcast}"
    own = job._replace(request=plain, digest=kept, executor=executor)

    def values() -> np.ndarray:
        _, (up, _) = answers.compute_update(own)
        down = answers.read_payload(executor, plain, executor.message)
        return flatten.Summand(executor.setup.algorithm, up, down).vector(up, down)

    source = f"{digest} {answers.protection_of(own)}"
    return _mask_answer(job, broadcast, model if plain.arrays else "", source, values)


def unmask(job: Job) -> bytes:
    """What opens a sum: this node's shares, for one view of a round and no other."""
    experiment, round = job.request.experiment, job.request.round
    record = state.read_record(job.place, f"opened-{round}")
    if record is None or record.about["digest"] != job.digest:
        record = _open_sum(job)
    job.ledger.enter_sum(experiment, round, *record.about["sum"])
    job.ledger.write(job.place.parent)
    return record.data


def _open_sum(job: Job) -> state.Record:
    """Open a sum; what the node gives is on disk."""
    attempt, place, round = _attempt(job), job.place, job.request.round
    refuse_opened(job)
    answer = state.read_record(place, f"masked-{round}")
    masked = {} if answer is None else answer.about
    if masked.get("attempt") != attempt.digest.hex():
        raise Refusal(f"message: this node has no answer in this attempt at {round}")
    view = View(*masked["view"])
    view = view._replace(nonces={int(c): n for c, n in view.nonces.items()})
    answered = some_of(job.request.fields.get("answered"), view.nonces, "sharers")
    _check_enough(job, attempt, answered, "answered")
    summed = [*masked["sum"], answered]
    refuse_near(job, _means(job).least, *summed)
    boxes = _boxes(job, attempt, view)
    found = _party(job, attempt).open(view, answered, boxes)
    about = {"round": round, "clients": len(answered), "attempt": attempt.digest.hex()}
    audit = job.record("opened", **about)
    payload = {
        "tokens": _table(found.tokens),
        "key_shares": _table(found.key_shares),
        "own": _bytes(found.own),
        "box": _bytes(found.box),
    }
    told, early = _share_for_next(job)
    head = job.request.reply(audit=audit, damaged=found.damaged, **told)
    reply = encode(head, {**payload, **early})
    about = {"digest": job.digest, "sum": summed}
    state.write_record(place, f"opened-{round}", about, reply)
    for kind in ("masked", "opened"):
        for old in state.rounds(place, kind)[: -state.STATES]:
            (place / f"{kind}-{old}").unlink()
    return state.Record(about, reply)


def _share_for_next(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the node shares for the next round, if it is asked to and may take part."""
    asked = job.request.fields.get("next")
    if not isinstance(asked, dict):
        return {}, {}
    request = job.request._replace(round=job.request.round + 1, fields=asked)
    try:
        told, payload = _share_secrets(job._replace(request=request))
    except (Refusal, SecureError):
        return {}, {}
    return {"next": told}, {"next": payload}


ANSWERS = {
    **answers.ANSWERS,
    "enroll": enroll,
    "share": share,
    "join": join,
    "round": train,
    "unmask": unmask,
}
"""By the kind of the message, in an experiment whose sums are secure."""


def _mask_answer(
    job: Job, broadcast: str, model: str, source: str, values: Callable[[], np.ndarray]
) -> bytes:
    """One masked answer in an attempt; what it was is on disk before it leaves.

    Whether a node answers must not depend on its rows, or a server would learn of them
    without any sum. An answer that is not finite is zeros in the sum. One with too many
    numbers to clip is shrunk until all of them fit: zeros would leave the sum to those
    few whose numbers are small. Only the node's audit shows either.

    Args:
        job: the request.
        broadcast: of the view.
        model: a hash of the message of the round; empty if it has none.
        source: names all that the answer depends on; an answer that is on disk is
            masked again, in a later attempt too.
        values: computes the answer.
    """
    attempt, place, round = _attempt(job), job.place, job.request.round
    name, number = attempt.digest.hex(), attempt.number
    before = state.read_record(place, f"masked-{round}")
    known: dict[str, Any] = {} if before is None else before.about
    again = (known.get("attempt"), known.get("digest")) == (name, job.digest)
    if not again and number <= known.get("number", -1):
        raise Refusal(
            f"message: attempt {known['number']} at round {round} was answered, and is "
            "asked for with another message or cohort"
        )
    refuse_opened(job)
    view, weight = _view(job, attempt, broadcast)
    # Without a message an answer depends on the node's state alone.
    model = model or f"{attempt.terms} {round}"
    summed = f"{_weights(job)} {model}", str(view.largest)
    least, sharing = _means(job).least, list(view.nonces)
    refuse_near(job, least, *summed, sharing)
    # Before it is settled whose sum this is: who spoils boxes can be left out.
    damaged = _party(job, attempt).find_damaged(_boxes(job, attempt, view))
    if before is not None and known["source"] == source:
        own = np.frombuffer(before.data, known["dtype"]).astype(np.float64)
    elif again:
        raise Refusal(
            "update: differs from the first answer; a mask hides one answer only"
        )
    else:
        own = values()
    if not again:
        about = {
            "attempt": name,
            "number": number,
            "digest": job.digest,
            "source": source,
            "sum": summed,
            "view": [dict(view.nonces), *view[1:]],
        }
        short = own.astype(np.float32)
        kept = short if (short == own).all() else own
        about["dtype"] = kept.dtype.name
        state.write_record(place, f"masked-{round}", about, kept.tobytes())
    encoding, zeros = attempt.fixed_point, not np.isfinite(own).all()
    own = np.zeros_like(own) if zeros else own
    clipped = encoding.count_clipped(own, weight)
    shrunk = clipped > MOST_CLIPPED * own.size
    if shrunk:
        own = own * (encoding.clip / np.abs(own * weight).max())
    # The server gets the hash of this line, and must not find the line by trying.
    about = {"clipped": clipped, "shrunk": shrunk, "zeros": zeros}
    audit = job.record("masked", round=round, **about, salt=secrets.token_hex(16))
    sent = _party(job, attempt).mask(encoding.encode(own, weight), view)
    head = job.request.reply(audit=audit, damaged=damaged, **job.told)
    return encode(head, {"masked": sent})


def _view(job: Job, attempt: Attempt, broadcast: str) -> tuple[View, float]:
    """What the node is told before it answers, and its own weight."""
    fields = job.request.fields
    nonces: Any = fields.get("nonces")
    if not isinstance(nonces, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str)
        for pair in nonces
    ):
        raise Refusal("message: does not say who has shared")
    sharing = some_of([client for client, _ in nonces], attempt.keys, "members")
    _check_enough(job, attempt, sharing, "shared")
    largest: Any = fields.get("largest")
    if type(largest) is not float or not 0 < largest <= MOST_WEIGHT:
        raise Refusal(f"message: {largest!r:.40} is not a largest weight")
    rows = 1 if _weights(job) == "uniform" else job.executor.train_rows
    view = View({client: nonce for client, nonce in nonces}, broadcast, largest)
    return view, min(float(coarse(np.asarray(float(rows)))), largest) / largest


def _boxes(job: Job, attempt: Attempt, view: View) -> dict[int, bytes]:
    """The boxes with the shares for this node, by the client they are of."""
    others = attempt.graph.neighbors(job.request.client, view.nonces)
    sent: Any = job.request.fields.get("boxes")
    try:
        found = [base64.b64decode(box, validate=True) for box in sent]
    except (TypeError, ValueError):
        found = []
    if len(found) != len(others):
        raise Refusal("message: has no boxes with the shares of the other nodes")
    return dict(zip(others, found, strict=True))


def _check_enough(job: Job, attempt: Attempt, some: Sequence[int], what: str) -> None:
    """Refuse a sum of too few, or one that this node is not in."""
    own, all, means = job.request.client, len(attempt.keys), _means(job)
    if own not in some:
        raise Refusal(f"message: client {own} {what}, and is not among those who did")
    _check_nodes(means, some)
    holders = 1 + len(attempt.graph.neighbors(own, some))
    if len(some) < least_of(all) or holders < attempt.graph.threshold:
        raise Refusal(
            f"message: {len(some)} of {all} clients {what}; allowed: at least "
            f"{least_of(all)}, two thirds of the cohort"
        )


def _check_nodes(means: Means, some: Sequence[int]) -> None:
    """Refuse a sum of clients on too few nodes."""
    count = len({means.node(client) for client in some})
    if count < means.least:
        allowed = f"at least {means.least}"
        if means.colluding:
            allowed += f", {means.colluding} of which may collude"
        value = f"of {count} nodes"
        raise Refusal(refusal_line("accept.min_cohort", "a sum", value, allowed))


def _check_collusion(means: Means, members: Sequence[int], client: int) -> None:
    """Refuse a cohort in which nodes that collude could open a single answer.

    Shares are those of clients: a node has as many as it has clients in the cohort.
    """
    others = Counter(means.node(one) for one in members)
    del others[means.node(client)]
    found = sum(count for _, count in others.most_common(means.colluding))
    most = most_colluding(len(members))
    if found > most:
        where = f"the number of clients of {means.colluding} other nodes"
        allowed = f"at most {most} in a cohort of {len(members)}"
        raise Refusal(refusal_line("accept.colluding", where, found, allowed))


def _attempt(job: Job) -> Attempt:
    """The attempt that a request is of, with the keys of this node's roster."""
    fields, means, client = job.request.fields, _means(job), job.request.client
    number: Any = fields.get("attempt")
    if job.request.round < ENROLLED:
        raise Refusal(f"message: there is no round {job.request.round}")
    if type(number) is not int or not 0 <= number < MAX_ATTEMPTS:
        raise Refusal(f"message: {number!r:.40} is not the number of an attempt")
    members = some_of(fields.get("members"), means.roster, "nodes of roster.toml")
    if client not in members:
        raise Refusal(f"message: client {client} is not a member of this cohort")
    _check_nodes(means, members)
    _check_collusion(means, members, client)
    fixed_point = FixedPoint(means.bits, means.clip, len(members))
    own = {member: means.roster[member] for member in members}
    terms, request = state.enrollment_digest(job.place), job.request
    return Attempt(request.experiment, request.round, number, own, fixed_point, terms)


def _weights(job: Job) -> str:
    return _means(job).weights or job.executor.setup.algorithm.needs.weights


def _check_summable(job: Job) -> Any:
    """Shapes of the client's answer, if answers of this algorithm can be summed."""
    executor = job.executor
    up, _ = jax.eval_shape(executor.update, executor.message, executor.state)
    reason = flatten.refusal(
        executor.setup.algorithm, up, executor.request, executor.message
    )
    if reason is not None:
        raise Refusal(reason)
    return up


def _means(job: Job) -> Means:
    assert isinstance(job.secure, Means)
    return job.secure


def _party(job: Job, attempt: Attempt) -> Party:
    """The node in an attempt; its secret is one of the experiment."""
    secret = state.read_secret(job.place, "secure.secret")
    return Party(attempt, job.request.client, _means(job).private, secret)


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _table(rows: Sequence[bytes]) -> np.ndarray:
    """Rows of bytes of the same length."""
    return np.array([np.frombuffer(row, np.uint8) for row in rows], np.uint8)


def story_before(job: Job) -> str:
    """That of all rounds before the one that is asked for.

    It is that of the state which the round starts from, with the messages since, of
    which the request has the hashes.
    """
    base, before = job.request.base, ""
    if base != ENROLLED:
        before = state.request_of(job.place, base).partition(" ")[2]
    missed: Any = job.request.fields.get("missed")
    fits = isinstance(missed, list) and all(isinstance(one, str) for one in missed)
    if not fits or len(missed) != job.request.round - 1 - base:
        raise Refusal("message: does not say what this node has missed")
    return story(before, missed)


def refuse_opened(job: Job) -> None:
    """Refuse all but repetitions once a sum of this round, or a later one, is open.

    The sums of two attempts may differ by one client's answer.
    """
    round, known = job.request.round, job.ledger.opened
    newest = known.get(job.request.experiment, UNKNOWN)
    if round <= newest:
        raise Refusal(
            f"message: a sum of round {newest} was opened; of a round that is not "
            "later no other sum is"
        )


def refuse_near(
    job: Job, least: int, model: str, weights: str, cohort: list[int]
) -> None:
    """Refuse a sum that differs by few clients from another one of the same model.

    The difference of the two sums would be their answers; so it is where the same
    clients have other weights.
    """
    differ = job.ledger.nearest(model, weights, cohort)
    if differ < least:
        raise Refusal(
            "policy accept.min_cohort: an opened sum of this model differs by "
            f"{differ} clients or by weights; allowed: the same sum again, or one with "
            f"at least {least} other clients"
        )

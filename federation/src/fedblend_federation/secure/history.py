# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node holds against a request in a secure sum: earlier rounds, earlier sums.

The state of a round keeps the ``story`` of the messages that it depends on, and the
ledger which sums were opened, over all experiments.
"""

from typing import Any

from fedblend_federation.client import state
from fedblend_federation.client.answers import Job
from fedblend_federation.client.permissions import Refusal
from fedblend_federation.message import ENROLLED, UNKNOWN
from fedblend_federation.secure.attempt import story


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
            "policy accept.min_cohort: a sum of this model was opened, with other "
            f"weights or {differ} other clients; allowed: the same, or {least} others"
        )

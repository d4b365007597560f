# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Linear models of all clients at their optimum, with all rows in one place.

Models are vectors of outputs times 1 + inputs entries, an output's intercept before its
slopes. ``hierarchical_models`` and ``flix_models`` minimize what
``algorithms.hierarchical`` and ``algorithms.flix`` minimize in rounds, by Newton's
method with step halving on all variables at once. Each step needs one letter of every
client, the derivatives of its loss at its model, and ``selection.one_letter`` solves
for all models. For squared errors one step is exact.

*Times until an event*: the loss is minus the logarithm of Cox's partial likelihood, in
which only rows of the same client are at risk together. A client's own hazard takes the
place of an intercept, which is 0.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, log_expit, log_softmax, xlogy

from fedblend.data.dataset import NUMBERS
from fedblend.selection.one_letter import (
    Letters,
    eliminate,
    newton_step,
    solve_singular,
)
from fedblend.stats.survival import RiskSets

MOST_STEPS = 30
TOLERANCE = 1e-9
"""A step that promises to lower the objective by a smaller part of its first value is
the last."""
BLOCK = 2**15
"""Rows of a large table that are multiplied at once: more need memory, and no time."""


class PooledRows:
    """Rows of all clients, one client after another.

    ``inputs`` are [rows, 1 + inputs], ones first; ``counts`` the rows of each client;
    ``ranks`` what a network reads besides, [rows, ranks]; ``letters`` is how many each
    client has written for models of these rows.
    """

    def __init__(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        counts: np.ndarray,
        ranks: np.ndarray | None = None,
    ):
        self.inputs, self.targets, self.counts = inputs, targets, counts
        self.ranks = np.empty((len(inputs), 0)) if ranks is None else ranks
        self.letters = 0
        ends = np.cumsum(counts)
        self.clients = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]

    @classmethod
    def read(cls, *splits: Any, ranks: int = 0) -> "PooledRows":
        """The rows of splits of the same clients, whose last inputs are ``ranks``."""
        inputs, targets, owner = read_rows(splits)
        order = np.argsort(owner, kind="stable")
        width = inputs.shape[1] - ranks
        plain = np.ones((len(order), 1 + width))
        for place in range(width):  # column by column: no second copy
            plain[:, 1 + place] = inputs[order, place]
        counts = np.sum([one.counts for one in splits], axis=0)
        return cls(plain, targets[order], counts, inputs[order, width:])

    def take(self, kept: np.ndarray) -> "PooledRows":
        """Some of the rows, which this mask is about."""
        counts = np.array([int(kept[at].sum()) for at in self.clients])
        return PooledRows(self.inputs[kept], self.targets[kept], counts)

    @cached_property
    def grams(self) -> np.ndarray:
        """Every client's curvature for squared errors."""
        parts = [self.inputs[at] for at in self.clients]
        return np.stack([part.T @ part for part in parts])

    @cached_property
    def risk_sets(self) -> list[RiskSets]:
        """Every client's rows in order of time, where targets are times."""
        return [RiskSets(self.targets[at]) for at in self.clients]

    def scores(self, models: np.ndarray) -> np.ndarray:
        """[rows, outputs] by the model of each row's client, or by one for all."""
        shaped = models.reshape(len(models), -1, self.inputs.shape[1])
        if len(models) == 1:
            return self.inputs @ shaped[0].T
        parts = zip(self.clients, shaped, strict=True)
        return np.concatenate([self.inputs[at] @ model.T for at, model in parts])


def repeat_clients(counts: np.ndarray) -> np.ndarray:
    """The client of each row.

    >>> repeat_clients(np.array([2, 1]))
    array([0, 0, 1])
    """
    return np.repeat(np.arange(len(counts)), counts)


def row_order(shards: Any) -> np.ndarray:
    """Where the rows of a split are in its arrays, one client after another."""
    counts = np.asarray(shards.counts)
    skipped = np.asarray(shards.starts) - np.cumsum(counts) + counts
    return np.arange(counts.sum()) + np.repeat(skipped, counts)


def read_rows(splits: Iterable[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs [rows, inputs], targets and clients of the rows of splits together."""
    found = []
    for split in splits:
        at, (inputs, targets) = row_order(split), map(np.asarray, split.examples)
        rows = inputs.reshape(len(inputs), -1)[at], targets[at]
        found.append((*rows, repeat_clients(split.counts)))
    inputs, targets, owner = map(np.concatenate, zip(*found, strict=True))
    return inputs, targets, owner


def losses(kind: str, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The criterion of single rows: squared error, Poisson deviance, or log loss."""
    if kind == "regression":
        return (scores[:, 0] - targets.reshape(len(scores))) ** 2
    if kind == "counts":
        with np.errstate(over="ignore"):
            mean = np.exp(scores[:, 0])
        whole = mean - targets * scores[:, 0] + xlogy(targets, targets) - targets
        return 2 * whole
    if scores.shape[1] == 1:
        return -log_expit(np.where(targets > 0, scores[:, 0], -scores[:, 0]))
    return -log_softmax(scores, axis=1)[np.arange(len(scores)), targets]


def cox_losses(rows: PooledRows, scores: np.ndarray) -> np.ndarray:
    """Minus the logarithm of the partial likelihood of every client's rows."""
    parts = zip(rows.risk_sets, rows.clients, strict=True)
    return np.array([sets.loss(scores[at, 0]) for sets, at in parts])


def _objective(kind: str, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """What is minimized: half the squared error, or half the deviance."""
    return losses(kind, scores, targets) / (2 if kind in NUMBERS else 1)


def _derivatives(kind: str, scores: np.ndarray, targets: np.ndarray):
    """Of the loss in the scores: [rows, outputs], and [rows, outputs, outputs]."""
    if kind == "regression":
        gap = scores - targets.reshape(len(scores), 1)
        return gap, np.ones((len(scores), 1, 1))
    if kind == "counts":
        return np.exp(scores) - targets[:, None], np.exp(scores)[:, :, None]
    if scores.shape[1] == 1:
        chance = expit(scores)
        return chance - (targets[:, None] > 0), (chance * (1 - chance))[:, :, None]
    chance, every = np.exp(log_softmax(scores, axis=1)), np.eye(scores.shape[1])
    return chance - every[targets], chance[:, :, None] * (every - chance[:, None, :])


def _curvature(
    inputs: np.ndarray, second: np.ndarray, others: np.ndarray | None = None
) -> np.ndarray:
    """The Hessian in the entries of a model, and of one of other inputs if given."""
    others = inputs if others is None else others
    outputs, width = second.shape[1], inputs.shape[1]
    found = np.zeros((outputs, width, outputs, others.shape[1]))
    for first in range(0, len(inputs), BLOCK):
        some = slice(first, first + BLOCK)
        x, bend, y = inputs[some], second[some], others[some]
        for left in range(outputs):
            for right in range(outputs):
                found[left, :, right] += (x.T * bend[:, left, right]) @ y
    return found.reshape(outputs * width, -1)


def write_derivatives(
    kind: str, rows: PooledRows, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient and the Hessian of every client's loss, whose rows score this.

    It is what a client sends in a round: [clients, entries], with one axis more.
    """
    if kind == "survival":
        parts = zip(rows.risk_sets, rows.clients, strict=True)
        each = [of.derivatives(scores[at, 0], rows.inputs[at]) for of, at in parts]
        slope, curve = map(np.stack, zip(*each, strict=True))
        return slope, curve
    first, second = _derivatives(kind, scores, rows.targets)
    slope = [(first[at].T @ rows.inputs[at]).ravel() for at in rows.clients]
    if kind == "regression":
        return np.stack(slope), rows.grams
    curve = [_curvature(rows.inputs[at], second[at]) for at in rows.clients]
    return np.stack(slope), np.stack(curve)


def expand(kind: str, rows: PooledRows, models: np.ndarray) -> Letters:
    """The letters of squared errors that have the same value, slope and curve.

    Of squared errors they are exact, whatever the models are.
    """
    scores = rows.scores(models)
    slope, curve = write_derivatives(kind, rows, scores)
    bent = np.einsum("cij,cj->ci", curve, models)
    each = _objective(kind, scores, rows.targets)
    square = 2 * np.array([each[at].sum() for at in rows.clients])
    square += (models * (bent - 2 * slope)).sum(axis=1)
    found = curve, bent - slope, square, rows.counts.astype(float)
    return Letters(*(of[:, None] for of in found))


def _minimize(
    value: Callable[[np.ndarray], float],
    step: Callable[[np.ndarray], tuple[np.ndarray, float]],
    start: np.ndarray,
) -> np.ndarray:
    """Newton's method; ``step`` gives the move and by how much it promises to lower."""
    here, before = start, value(start)
    enough = TOLERANCE * abs(before)
    for _ in range(MOST_STEPS):
        move, promised = step(here)
        if promised <= enough:
            return here - move
        length, after = 1.0, value(here - move)
        while not after <= before - 1e-4 * length * promised:
            length /= 2
            if length < 1e-6:
                return here
            after = value(here - length * move)
        here, before = here - length * move, after
    return here


def one_model(
    kind: str,
    rows: PooledRows,
    outputs: int,
    penalty: np.ndarray,
    *,
    toward: np.ndarray | float = 0.0,
    offset: np.ndarray | float = 0.0,
    weights: np.ndarray | float = 1.0,
) -> np.ndarray:
    """The model of all rows together.

    Args:
        kind: "classes", "binary", "regression" or "counts".
        rows: that are trained on.
        outputs: scores of a row.
        penalty: of each entry of the model.
        toward: where the penalty is zero.
        offset: what is added to the scores, [rows, outputs].
        weights: of the rows.
    """
    weights = np.broadcast_to(weights, len(rows.targets))

    def value(model):
        rows.letters += 1
        each = _objective(kind, offset + rows.scores(model[None]), rows.targets)
        return weights @ each + 0.5 * penalty @ (model - toward) ** 2

    def step(model):
        scores = offset + rows.scores(model[None])
        first, second = _derivatives(kind, scores, rows.targets)
        slope = ((first * weights[:, None]).T @ rows.inputs).ravel()
        slope = slope + penalty * (model - toward)
        curve = _curvature(rows.inputs, second * weights[:, None, None])
        move = solve_singular(curve + np.diag(penalty), slope)
        return move, slope @ move

    return _minimize(value, step, np.zeros(outputs * rows.inputs.shape[1]))


def _entry_vector(
    rows: PooledRows, outputs: int, level: float, slopes: float
) -> np.ndarray:
    """A vector over the entries of a model."""
    found = np.full((outputs, rows.inputs.shape[1]), float(slopes))
    found[:, 0] = level
    return found.ravel()


def _ridge(kind: str, rows: PooledRows, outputs: int, ridge: float) -> np.ndarray:
    """The penalty of the shared model's entries."""
    if kind == "survival":
        # What is censored tells little; an intercept of an own hazard changes nothing.
        events = sum(len(of.events) for of in rows.risk_sets)
        return max(events, 1) * _entry_vector(rows, outputs, 1.0, ridge)
    return len(rows.targets) * _entry_vector(rows, outputs, 0.0, ridge)


def hierarchical_models(
    kind: str,
    rows: PooledRows,
    outputs: int,
    *,
    level: float = 0.0,
    slopes: float = 0.0,
    ridge: float = 0.0,
    share: bool = True,
) -> np.ndarray:
    """Every client's model, [clients, entries]; options of ``hierarchical``."""
    scale = np.sqrt(_entry_vector(rows, outputs, level, slopes))
    penalty = _ridge(kind, rows, outputs, ridge)
    if not scale.any() and kind != "survival":
        model = one_model(kind, rows, outputs, penalty)
        return np.repeat(model[None], len(rows.counts), axis=0)
    scales = np.broadcast_to(scale, (len(rows.counts), len(scale)))
    return _joint(kind, rows, scales, penalty, share)


def flix_models(
    kind: str, rows: PooledRows, outputs: int, *, alpha: float, l2: float
) -> np.ndarray:
    """Every client's mixture, [clients, entries]; ``l2`` is that of all losses."""
    size = outputs * rows.inputs.shape[1]
    counts = np.maximum(rows.counts, 1)
    scales = np.broadcast_to(1 / np.sqrt(l2 * counts)[:, None], (len(counts), size))
    own = (1 - alpha) * _joint(kind, rows, scales, np.zeros(size), False)
    # All clients weigh the same, and what is penalized is the mixture.
    seen = rows.counts > 0
    shrunk = PooledRows(alpha * rows.inputs, rows.targets, rows.counts)
    shared = one_model(
        kind,
        shrunk,
        outputs,
        np.full(size, seen.sum() * l2 * alpha**2),
        toward=-own[seen].mean(axis=0) / alpha,
        offset=rows.scores(own),
        weights=np.repeat(1 / counts, rows.counts),
    )
    rows.letters += shrunk.letters
    return alpha * shared + own


def _joint(
    kind: str, rows: PooledRows, scales: np.ndarray, penalty: np.ndarray, share: bool
) -> np.ndarray:
    """Models shared + scales_i * u_i, over shared and all u_i, with 1/2 |u_i|^2."""
    if kind != "survival" and 2 * rows.counts.max() < rows.inputs.shape[1]:
        return _joint_in_row_spaces(kind, rows, scales, penalty, share)

    def total(shared, u):
        rows.letters += 1
        scores = rows.scores(shared + scales * u)
        if kind == "survival":
            return cox_losses(rows, scores).sum()
        return _objective(kind, scores, rows.targets).sum()

    def step(shared, u):
        scores = rows.scores(shared + scales * u)
        slope, curve = write_derivatives(kind, rows, scores)
        options = {"penalty": penalty, "share": share}
        return newton_step(slope, curve, scales, u=u, shared=shared, **options)

    shared, u = _minimize_jointly(total, step, penalty, scales.shape)
    return shared + scales * u


def _minimize_jointly(
    total: Callable[[np.ndarray, np.ndarray], float],
    step: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, float]],
    penalty: np.ndarray,
    shape: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """The shared model and own parts u of the least loss, with 1/2 |u|^2.

    Args:
        total: the loss of all clients, of both.
        step: what is subtracted from both, as of ``newton_step``.
        penalty: of each entry of the shared model.
        shape: of the own parts, [clients, entries].
    """

    def parts(here):
        return here[: len(penalty)], here[len(penalty) :].reshape(shape)

    def value(here):
        shared, u = parts(here)
        return total(shared, u) + 0.5 * penalty @ shared**2 + 0.5 * (u**2).sum()

    def move(here):
        shared, u, promised = step(*parts(here))
        return np.concatenate([shared, u.ravel()]), promised

    return parts(_minimize(value, move, np.zeros(len(penalty) + shape[0] * shape[1])))


def _joint_in_row_spaces(
    kind: str, rows: PooledRows, scales: np.ndarray, penalty: np.ndarray, share: bool
) -> np.ndarray:
    """``_joint`` of clients with few rows.

    The best u_i is in the span of the client's rows, which has as many dimensions: it
    is ``bases_i v_i``, and v_i has the curvature of so many inputs.
    """
    clients, width = len(scales), rows.inputs.shape[1]
    most, scale = int(rows.counts.max()), scales.reshape(clients, -1, width)
    bases = np.zeros((clients, width, most))
    inputs = np.zeros((len(rows.inputs), most))
    for client, at in enumerate(rows.clients):
        # Scales are the same for all outputs.
        base, triangle = np.linalg.qr((rows.inputs[at] * scale[client, 0]).T)
        bases[client, :, : base.shape[1]] = base
        inputs[at, : base.shape[1]] = triangle.T
    narrow = PooledRows(inputs, rows.targets, rows.counts)
    every = np.eye(scale.shape[1] * most)

    def scores(shared, v):
        return rows.scores(shared[None]) + narrow.scores(v)

    def total(shared, v):
        return _objective(kind, scores(shared, v), rows.targets).sum()

    def step(shared, v):
        slope, inner = write_derivatives(kind, narrow, scores(shared, v))
        slope, inner = slope + v, inner + every
        if not share:
            turn = np.linalg.solve(inner, slope[:, :, None])[:, :, 0]
            return np.zeros(len(penalty)), turn, (slope * turn).sum()
        first, second = _derivatives(kind, scores(shared, v), rows.targets)
        cross = np.stack(
            [_curvature(inputs[at], second[at], rows.inputs[at]) for at in rows.clients]
        )
        curve = _curvature(rows.inputs, second) + np.diag(penalty)
        steep = (first.T @ rows.inputs).ravel() + penalty * shared
        return eliminate(steep, slope, curve, cross, inner)

    shared, v = _minimize_jointly(total, step, penalty, (clients, len(every)))
    u = v.reshape(clients, -1, most) @ bases.transpose(0, 2, 1)
    return shared + (scale * u).reshape(clients, -1)


def shared_part(
    kind: str,
    rows: PooledRows,
    models: np.ndarray,
    *,
    level: float = 0.0,
    slopes: float = 0.0,
    ridge: float = 0.0,
) -> np.ndarray:
    """What ``hierarchical_models`` share: where (models - shared)^2 / variance, summed
    over clients, and the penalty of ``shared`` are least together.
    """
    outputs = models.shape[1] // rows.inputs.shape[1]
    variance = _entry_vector(rows, outputs, level, slopes)
    penalty = _ridge(kind, rows, outputs, ridge)
    return models.sum(axis=0) / (len(models) + penalty * variance)


class Coefficients(NamedTuple):
    """What models share and what is a client's own, with standard errors.

    A client's model is ``shared + own[client]``; without a shared model it is ``own``.
    """

    shared: np.ndarray
    shared_error: np.ndarray
    own: np.ndarray
    own_error: np.ndarray
    freedom: float
    """Rows less coefficients, which count by how freely they are fitted."""


def coefficients(
    kind: str,
    rows: PooledRows,
    outputs: int,
    *,
    level: float = 0.0,
    slopes: float = 0.0,
    ridge: float = 0.0,
    share: bool = True,
) -> Coefficients:
    """The parts of ``hierarchical_models``, of one output, and how sure they are.

    The covariance is the inverse of the objective's Hessian, for squared errors times
    their variance: so own parts have the errors of random effects.
    """
    options = {"level": level, "slopes": slopes, "ridge": ridge, "share": share}
    models = hierarchical_models(kind, rows, outputs, **options)
    variance = _entry_vector(rows, outputs, level, slopes)
    penalty = _ridge(kind, rows, outputs, ridge)
    scores = rows.scores(models)
    slope, curve = write_derivatives(kind, rows, scores)
    # Where the objective is least, so is u_i = own / scale: u_i = -scale * slope_i.
    own = -variance * slope if share else models
    shared = (models - own).mean(axis=0)
    scale = np.sqrt(variance)
    cross = curve * scale
    inner = np.linalg.inv(scale[:, None] * cross + np.eye(len(scale)))
    own_error, shared_error = np.diagonal(inner, 0, 1, 2), np.zeros(len(scale))
    used = own_error.sum()
    if share:
        total = (curve - cross @ inner @ cross.transpose(0, 2, 1)).sum(axis=0)
        covariance = np.linalg.pinv(total + np.diag(penalty), hermitian=True)
        back = inner @ cross.transpose(0, 2, 1)
        own_error = own_error + np.einsum("cij,jk,cik->ci", back, covariance, back)
        shared_error = np.diagonal(covariance)
        used = own_error.sum() + penalty @ shared_error
    every = own.size + share * len(shared)
    freedom = max(len(rows.targets) - (every - used), 1.0)
    noise = 1.0
    if kind == "regression":
        noise = losses(kind, scores, rows.targets).sum() / freedom
    return Coefficients(
        shared,
        np.sqrt(noise * shared_error),
        own,
        np.sqrt(noise * variance * own_error),
        float(freedom),
    )

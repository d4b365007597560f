# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One letter: linear models of every amount of sharing, from one message per client.

The problem for squared errors, where x begins with 1, and N is the number of rows::

    min over shared, d_1 .. d_n of
        1/2 sum_rows (y - x (shared + d_i))^2 + 1/2 sum_i d_i' W d_i
        + N/2 ridge |slopes of shared|^2

W = diag(w0, w1 .. w1) is the inverse of the variances ``level`` and ``slopes``, of own
intercepts and own slopes over that of a row's noise. ``level = slopes = 0`` is one
model for all, which FedAvg looks for; ``slopes = 0`` one model with own intercepts;
large variances are training alone. A client sends once, for each of K folds f of its
rows, K (p (p + 3) / 2 + 1) numbers for p coefficients::

    G_if = sum x x'     c_if = sum x y     q_if = sum y^2

The number of rows is the first entry of G_if. The server finds, for every W, with G_i
and c_i the sums over folds::

    R_i = (G_i + W)^-1 G_i     r_i = (G_i + W)^-1 c_i
    shared = (sum_i G_i (I - R_i))^-1 sum_i (c_i - G_i r_i)
    model_i = shared + r_i - R_i shared

without a fold, from the sums over the others; and what that model misses on the fold::

    model' G_if model - 2 model' c_if + q_if

so that cross-validation chooses W without another message. FLIX and L2GD follow from
the same sums. The matrix of fewer rows than coefficients reveals rows: ``one_letter``
refuses that. For a W that is known a server needs only the two sums over clients, which
secure sums hide; that message is ``fb.algorithms.hierarchical``'s, in one round.

Where this differs from the paper: variances are chosen by cross-validation, and not by
likelihood; what only clients in one place would tell is not estimated.

Reference: Luo et al., "DLMM as a lossless one-shot algorithm for collaborative
multi-site distributed linear mixed models", Nature Communications 13:1678, 2022.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedblend.data.dataset import DataError
from fedblend.data.federated import FederatedData
from fedblend.errors import UserError

LEVELS = (0.0, *(10.0**place for place in range(-3, 4)))
SLOPES = (0.0, *(10.0**place for place in range(-5, 2)))
"""Variances that are compared: none, and .001 to 1000, .00001 to 10."""
FLAT = 1e-11
"""An input whose variance is a smaller part of its mean square is constant."""
ADVICE = (
    "take fewer inputs or folds, leave such clients out, accept it with fewest_rows = "
    "0, or add noise (fb.transforms.row_noise, fb.algorithms.hierarchical)"
)
SINGULAR = 1e-9
"""What is added to a diagonal of ones: softmax, and an input that is twice there, leave
directions free."""


class Letters(NamedTuple):
    """What clients send; first axes are clients, then folds."""

    grams: np.ndarray
    """G, [clients, folds, p, p]."""
    moments: np.ndarray
    """c, [clients, folds, p]."""
    squares: np.ndarray
    """q, [clients, folds]."""
    counts: np.ndarray
    """Rows, [clients, folds]; of squared errors the first entry of G."""

    @property
    def numbers(self) -> int:
        """Numbers that a client sends."""
        folds, size = self.moments.shape[1:]
        return folds * (size * (size + 3) // 2 + 1)

    def only(self, *folds: int) -> "Letters":
        """The letters of the rows of these folds, as of a single fold."""
        return Letters(*(of[:, folds].sum(axis=1, keepdims=True) for of in self))

    def without(self, *folds: int) -> "Letters":
        """The letters of the rows of all other folds, as of a single fold."""
        return self.only(*np.setdiff1d(np.arange(self.counts.shape[1]), folds))

    def change(self, basis: np.ndarray) -> "Letters":
        """The letters of inputs ``basis' x``: their model m is ``basis m`` of x."""
        grams = basis.T @ self.grams @ basis
        return self._replace(grams=grams, moments=self.moments @ basis)


# The client's half.


def write_letter(inputs: np.ndarray, targets: np.ndarray, folds: int) -> Letters:
    """The letter of one client; its rows are in random order.

    Args:
        inputs: [rows, p], ones first.
        targets: [rows].
        folds: into which rows are divided, one after the other.
    """
    parts = [(inputs[fold::folds], targets[fold::folds]) for fold in range(folds)]
    return Letters(
        np.stack([x.T @ x for x, _ in parts]),
        np.stack([x.T @ y for x, y in parts]),
        np.stack([y @ y for _, y in parts]),
        np.array([float(len(y)) for _, y in parts]),
    )


# The server's half.


def newton_step(
    slope: np.ndarray,
    curve: np.ndarray,
    scales: np.ndarray,
    *,
    u: np.ndarray | float = 0.0,
    shared: np.ndarray | float = 0.0,
    penalty: np.ndarray | float = 0.0,
    share: bool = True,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Newton's step on the shared model and all own parts, the latter eliminated.

    A client's model is ``shared + scales * u``, with 1/2 |u|^2. Returns what is
    subtracted from ``shared``, [p], and from ``u``, [clients, p], and by how much
    that promises to lower the objective, times two.

    Args:
        slope: gradients of the clients' losses at their models, [clients, p].
        curve: their Hessians, [clients, p, p].
        scales: [clients, p]; what is 0 for all clients is no part of the systems.
        u: where clients are, [clients, p].
        shared: the shared model.
        penalty: of each entry of the shared model.
        share: whether the shared model moves.
    """
    (own,) = np.nonzero(scales.any(axis=0))
    scale, turn = scales[:, own], np.zeros(scales.shape)
    cross = (curve[:, :, own] * scale[:, None, :]).transpose(0, 2, 1)
    inner = cross[:, :, own] * scale[:, None, :] + np.eye(len(own))
    slope_own = (scales * slope + u)[:, own]
    if not share:
        turn[:, own] = np.linalg.solve(inner, slope_own[:, :, None])[:, :, 0]
        return np.zeros(scales.shape[1]), turn, float((slope_own * turn[:, own]).sum())
    slope_shared = slope.sum(axis=0) + penalty * shared
    total = curve.sum(axis=0) + np.diag(np.broadcast_to(penalty, scales.shape[1]))
    move, turn[:, own], promised = eliminate(
        slope_shared, slope_own, total, cross, inner
    )
    return move, turn, promised


def eliminate(
    slope: np.ndarray,
    slope_own: np.ndarray,
    curve: np.ndarray,
    cross: np.ndarray,
    inner: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Newton's step on a shared model and own parts, as of ``newton_step``.

    Args:
        slope: gradient in the shared model, [p].
        slope_own: gradients in the own parts, [clients, q].
        curve: Hessian in the shared model, [p, p].
        cross: derivatives in own parts and the shared model, [clients, q, p].
        inner: Hessians in the own parts, [clients, q, q].
    """
    sides = np.concatenate([cross, slope_own[:, :, None]], axis=2)
    solved = np.linalg.solve(inner, sides)
    rest = np.tensordot(cross, solved, ((0, 1), (0, 1)))
    move = solve_singular(curve - rest[:, :-1], slope - rest[:, -1])
    turn = solved[:, :, -1] - solved[:, :, :-1] @ move
    return move, turn, float(slope @ move + (slope_own * turn).sum())


def solve_models(
    letters: Letters,
    *,
    level: np.ndarray | float = 0.0,
    slopes: np.ndarray | float = 0.0,
    ridge: float = 0.0,
    share: bool = True,
    outputs: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The shared model [p], and every client's [clients, p].

    Args:
        letters: what clients sent.
        level: variance of own intercepts over that of a row's noise; by client or one.
        slopes: the same for own slopes.
        ridge: penalty on shared slopes.
        share: whether there is a shared model; without, it is zero.
        outputs: scores of a row; every one has an intercept, before its slopes.
    """
    gram, moment = letters.grams.sum(axis=1), letters.moments.sum(axis=1)
    intercept = np.arange(moment.shape[1]) % (moment.shape[1] // outputs) == 0
    level, slopes = np.reshape(level, (-1, 1)), np.reshape(slopes, (-1, 1))
    scales = np.sqrt(np.where(intercept, level, slopes))
    scales = np.broadcast_to(scales, moment.shape)
    penalty = ridge * letters.counts.sum() * ~intercept
    shared, u, _ = newton_step(-moment, gram, scales, penalty=penalty, share=share)
    return -shared, -shared - scales * u


def solve_flix(letters: Letters, *, alpha: float, l2: float) -> np.ndarray:
    """Every client's mixture by FLIX, [clients, p]; ``l2`` is that of all losses."""
    rows = letters.counts.sum(axis=1)
    counts, size = np.maximum(rows, 1), letters.moments.shape[2]
    own = 1 / (l2 * counts)
    alone = solve_models(letters, level=own, slopes=own, share=False)[1]
    own = (1 - alpha) * alone
    # All clients weigh the same, and what is penalized is the mixture.
    gram = letters.grams.sum(axis=1) / counts[:, None, None] + l2 * np.eye(size)
    moment = letters.moments.sum(axis=1) / counts[:, None]
    gap = (moment - np.einsum("cij,cj->ci", gram, own))[rows > 0].sum(axis=0)
    shared = solve_singular(alpha * gram[rows > 0].sum(axis=0), gap)
    return alpha * shared + own


def solve_singular(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A solution of a positive system that may be singular, in any unit."""
    diagonal = np.diagonal(matrix)
    unit = 1 / np.sqrt(np.where(diagonal > 0, diagonal, np.inf))
    scaled, right = unit[:, None] * matrix * unit, unit * right
    near = np.linalg.inv(scaled + SINGULAR * np.eye(len(matrix)))
    found = near @ right
    return unit * (found + near @ (right - scaled @ found))


def held_out_errors(letters: Letters, models: np.ndarray) -> np.ndarray:
    """The sum of squared errors of every client's model on its rows, [clients].

    Args:
        letters: of the rows that were held out, as of a single fold.
        models: [clients, p].
    """
    bent = np.einsum("ci,cij,cj->c", models, letters.grams[:, 0], models)
    found = bent - 2 * (letters.moments[:, 0] * models).sum(axis=1)
    return np.maximum(found + letters.squares[:, 0], 0.0)


def standard_basis(letters: Letters) -> np.ndarray:
    """For ``change``: inputs of mean 0 and deviation 1; constant ones become 0."""
    total = letters.grams.sum(axis=(0, 1))
    mean, square = total[0, 1:] / total[0, 0], np.diagonal(total)[1:] / total[0, 0]
    variance = square - mean**2
    unit = np.where(variance > FLAT * square, variance, np.inf) ** -0.5
    basis = np.diag([1.0, *unit])
    basis[0, 1:] = -mean * unit
    return basis


def cross_validate(letters: Letters, amounts: np.ndarray) -> np.ndarray:
    """Mean squared errors on rows that were left out, [amounts, clients].

    Args:
        letters: of all clients, with two folds or more.
        amounts: pairs (level, slopes).
    """
    total = np.zeros((len(amounts), len(letters.counts)))
    for fold in range(letters.counts.shape[1]):
        train, held = letters.without(fold), letters.only(fold)
        for place, (level, slopes) in enumerate(amounts):
            models = solve_models(train, level=level, slopes=slopes)[1]
            total[place] += held_out_errors(held, models)
    return total / letters.counts.sum(axis=1)


class OneLetter(NamedTuple):
    """What one message per client tells.

    Coefficients begin with the intercept, in the units of the inputs.
    """

    shared: np.ndarray
    """The shared model, [1 + inputs]."""
    coefficients: np.ndarray
    """Every client's model, [clients, 1 + inputs]."""
    level: float
    """Variance of own intercepts over that of a row's noise: 1 / w0."""
    slopes: float
    """Variance of own slopes, of inputs with deviation 1: 1 / w1."""
    amounts: np.ndarray
    """The pairs (level, slopes) that were compared, [amounts, 2]."""
    errors: np.ndarray
    """Cross-validated squared errors by amount and client, [amounts, clients]."""
    letters: Letters
    """What was sent, in the standard basis."""
    basis: np.ndarray

    @property
    def numbers(self) -> int:
        """Numbers that a client sent."""
        return self.letters.numbers

    def models(
        self, level: float, slopes: float, *, ridge: float = 0.0, share: bool = True
    ) -> np.ndarray:
        """Every client's coefficients for another amount of sharing.

        ``models(0, 0)`` is FedAvg's optimum, ``models(level, 0)`` has own intercepts,
        and ``share=False`` is training alone.
        """
        models = solve_models(
            self.letters, level=level, slopes=slopes, ridge=ridge, share=share
        )[1]
        return models @ self.basis.T

    def flix(self, alpha: float, l2: float) -> np.ndarray:
        """Every client's coefficients by FLIX, with weight decay ``l2``."""
        if not l2 > 0:
            raise UserError("flix: l2", l2, "a number above 0")
        return solve_flix(self.letters, alpha=alpha, l2=l2) @ self.basis.T

    def l2gd(self, lam: float) -> np.ndarray:
        """Every client's coefficients by L2GD, where all clients weigh the same."""
        if not lam > 0:
            raise UserError("l2gd: lam", lam, "a number above 0")
        counts = self.letters.counts.sum(axis=1)
        equal = Letters(*((of.T / counts).T for of in self.letters))
        models = solve_models(equal, level=1 / lam, slopes=1 / lam)[1]
        return models @ self.basis.T


def one_letter(
    data: FederatedData,
    *,
    folds: int = 5,
    level: float | None = None,
    slopes: float | None = None,
    standardize: bool = True,
    fewest_rows: int | None = None,
) -> OneLetter:
    """Linear regression shared by as much as pays, from one message per client.

    Args:
        data: training rows ``(inputs, targets)``, targets being numbers.
        folds: into which a client divides its rows for cross-validation; 1 if both
            variances are given.
        level: variance of own intercepts over that of a row's noise, 0 for none; the
            one with the least cross-validated error if None.
        slopes: the same for own slopes.
        standardize: whether own deviations are those of standardized inputs; without,
            of inputs as they are.
        fewest_rows: the least rows of a client in a fold. The default is the number of
            coefficients: a matrix of fewer rows reveals them. 0 accepts that.

    Example:
        >>> import numpy as np, fedblend as fb
        >>> draw = np.random.default_rng(0)
        >>> inputs = draw.normal(size=(200, 1))
        >>> targets = 2 * inputs[:, 0] + np.repeat([-1.0, 1.0], 100)
        >>> data = fb.federate((inputs, targets), [range(100), range(100, 200)])
        >>> found = fb.one_letter(data)
        >>> found.coefficients.round(2).tolist(), found.numbers
        ([[-1.0, 2.0], [1.0, 2.0]], 30)
    """
    if folds < 1 or (folds == 1 and (level is None or slopes is None)):
        allowed = "2 or more, or 1 with level and slopes given"
        raise UserError("one_letter: folds", folds, allowed)
    letters = write_letters(data, folds)
    size = letters.moments.shape[2]
    least = letters.counts.min(axis=1)
    fewest = size if fewest_rows is None else fewest_rows
    check_rows("one_letter", least, fewest, data.name, ADVICE)
    basis = standard_basis(letters) if standardize else np.eye(size)
    letters = letters.change(basis)
    levels = LEVELS if level is None else (level,)
    each = SLOPES if slopes is None else (slopes,)
    amounts = np.array([(own, others) for own in levels for others in each])
    errors = cross_validate(letters, amounts if folds > 1 else amounts[:0])
    chosen = amounts[errors.mean(axis=1).argmin() if folds > 1 else 0]
    options = dict(zip(("level", "slopes"), map(float, chosen), strict=True))
    shared, models = solve_models(letters, **options)
    return OneLetter(
        basis @ shared,
        models @ basis.T,
        **options,
        amounts=amounts,
        errors=errors,
        letters=letters,
        basis=basis,
    )


def write_letters(data: FederatedData, folds: int) -> Letters:
    """The letters of all clients, of their training rows."""
    found = []
    for client in range(data.clients):
        inputs, targets = (np.asarray(leaf, float) for leaf in data.train.rows(client))
        rows = len(targets)
        inputs = np.column_stack([np.ones(rows), inputs.reshape(rows, -1)])
        if targets.size != rows:
            raise UserError(
                "one_letter: data", targets.shape, "one number for each row"
            )
        if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
            raise DataError(
                f"one_letter: client {data.name(client)!r} has values that are not "
                "finite; fill in missing values, or leave their rows out"
            )
        found.append(write_letter(inputs, targets.reshape(rows), folds))
    return Letters(*map(np.stack, zip(*found, strict=True)))


def check_rows(
    where: str, least: np.ndarray, fewest: int, name: Callable[[int], str], advice: str
) -> None:
    """Refuse clients whose letters reveal rows.

    Args:
        where: what is asked for.
        least: every client's rows in its smallest fold.
        fewest: rows that are needed.
        name: of a client, by its number.
        advice: what to do.
    """
    small = np.flatnonzero(least < fewest)
    if small.size:
        first = int(least.argmin())
        raise DataError(
            f"{where}: client {name(first)!r} has {int(least[first])} rows in a fold, "
            f"fewer than {fewest} coefficients, so that what it sends reveals rows "
            f"({small.size} of {len(least)} clients); {advice}"
        )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a client minimizes, from losses that give one number for each example.

``loss(params, rows) -> losses[rows]`` is all that a model and its data have to
provide. ``rows`` is ``(inputs, targets)`` for the losses built here, any tree for a
loss of your own. All of them accept a ``Blend`` in place of parameters.

A loss that draws (dropout, augmentation) or whose rows depend on each other (batch
normalization) has a parameter named ``key``, one named ``mask``, or both. Losses that
are made of a model's ``apply``, or of another loss, have those that it has.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import xlogy

from fedblend import trees
from fedblend.batch_statistics import has_statistics, without_statistics
from fedblend.checks import FUNCTION, NOT_NEGATIVE, gate, is_traced
from fedblend.core import Batch, Loss, PyTree
from fedblend.errors import (
    CodeError,
    InputError,
    SettingError,
    UserError,
    find_place,
    hint,
    show_value,
)
from fedblend.mixing import Apply, Blend, predict
from fedblend.step_log import tell

_trains_without_key: ContextVar[bool] = ContextVar("without_key", default=False)
"""Whether the loss that runs is that of a training step, and has no key."""


class HiddenLoss:
    """A loss of which only derivatives of the mean over a batch are given.

    See ``row_noise``.
    """

    def __call__(self, params: PyTree, rows: PyTree) -> jax.Array:
        """Refused."""
        raise SettingError("loss", "noise hides the losses of rows; use gradients")

    def objective(self, params: PyTree, batch: Batch) -> jax.Array:
        """NaN, whose gradient in the parameters is that of the mean, with noise."""
        raise NotImplementedError

    def expand(self, params: PyTree, batch: Batch) -> Callable[[jax.Array], jax.Array]:
        """The mean to second order around parameters, with noise, of a vector."""
        raise SettingError("loss", "noise hides second derivatives of this model")


def compose(change: Callable[[PyTree], PyTree], loss: Loss) -> Loss:
    """The loss of what ``change`` makes of the parameters."""
    if isinstance(loss, HiddenLoss):
        return _Changed(change, loss)

    @wraps(loss)
    def changed(params, rows, **more):
        return loss(change(params), rows, **more)

    return changed


class _Changed(HiddenLoss):
    def __init__(self, change: Callable[[PyTree], PyTree], loss: HiddenLoss):
        self._change, self._loss = change, loss

    def objective(self, params: PyTree, batch: Batch) -> jax.Array:
        return self._loss.objective(self._change(params), batch)


def objective(loss: Loss, params: PyTree, batch: Batch) -> jax.Array:
    """The mean loss over the rows of a batch that count."""
    if isinstance(loss, HiddenLoss):
        return loss.objective(params, batch)
    losses = row_losses(loss, params, batch)
    if batch.mask is None:
        mean = losses.mean()
    else:
        count = batch.mask.astype(losses.dtype).sum()
        mean = jnp.where(batch.mask, losses, 0).sum() / jnp.maximum(count, 1)
    tell("loss", lambda: mean)
    return mean


def row_losses(loss: Loss, params: PyTree, batch: Batch) -> jax.Array:
    """The losses of rows; the loss gets key and mask if it has such parameters.

    Raises:
        CodeError: it fails.
        SettingError: it would train batch normalization without its statistics, needs
            another argument, or returns something else than a float for each row.
    """
    known = {"key": batch.key, "mask": batch.mask}
    more = select_named(loss, **known)
    missing = [name for name in known.keys() - more if known[name] is not None]
    if missing and batch.key is not None and has_statistics(params):
        raise SettingError(
            "loss",
            f"has no parameter {min(missing)!r}, which batch normalization trains by; "
            "write loss(params, rows, key, mask) and apply(params, inputs, key, mask)",
        )
    place = find_place(loss)
    for name, parameter in list(_parameters(loss).items())[2:]:
        required = parameter.default is parameter.empty
        if required and name not in known and "VAR" not in parameter.kind.name:
            text = f"gets no {name!r} after parameters and rows; {hint(name, known)}"
            raise SettingError("loss", text + place)
    given = f"parameters {_shapes(params)} and rows {_shapes(batch.rows)}"
    if "key" in more and batch.key is None:
        given += ", key None, as in evaluation"
    token = _trains_without_key.set(batch.key is not None and "key" not in more)
    try:
        losses = loss(params, batch.rows, **more)
    except InputError:
        raise
    except Exception as error:
        raise CodeError("loss", given, error) from error
    finally:
        _trains_without_key.reset(token)
    wanted = np.shape(jax.tree.leaves(batch.rows)[0])[:1]
    kind = getattr(losses, "dtype", None)
    if kind is None or losses.shape != wanted or not jnp.issubdtype(kind, jnp.floating):
        found = type(losses).__name__ if kind is None else f"{kind}{list(losses.shape)}"
        allowed = f"one float for each row, {wanted}, without mean or sum"
        raise SettingError("loss", f"returns {found} of {given}, not {allowed}{place}")
    return losses


def warn_without_key(rate: float) -> None:
    """Warn where a model has dropout and its loss has no key to pass on in training."""
    if _trains_without_key.get():
        warnings.warn(
            f"loss: has no parameter 'key', so dropout of {rate:g} is off in training; "
            "write loss(params, rows, key) and apply(params, inputs, key)",
            stacklevel=3,
        )


def select_named(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """The values by name for which a function has parameters, after the first two.

    A wrapped function has the parameters of what it wraps.
    """
    names = list(_parameters(function))[2:]
    return {name: value for name, value in values.items() if name in names}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a built-in function
        return {}


def _shapes(tree: PyTree) -> str:
    return show_value([np.shape(leaf) for leaf in jax.tree.leaves(tree)])


def gradient(loss: Loss) -> Callable[[PyTree, Batch], PyTree]:
    """The gradient of ``objective`` in the parameters."""
    return jax.grad(lambda params, batch: objective(loss, params, batch))


def _apply_losses(
    apply: Apply, losses: Callable[[jax.Array, jax.Array], jax.Array]
) -> Loss:
    """A loss from ``losses(outputs, targets)`` of the rows ``(inputs, targets)``."""

    @wraps(apply, assigned=(), updated=())
    def loss(params, rows, **more):
        inputs, targets = rows
        return losses(predict(apply, params, inputs, **more), targets)

    return loss


@gate(apply=FUNCTION)
def cross_entropy(apply: Apply) -> Loss:
    """Softmax cross entropy; targets are class numbers, or probabilities of classes."""

    def losses(scores, targets):
        _check_classes(scores, targets)
        if targets.ndim == scores.ndim:
            return optax.softmax_cross_entropy(scores, targets)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets)

    return _apply_losses(apply, losses)


def _check_classes(scores: jax.Array, targets: jax.Array) -> None:
    """Refuse targets that are no classes of these scores.

    Inside of compiled functions, where targets have no values, by shape and type alone.
    """
    whole = jnp.issubdtype(targets.dtype, jnp.integer)
    wanted = scores.shape[:-1] if whole else scores.shape
    if targets.shape != wanted:
        said = f"an array {targets.dtype} of shape {targets.shape}"
        allowed = (
            f"class numbers (integers) of shape {scores.shape[:-1]}, or probabilities "
            f"of shape {scores.shape}"
        )
        raise UserError("cross_entropy: targets", targets, allowed, said)
    if whole and not is_traced(targets):
        values, classes = np.asarray(targets), scores.shape[-1]
        wrong = values[(values < 0) | (values >= classes)]
        if wrong.size:
            allowed = f"a class of the model, 0 to {classes - 1}"
            raise UserError("cross_entropy: targets", wrong[0], allowed)


@gate(apply=FUNCTION)
def sequence_cross_entropy(apply: Apply) -> Loss:
    """Softmax cross entropy at every place of a sequence, averaged over its places.

    Scores are [rows, length, classes], targets class numbers [rows, length]; a
    negative one marks a place that does not count, and a row of such has no loss.
    """

    def losses(scores, targets):
        known = targets >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(
            scores, jnp.where(known, targets, 0)
        )
        places = known.sum(axis=1).astype(each.dtype)
        return jnp.where(known, each, 0).sum(axis=1) / jnp.maximum(places, 1)

    return _apply_losses(apply, losses)


@gate(apply=FUNCTION)
def multilabel(apply: Apply) -> Loss:
    """Sigmoid cross entropy, averaged over the labels; targets are ones and zeros."""

    def losses(scores, targets):
        wanted = (targets > 0).astype(scores.dtype)
        return optax.sigmoid_binary_cross_entropy(scores, wanted).mean(axis=1)

    return _apply_losses(apply, losses)


@gate(apply=FUNCTION)
def logistic(apply: Apply) -> Loss:
    """``log(1 + exp(-y score))`` for a single score; targets are 0 or 1."""

    def losses(scores, targets):
        scores = scores.reshape(scores.shape[0])
        return jax.nn.softplus(jnp.where(targets > 0, -scores, scores))

    return _apply_losses(apply, losses)


@gate(apply=FUNCTION)
def squared_error(apply: Apply) -> Loss:
    """Half the squared error, summed over the outputs of an example."""

    def losses(outputs, targets):
        gap = outputs.reshape(targets.shape) - targets
        return 0.5 * jnp.square(gap).reshape(gap.shape[0], -1).sum(axis=1)

    return _apply_losses(apply, losses)


@gate(apply=FUNCTION)
def poisson(apply: Apply) -> Loss:
    """Half the Poisson deviance of counts; the score is the logarithm of their mean."""

    def losses(scores, targets):
        scores, wanted = scores.reshape(targets.shape), targets.astype(scores.dtype)
        return jnp.exp(scores) - wanted * scores + xlogy(wanted, wanted) - wanted

    return _apply_losses(apply, losses)


@gate(loss=FUNCTION, strength=NOT_NEGATIVE)
def l2(loss: Loss, strength: float) -> Loss:
    """``loss + strength/2 |params|^2``, over all parameters, intercepts too.

    Running statistics of batches do not count.

    The penalty of a ``Blend`` is the mixture of its two models' penalties.
    """

    def penalty(model):
        if not isinstance(model, Blend):
            return 0.5 * strength * trees.sum_squares(without_statistics(model))
        ours, own = penalty(model.shared), penalty(model.personal)
        return model.alpha * ours + (1 - model.alpha) * own

    @wraps(loss)
    def regular(params, rows, **more):
        return loss(params, rows, **more) + penalty(params)

    return regular

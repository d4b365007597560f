# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated learning behind scikit-learn's interface.

``fit(X, y, client_ids=ids)`` takes flat arrays and the client of every row. A client
that was there at ``fit`` is then predicted by its personal model, any other by the
shared one. Where clients have models of their own, nothing is predicted for nobody.

Client ids travel by scikit-learn's metadata routing: all methods ask for them, so that
with ``sklearn.set_config(enable_metadata_routing=True)`` cross-validation hands every
fold its own. Its scorers keep them from the estimator: ``client_scorer`` does not.

Inputs become float32 and are not scaled: put a ``StandardScaler`` in front.
"""

from typing import Any, cast
from warnings import warn

import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedblend import losses, models
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.finetune import finetune
from fedblend.algorithms.local_only import local_only
from fedblend.algorithms.scaffold import scaffold
from fedblend.checks import COUNT, NOT_NEGATIVE, WHOLE, optional
from fedblend.core import Algorithm, Loss, PyTree, shared_model
from fedblend.data.federated import federate
from fedblend.data.partition.partitioners import by_key
from fedblend.errors import UserError
from fedblend.local import BATCH_SIZE, OPTIMIZER, STEPS, Work
from fedblend.mixing import predict
from fedblend.simulation.simulate import simulate

RULES = {
    "rounds": WHOLE,
    "cohort": optional(COUNT),
    "rate": OPTIMIZER,
    "steps": STEPS,
    "batch_size": BATCH_SIZE,
    "l2": NOT_NEGATIVE,
    "seed": WHOLE,
}
"""Those of ``checks`` for the settings; what is left is refused where it is used."""
LEAST_ROWS = 8
"""Rows are predicted in groups padded to a power of two, this one at least."""

ROUTED = {"client_ids": True}
"""What every method asks scikit-learn's routing for."""


class _Federated(BaseEstimator):
    """What classifier and regressor have in common."""

    n_features_in_: int

    # What scikit-learn's routing hands to whom, unless a user asks for something else.
    __metadata_request__fit = ROUTED
    __metadata_request__predict = ROUTED
    __metadata_request__predict_proba = ROUTED
    __metadata_request__score = ROUTED

    def __init__(
        self,
        model: Any = "linear",
        algorithm: Any = "fedavg",
        *,
        rounds: int = 100,
        cohort: int | None = None,
        rate: Any = 0.1,
        steps: Any = 10,
        batch_size: int | None = 32,
        l2: float = 0.0,
        model_options: dict[str, Any] | None = None,
        seed: int = 0,
    ):
        self.model = model
        self.algorithm = algorithm
        self.rounds = rounds
        self.cohort = cohort
        self.rate = rate
        self.steps = steps
        self.batch_size = batch_size
        self.l2 = l2
        self.model_options = model_options
        self.seed = seed

    def _fit(self, inputs: np.ndarray, targets: np.ndarray, client_ids: Any) -> None:
        """Share the rows out, simulate, and keep the models as plain arrays."""
        ids = np.zeros(len(inputs), int) if client_ids is None else client_ids
        ids = column_or_1d(ids)
        check_consistent_length(inputs, ids)
        for name, rule in RULES.items():
            rule(f"{type(self).__name__}: {name}", getattr(self, name))
        self.clients_ = np.unique(ids)
        model, loss = self._model_and_loss()
        algorithm = self._algorithm(loss)
        rows = (inputs.astype(np.float32), targets)
        run = simulate(
            algorithm,
            model.init,
            federate(rows, by_key(ids).rows, seed=self.seed),
            jax.random.key(self.seed),
            rounds=self.rounds,
            cohort=self.cohort,
        ).complete()
        self.shared_ = jax.tree.map(np.asarray, run.shared)
        self.personal_ = None
        if algorithm.personal is not shared_model:
            each = [run.personal(client) for client in range(len(self.clients_))]
            self.personal_ = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
        self.summary_ = run.summary()
        for text in self.summary_["warnings"]:
            warn(text, ConvergenceWarning, stacklevel=3)

    def _model_and_loss(self) -> tuple[models.Model, Loss]:
        raise NotImplementedError

    def _build(self, outputs: int) -> models.Model:
        """The model, by name or as it was given."""
        if hasattr(self.model, "init") and hasattr(self.model, "apply"):
            return self.model
        if not isinstance(self.model, str):
            key = f"{type(self).__name__}: model"
            raise UserError(key, self.model, "the name of a model, or a Model")
        options = self.model_options or {}
        name = "softmax" if self.model == "linear" else self.model
        return models.build(name, (self.n_features_in_,), outputs, **options)

    def _algorithm(self, loss: Loss) -> Algorithm:
        """The algorithm, by name or as its builder makes it."""
        if callable(self.algorithm):
            return cast(Algorithm, self.algorithm(loss))
        work = Work(self.rate, self.steps, self.batch_size)
        if self.algorithm == "finetune":
            return finetune(fedavg(loss, work), loss, work)
        builders = {"fedavg": fedavg, "local_only": local_only, "scaffold": scaffold}
        if self.algorithm not in list(builders):
            known = f"one of finetune, {', '.join(builders)}"
            raise UserError(
                f"{type(self).__name__}: algorithm",
                self.algorithm,
                f"{known}; give a function from a loss to an Algorithm",
            )
        return builders[self.algorithm](loss, work)

    def _outputs(self, X: Any, client_id: Any, client_ids: Any) -> np.ndarray:
        """The outputs of the model of every row's client."""
        check_is_fitted(self)
        if client_id is not None and client_ids is not None:
            raise ValueError("client_id and client_ids: give one of them, not both")
        inputs = np.asarray(validate_data(self, X, reset=False, dtype=np.float32))
        if client_id is None and client_ids is None:
            client_id = self._nobody()
        ids = np.full(len(inputs), client_id) if client_ids is None else client_ids
        check_consistent_length(inputs, ids)
        apply = self._model_and_loss()[0].apply
        places = self._places(column_or_1d(ids))
        outputs: np.ndarray | None = None
        for place in np.unique(places):
            mine = np.flatnonzero(places == place)
            values = _padded_predict(apply, self._of(int(place)), inputs[mine])
            if outputs is None:
                outputs = np.empty((len(inputs), *values.shape[1:]), np.float64)
            outputs[mine] = values
        assert outputs is not None
        return outputs

    def _nobody(self) -> Any:
        """The client whose rows are predicted if nobody is named."""
        if self.personal_ is None:
            return None
        if len(self.clients_) == 1:
            return self.clients_[0]
        raise ValueError(
            f"client_ids: missing, and {len(self.clients_)} clients have their own "
            "models; give client_ids, or client_id (one that is not known gets the "
            "shared model); cross-validation needs params={'client_ids': ids}, "
            "scoring=fb.client_scorer('roc_auc') or another name, and "
            "sklearn.set_config(enable_metadata_routing=True)"
        )

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """The place of each id among the clients, -1 where it is not known."""
        known = {client: place for place, client in enumerate(self.clients_.tolist())}
        if self.personal_ is None:
            known = {}
        return np.array([known.get(client, -1) for client in ids.tolist()])

    def _of(self, place: int) -> PyTree:
        if place < 0:
            return self.shared_
        return jax.tree.map(lambda leaf: leaf[place], self.personal_)


class FederatedClassifier(ClassifierMixin, _Federated):
    """Classification with a federated algorithm.

    Args:
        model: "linear" (that is, softmax regression), another name from
            ``fedblend.models.MODELS``, or a ``Model``.
        algorithm: "fedavg", "finetune", "local_only", "scaffold", or a function from
            a loss to an ``Algorithm``.
        rounds: of communication.
        cohort: clients of a round; all of them if None.
        rate: of the clients' SGD, or an optax optimizer.
        steps: local steps of a round (of "finetune" also afterwards), or ``Epochs``.
        batch_size: rows of a step, None for all rows of the client.
        l2: strength of the penalty on the parameters.
        model_options: of a model given by name, such as ``{"hidden": (32,)}``.
        seed: of everything random.

    After ``fit``: ``classes_``, ``clients_`` (the ids), ``shared_`` and ``personal_``
    (parameters; the latter stacked over clients, or None where all clients use the
    shared model), ``summary_`` (what it cost, in bits and seconds).
    """

    def fit(self, X: Any, y: Any, client_ids: Any = None) -> "FederatedClassifier":
        """Train; without ``client_ids`` all rows are one client's."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y: all targets are of one class, {self.classes_[0]!r}; a classifier "
                "needs at least 2 classes"
            )
        self._fit(X, codes.astype(np.int32), client_ids)
        return self

    def predict_proba(
        self, X: Any, client_id: Any = None, client_ids: Any = None
    ) -> np.ndarray:
        """The probability of every class, in the order of ``classes_``."""
        scores = self._outputs(X, client_id, client_ids)
        if scores.ndim == 1 or scores.shape[1] == 1:
            scores = np.stack([np.zeros(len(scores)), scores.reshape(-1)], axis=1)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def predict(
        self, X: Any, client_id: Any = None, client_ids: Any = None
    ) -> np.ndarray:
        """The class of every row, for one client or for each row's own."""
        chances = self.predict_proba(X, client_id=client_id, client_ids=client_ids)
        return self.classes_[chances.argmax(axis=1)]

    def score(
        self, X: Any, y: Any, client_ids: Any = None, sample_weight: Any = None
    ) -> float:
        """The accuracy, every row predicted for its own client."""
        right = self.predict(X, client_ids=client_ids) == np.asarray(y)
        return float(np.average(right, weights=sample_weight))

    def _model_and_loss(self) -> tuple[models.Model, Loss]:
        model = self._build(len(self.classes_))
        single = self.model == "logistic"
        loss = losses.logistic if single else losses.cross_entropy
        return model, _penalized(loss(model.apply), self.l2)


class FederatedRegressor(RegressorMixin, _Federated):
    """Regression by least squares with a federated algorithm.

    The arguments are those of ``FederatedClassifier``; targets may have several
    columns.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, client_ids: Any = None) -> "FederatedRegressor":
        """Train; without ``client_ids`` all rows are one client's."""
        X, y = validate_data(
            self, X, y, dtype=np.float32, multi_output=True, y_numeric=True
        )
        self.targets_ = y.shape[1:]
        self._fit(X, y.astype(np.float32), client_ids)
        return self

    def predict(
        self, X: Any, client_id: Any = None, client_ids: Any = None
    ) -> np.ndarray:
        """The value of every row, for one client or for each row's own."""
        outputs = self._outputs(X, client_id, client_ids)
        return outputs.reshape(len(outputs), *self.targets_)

    def score(
        self, X: Any, y: Any, client_ids: Any = None, sample_weight: Any = None
    ) -> float:
        """The coefficient of determination, every row predicted for its client."""
        from sklearn.metrics import r2_score

        guessed = self.predict(X, client_ids=client_ids)
        return float(r2_score(y, guessed, sample_weight=sample_weight))

    def _model_and_loss(self) -> tuple[models.Model, Loss]:
        width = int(np.prod(self.targets_, dtype=int))
        model = self._build(width)
        return model, _penalized(losses.squared_error(model.apply), self.l2)


def _penalized(loss: Loss, strength: float) -> Loss:
    return losses.l2(loss, strength) if strength else loss


def _padded_predict(apply: Any, params: PyTree, inputs: np.ndarray) -> np.ndarray:
    """Outputs, computed in few different shapes: each shape is compiled once."""
    rows = len(inputs)
    room = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
    padded = np.pad(inputs, [(0, room - rows), (0, 0)])
    return np.asarray(predict(apply, params, padded))[:rows]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated learning behind scikit-learn's interface.

``fit(X, y, client_ids=ids)`` takes flat arrays and the client of every row. Rows of a
client that was in ``fit`` are predicted with its personal model, all others with the
shared model. Where clients have personal models, a prediction must name the client.

Client ids use scikit-learn's metadata routing: all methods request them, so that with
``sklearn.set_config(enable_metadata_routing=True)`` cross-validation passes every fold
its own. scikit-learn's scorers pass routed values to their metric, never to the
estimator that predicts; ``client_scorer`` passes client ids to the estimator.

A frame with texts, dates or missing values is preprocessed like a raw table (see
``data.preprocess``), fitted on the rows of ``fit`` as the mean of the clients' means.
Other inputs become float32 and are not scaled: put a ``StandardScaler`` in front.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast
from warnings import warn

import jax
import numpy as np
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import get_scorer, r2_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.metadata_routing import get_routing_for_object
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

import fedblend as fb
from fedblend import losses, models, trees
from fedblend.checks import COUNT, NOT_NEGATIVE, WHOLE, optional
from fedblend.core import Algorithm, Loss, PyTree, shared_model
from fedblend.data.federated import federate
from fedblend.data.partition import by_key
from fedblend.data.preprocess.preprocessing import fit
from fedblend.data.preprocess.schema import Columns, schema_of
from fedblend.data.readers.tables import complete_numbers, read_table
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
"""The checks of the settings; the others are checked where they are used."""
LEAST_ROWS = 8
"""Rows are predicted in groups padded to a power of two, and at least to this one."""
METHODS = {build.__name__: build for build in (fb.fedavg, fb.local_only, fb.scaffold)}
"""The methods that need no options, by name."""
PREDICTING = ("predict", "predict_proba", "predict_log_proba", "decision_function")
ROUTED = {"client_ids": True}
"""What every method requests from scikit-learn's metadata routing."""


class _Federated(BaseEstimator):
    """The part that classifier and regressor share."""

    n_features_in_: int

    # The defaults of scikit-learn's metadata routing.
    __metadata_request__fit = ROUTED
    __metadata_request__predict = ROUTED
    __metadata_request__predict_proba = ROUTED
    __metadata_request__score = ROUTED

    def __init__(
        self,
        model: Any = "linear",
        algorithm: Any = fb.fedavg.__name__,
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
        """Give every client its rows, simulate, and store the models as arrays."""
        ids = np.zeros(len(inputs), int) if client_ids is None else client_ids
        ids = column_or_1d(ids)
        check_consistent_length(inputs, ids)
        parts = by_key(ids).rows
        if self._schema is not None:
            encoded = [inputs[rows] for rows in parts]
            self.preprocessing_ = fit(self._schema, encoded)
            inputs = self.preprocessing_.transform_encoded(inputs)
        for name, rule in RULES.items():
            rule(f"{type(self).__name__}: {name}", getattr(self, name))
        self.clients_ = np.unique(ids)
        model, loss = self._model_and_loss()
        algorithm = self._algorithm(loss)
        rows = (inputs.astype(np.float32), targets)
        run = simulate(
            algorithm,
            model.init,
            federate(rows, parts, seed=self.seed),
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

    def _validate(self, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        """Inputs and targets of ``fit``; the columns of a raw table as encoded."""
        self._schema, self.preprocessing_ = None, None
        table = raw_table(X)
        if table is None:
            rows: Any = validate_data(self, X, y, dtype=np.float32, **options)
            return rows
        as_given: Any = {"dtype": None}
        y = check_array(y, ensure_2d=False, input_name="y", **as_given)
        y = column_or_1d(y, warn=True) if "multi_output" not in options else y
        check_consistent_length(X, y)
        self.feature_names_in_ = np.array(list(table), object)
        self.n_features_in_ = len(table)
        self._schema = schema_of(table)
        return self._schema.encode(table), y

    def _task(self) -> tuple[int, Callable[[Any], Loss]]:
        """The number of outputs, and the loss of a model's ``apply``."""
        raise NotImplementedError

    def _model_and_loss(self) -> tuple[models.Model, Loss]:
        """The model, by name or as it was given, and its penalized loss."""
        outputs, loss_of = self._task()
        model: Any = self.model
        if isinstance(model, str):
            name, options = model, self.model_options or {}
            name = "softmax" if name == "linear" else name
            width = self.n_features_in_ if self._schema is None else self._schema.width
            model = models.build(name, (width,), outputs, **options)
        elif not (hasattr(model, "init") and hasattr(model, "apply")):
            key = f"{type(self).__name__}: model"
            raise UserError(key, model, "the name of a model, or a Model")
        loss = loss_of(model.apply)
        return model, losses.l2(loss, self.l2) if self.l2 else loss

    def _algorithm(self, loss: Loss) -> Algorithm:
        """The algorithm, by name or from its builder."""
        if callable(self.algorithm):
            return cast(Algorithm, self.algorithm(loss))
        work = Work(self.rate, steps=self.steps, batch_size=self.batch_size)
        if self.algorithm == fb.finetune.__name__:
            return fb.finetune(fb.fedavg(loss, work), loss, work)
        name = str(self.algorithm)
        if name not in METHODS:
            known = f"one of {fb.finetune.__name__}, {', '.join(METHODS)}"
            raise UserError(
                f"{type(self).__name__}: algorithm",
                self.algorithm,
                f"{known}; give a function from a loss to an Algorithm",
            )
        return METHODS[name](loss, work)

    def _outputs(self, X: Any, client_id: Any, client_ids: Any) -> np.ndarray:
        """The outputs of the model of every row's client."""
        check_is_fitted(self)
        if client_id is not None and client_ids is not None:
            raise ValueError("client_id and client_ids: give one of them, not both")
        if self.preprocessing_ is not None:
            inputs = self.preprocessing_.transform(read_table(X).columns)
        else:
            inputs = np.asarray(validate_data(self, X, reset=False, dtype=np.float32))
        if client_id is None and client_ids is None:
            client_id = self._only_client()
        ids = np.full(len(inputs), client_id) if client_ids is None else client_ids
        check_consistent_length(inputs, ids)
        apply = self._model_and_loss()[0].apply
        known = {client: place for place, client in enumerate(self.clients_.tolist())}
        if self.personal_ is None:
            known = {}
        places = np.array([known.get(one, -1) for one in column_or_1d(ids).tolist()])
        outputs: np.ndarray | None = None
        for place in np.unique(places):
            params = self.shared_
            if place >= 0:
                params = trees.take(self.personal_, int(place))
            mine = np.flatnonzero(places == place)
            values = _predict_padded(apply, params, inputs[mine])
            if outputs is None:
                outputs = np.empty((len(inputs), *values.shape[1:]), np.float64)
            outputs[mine] = values
        assert outputs is not None
        return outputs

    def _only_client(self) -> Any:
        """The client whose rows are predicted if none is named."""
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
    shared model), ``summary_`` (what it cost, in bits and seconds), ``preprocessing_``
    (what was done to the columns of a raw table, or None).
    """

    def fit(self, X: Any, y: Any, client_ids: Any = None) -> "FederatedClassifier":
        """Train; without ``client_ids`` all rows are one client's."""
        X, y = self._validate(X, y)
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
        return softmax(scores, axis=1)

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

    def _task(self) -> tuple[int, Callable[[Any], Loss]]:
        single = self.model == "logistic"
        return len(self.classes_), losses.logistic if single else losses.cross_entropy


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
        X, y = self._validate(X, y, multi_output=True, y_numeric=True)
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
        guessed = self.predict(X, client_ids=client_ids)
        return float(r2_score(y, guessed, sample_weight=sample_weight))

    def _task(self) -> tuple[int, Callable[[Any], Loss]]:
        return int(np.prod(self.targets_, dtype=int)), losses.squared_error


def raw_table(X: Any) -> Columns | None:
    """The columns of a data frame with more than complete numbers; else None."""
    if not hasattr(X, "columns"):
        return None
    table = read_table(X).columns
    return None if complete_numbers(table) else table


def _predict_padded(apply: Any, params: PyTree, inputs: np.ndarray) -> np.ndarray:
    """Outputs, computed in few different shapes: each shape is compiled once."""
    rows = len(inputs)
    room = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
    padded = np.pad(inputs, [(0, room - rows), (0, 0)])
    return np.asarray(predict(apply, params, padded))[:rows]


def client_scorer(scoring: str | Callable) -> "ClientScorer":
    """A scorer for ``scoring=`` that scores every client's own model.

    With ``sklearn.set_config(enable_metadata_routing=True)`` cross-validation and
    searches pass it the ids of ``params={"client_ids": ids}``.

    Args:
        scoring: a name such as "roc_auc", or a scorer (``make_scorer(...)``).
    """
    return ClientScorer(get_scorer(scoring))


class ClientScorer:
    """``scorer(estimator, X, y, client_ids=ids)``, made by ``client_scorer``."""

    def __init__(self, scorer: Callable):
        self.scorer = scorer

    def __repr__(self) -> str:
        return f"client_scorer({self.scorer!r})"

    def __call__(
        self, estimator: Any, X: Any, y: Any, client_ids: Any = None, **routed: Any
    ) -> float:
        """The score of these rows, each predicted for its client."""
        if client_ids is not None:
            estimator = _ForClients(estimator, client_ids)
        return self.scorer(estimator, X, y, **routed)

    def get_metadata_routing(self) -> Any:
        """The requests of the scorer: client ids, and those of its metric."""
        asked = get_routing_for_object(self.scorer)
        asked.score.add_request(param="client_ids", alias=True)
        return asked


class _ForClients:
    """A fitted estimator that predicts the rows of these clients."""

    def __init__(self, estimator: Any, client_ids: Any):
        # The ``predict`` of a search takes only rows; that of its estimator takes ids.
        self._estimator = getattr(estimator, "best_estimator_", estimator)
        self._ids = client_ids

    def __getattr__(self, name: str) -> Any:
        value, ids = getattr(self._estimator, name), self._ids
        if name not in PREDICTING:
            return value
        return wraps(value)(lambda rows: value(rows, client_ids=ids))

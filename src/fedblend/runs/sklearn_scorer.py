# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A scorer of scikit-learn that scores every client's own model."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from sklearn.metrics import get_scorer
from sklearn.utils.metadata_routing import get_routing_for_object

PREDICTING = ("predict", "predict_proba", "predict_log_proba", "decision_function")


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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[select]``: tables of which clients get the rows that they use.

Which rows an example uses is known of the models that look rows up.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedblend import wrap
from fedblend.core import Algorithm
from fedblend.data.federation import Federation
from fedblend.experiment.section import ConfigError, Section
from fedblend.models.dual_encoder import PAD

if TYPE_CHECKING:
    from fedblend.experiment.config import Config

LOOKED_UP = {"dual_encoder": {"embedding": ("0", "1")}}
"""For models, the tables they look rows up in, and where examples have the numbers."""
ALWAYS = {"dual_encoder": PAD + 1}
"""Rows from the first on that keep their numbers."""


class Select(Section):
    """Which parameters are tables."""

    parameters: Annotated[list[str], Field(min_length=1)]


def check_tables(config: "Config") -> None:
    """Refuse what does not go with a model that looks rows up, or needs one.

    Raises:
        ValueError: one line, with the key first.
    """
    model = _model(config)
    if model == "dual_encoder" and config.data.source != "movielens":
        raise ValueError(
            'model.name: "dual_encoder" reads numbers of movies, as data.source = '
            '"movielens" has them'
        )
    central = config.central
    if central is not None and central.penalty and model != "dual_encoder":
        raise ValueError(
            f'central.penalty: "{central.penalty}" is of the embeddings of '
            f"dual_encoder, and the model is {model}"
        )
    if config.select is not None:
        _check(config, config.select, model)


def _check(config: "Config", table: Select, model: str) -> None:
    if model not in LOOKED_UP:
        raise ValueError(
            f"select: {model} looks no rows up in a table; {', '.join(LOOKED_UP)} does"
        )
    for name in table.parameters:
        if name not in LOOKED_UP[model]:
            raise ValueError(
                f'select.parameters: "{name}" is no table that {model} looks rows up '
                f"in; there is {', '.join(LOOKED_UP[model])}"
            )
    if config.model.loss not in (None, "hinge"):
        raise ValueError(
            f'select: model.loss = "{config.model.loss}" reads the whole table'
        )
    if config.model.l2:
        raise ValueError(f"select: model.l2 = {config.model.l2} reads the whole table")
    if config.compress is not None:
        raise ValueError("select: does not go with [compress]")
    if config.privacy is not None:
        raise ValueError("select: tells the server which rows are whose; no [privacy]")
    decay = getattr(getattr(config.algorithm, "optimizer", None), "weight_decay", 0)
    if decay:
        raise ValueError(f"select: weight_decay = {decay} moves rows that nobody uses")


def selected(
    config: "Config", algorithm: Algorithm, federation: Federation
) -> Algorithm:
    """The algorithm, with messages that hold the rows that a client uses.

    Raises:
        ConfigError: it is none that can do without the other rows.
    """
    if config.select is None:
        return algorithm
    fields = LOOKED_UP[_model(config)]
    rows = {name: fields[name] for name in config.select.parameters}
    always = ALWAYS[_model(config)]
    try:
        return wrap.select(algorithm, federation, rows=rows, always=always)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _model(config: "Config") -> str:
    return getattr(config.model, "name")  # noqa: B009

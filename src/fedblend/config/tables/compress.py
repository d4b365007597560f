# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[compress]``: the transforms that it puts around an algorithm.

Where ``start`` is not given, DIANA's memories start at the first gradient if the dense
message that this takes is at most a seventh of what a client sends in the run: if it
answers at least ``7 (omega + 1)`` times, since a dense message has as many entries as
omega + 1 answers of rand-k. Bounds are the same for both starts, so that the factor is
measured: ``reproductions/studies/diana_start.py``. With ``masks = "one"`` they start at
zero.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from warnings import catch_warnings, simplefilter

import numpy as np
from pydantic import (
    Field,
    model_validator,
)

from fedblend import compress, transforms
from fedblend.compress import Compressor
from fedblend.config.table import (
    NO_VALUES,
    Share,
    Table,
    Values,
    arguments,
    check_lists,
    one_of,
    refuse_first,
    table_of,
)
from fedblend.core import Algorithm, Needs
from fedblend.errors import ConfigError
from fedblend.transforms._compose import adds_up, exact_with_ef21
from fedblend.transforms.diana import check_rate

COMPRESSORS = ("dithering", "identity", "int8", "natural", "rand_k", "sign", "top_k")
"""Those of ``fedblend.compress``; options as of the function."""
ANSWERS = 7
"""How many times more a run sends than the message that starts memories."""


class CompressorTable(Table):
    """A compressor by name."""

    name: str

    def make(
        self, facts: Mapping[str, Any] = NO_VALUES, values: Values = NO_VALUES
    ) -> Compressor:
        """The compressor."""
        build = getattr(compress, self.name)
        return build(**arguments(build, self, facts, values=values))


if TYPE_CHECKING:
    AnyCompressor = CompressorTable
else:
    AnyCompressor = one_of(
        table_of(getattr(compress, name), name, CompressorTable) for name in COMPRESSORS
    )


class Compress(Table):
    """Which compressors, and the transforms that use them."""

    how: Literal["plain", "diana", "ef21", "perm_k"] = "plain"
    compressor: AnyCompressor | None = None
    rate: Share | Annotated[list[Share], Field(min_length=1)] | None = None
    start: Literal["zero", "first"] | None = None
    masks: Literal["own", "one"] = "own"
    down: AnyCompressor | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "Compress":
        how, one, up, down = self.how, self.masks == "one", self.compressor, self.down
        only = f'goes with how = "diana", not with "{how}"'
        permuted = how == "perm_k"
        refuse_first(
            (how != "diana" and self.rate is not None, "rate", only),
            (how != "diana" and self.start is not None, "start", only),
            (
                one and how not in ("plain", "diana"),
                "masks",
                f'"one" goes with how = "plain" or "diana", not with "{how}"',
            ),
            (
                down is not None and down.make().delta is None,
                "down",
                f"needs a compressor that contracts, not {down and down.name}",
            ),
            (
                permuted and up is not None,
                "compressor",
                'how = "perm_k" has no other compressor; leave it out',
            ),
            (
                not permuted and up is None and (how != "plain" or not down or one),
                "compressor",
                "is missing",
            ),
        )
        if up is None:
            return self
        made = up.make()
        refuse_first(
            (
                one and not made.masks,
                "masks",
                '"one" needs rand_k with one k, and places that are not "sent"',
            ),
            (
                how == "diana" and made.omega is None,
                "how",
                f'"diana" needs an unbiased compressor, not {up.name}',
            ),
            (
                how == "ef21" and made.delta is None,
                "how",
                f'"ef21" needs one that contracts, not {up.name}',
            ),
        )
        return self


def first_memories(omega: float | np.ndarray, answers: float) -> str:
    """How DIANA's memories start: "first" where a client answers often enough.

    Args:
        omega: the compressors' variance.
        answers: of a client in the run.
    """
    return "first" if answers >= ANSWERS * (np.max(omega) + 1) else "zero"


def compress_updates(
    table: Compress,
    algorithm: Algorithm,
    dim: int,
    clients: int,
    answers: float = 0.0,
) -> Algorithm:
    """The algorithm with compressed updates of ``dim`` numbers.

    ``answers`` are those of a client in the run, which choose DIANA's start.

    Raises:
        ConfigError: what the table asks for does not go with the model or the clients.
    """
    check_lists("compress", table, clients)
    with catch_warnings():
        simplefilter("ignore")  # ``feedback_warnings`` has the text
        algorithm = _compress_up(table, algorithm, dim, clients, answers)
        if table.down is None:
            return algorithm
        made = fit_compressor("compress.down", table.down, dim)
        contraction("down", made, dim)
        return transforms.downlink(algorithm, made)


def feedback_warnings(table: Compress, needs: Needs) -> list[str]:
    """What may diverge, of an algorithm with these needs under the table."""
    noisy = table.how == "perm_k" or table.compressor is not None
    up = needs.feedback if noisy and table.how != "ef21" else ""
    exact = exact_with_ef21(needs) if table.how == "ef21" else needs.exact
    down = exact if table.down is not None else ""
    return [
        *filter(None, (adds_up(up, "compress.how"), adds_up(down, "compress.down")))
    ]


def fit_compressor(key: str, chosen: CompressorTable, dim: int) -> Compressor:
    """The compressor of a table, for a model of ``dim`` numbers; ``key`` names it.

    Raises:
        ConfigError: it is to keep more entries than there are.
    """
    most = np.max(getattr(chosen, "k", 1))
    if most > dim:
        raise ConfigError(f"{key}.k: {most} is more than the model's {dim} parameters")
    return chosen.make()


def contraction(key: str, made: Compressor, dim: int) -> Any:
    """The delta of a compressor; ``key`` of ``[compress]`` names it.

    Raises:
        ConfigError: it does not contract so many parameters.
    """
    found = None if made.delta is None else made.delta(dim)
    if found is None or not np.min(found) > 0:
        raise ConfigError(
            f"compress.{key}: {made.name} does not contract {dim} parameters"
        )
    return found


def _compress_up(
    table: Compress, algorithm: Algorithm, dim: int, clients: int, answers: float
) -> Algorithm:
    """The algorithm with compressed answers of the clients."""
    if table.how == "perm_k":
        return transforms.perm_k(algorithm, clients=clients)
    if table.compressor is None:
        return algorithm
    made = fit_compressor("compress.compressor", table.compressor, dim)
    one = table.masks == "one"
    if table.how == "plain":
        use = transforms.common_mask if one else transforms.compressed
        return use(algorithm, made)
    if table.how == "ef21":
        contraction("compressor", made, dim)
        return transforms.ef21(algorithm, made)
    rate = np.asarray(table.rate) if isinstance(table.rate, list) else table.rate
    assert made.omega is not None  # the table takes unbiased ones only
    try:
        check_rate(rate, made.omega(dim))
    except ValueError as error:
        raise ConfigError(f"compress.{error}") from None
    # With one mask memories follow the mean alone, which is 0 at the optimum.
    chosen = "zero" if one else first_memories(made.omega(dim), answers)
    diana = partial(transforms.diana, rate=rate, start=table.start or chosen)
    if one:
        return transforms.common_mask(algorithm, made, how=diana)
    return diana(algorithm, made)

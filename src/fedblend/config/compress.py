# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[compress]``: how clients' answers are compressed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from fedblend import compress, transforms
from fedblend.compress import Compressor
from fedblend.config.errors import named_by_key
from fedblend.config.schema.table import (
    ConfigError,
    Misfit,
    Positive,
    Table,
    arguments,
    check_lists,
    one_of,
    table_of,
)
from fedblend.core import Algorithm
from fedblend.transforms.diana import check_rate

COMPRESSORS = ("dithering", "identity", "int8", "natural", "rand_k", "sign", "top_k")
"""Those of ``fedblend.compress``; options as of the function."""


class CompressorTable(Table):
    """A compressor by name."""

    name: str

    def make(self, facts: Mapping[str, Any]) -> Compressor:
        """The compressor."""
        build = getattr(compress, self.name)
        return build(**arguments(build, self, facts))


if TYPE_CHECKING:
    AnyCompressor = CompressorTable
else:
    AnyCompressor = one_of(
        table_of(getattr(compress, name), name, CompressorTable) for name in COMPRESSORS
    )


class Compress(Table):
    """Which compressor, and what makes use of it."""

    how: Literal["plain", "diana", "ef21"] = "plain"
    compressor: AnyCompressor
    rate: Positive | Annotated[list[Positive], Field(min_length=1)] | None = None
    start: Literal["zero", "first"] = "zero"

    @model_validator(mode="after")
    def _goes_together(self) -> "Compress":
        name = self.compressor.name
        if self.how != "diana" and (self.rate is not None or self.start != "zero"):
            key = "rate" if self.rate is not None else "start"
            raise Misfit(key, f'goes with how = "diana", not with "{self.how}"')
        if self.how == "diana" and name in ("top_k", "sign"):
            raise Misfit("how", f'"diana" needs an unbiased compressor, not {name}')
        if self.how == "ef21" and name == "rand_k":
            raise Misfit("how", '"ef21" needs one that contracts, not rand_k')
        if self.rate is not None and np.max(self.rate) > 1:
            raise Misfit("rate", f"{self.rate} is not between 0 and 1")
        return self


def compressed(
    table: Compress | None, algorithm: Algorithm, name: str, dim: int, clients: int
) -> Algorithm:
    """The algorithm of that name, as the table wants it wrapped.

    Raises:
        ConfigError: what the table asks for does not go with the model or the clients.
    """
    if table is None:
        return algorithm
    if name == "local_only":
        raise ConfigError("compress: local_only sends nothing that could be compressed")
    chosen = table.compressor
    check_lists("compress", table, clients)
    made = chosen.make({})
    most = np.max(getattr(chosen, "k", 1))
    if most > dim:
        raise ConfigError(
            f"compress.compressor.k: {most} is more than the model's {dim} parameters"
        )
    if table.how == "plain":
        return transforms.compressed(algorithm, made)
    if table.how == "ef21":
        if made.delta is None or not np.min(made.delta(dim)) > 0:
            raise ConfigError(
                f"compress.how: ef21 needs a compressor that contracts, and "
                f"{made.name} does not for {dim} parameters"
            )
        return transforms.ef21(algorithm, made)
    rate = np.asarray(table.rate) if isinstance(table.rate, list) else table.rate
    assert made.omega is not None  # the table takes unbiased ones only
    with named_by_key(rate="compress.rate"):
        check_rate(rate, made.omega(dim))
    return transforms.diana(algorithm, made, rate=rate, start=table.start)

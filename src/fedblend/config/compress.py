# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[compress]``: how clients' answers are compressed."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from fedblend import compress, transforms
from fedblend.compress import Compressor
from fedblend.config.errors import named_by_key
from fedblend.config.schema.table import ConfigError, Count, Positive, Table
from fedblend.core import Algorithm
from fedblend.transforms.diana import check_rate


class RandK(Table):
    """Entries chosen at random."""

    name: Literal["rand_k"]
    k: Count | Annotated[list[Count], Field(min_length=1)]
    places: Literal["shared", "seed", "sent"] = "shared"


class TopK(Table):
    """The largest entries."""

    name: Literal["top_k"]
    k: Count | Annotated[list[Count], Field(min_length=1)]


class Dithering(Table):
    """Entries rounded at random to levels of the norm."""

    name: Literal["dithering"]
    levels: Annotated[int, Field(ge=1, le=2**24)]


class Plain(Table):
    """Compressors that have no options."""

    name: Literal["identity", "natural", "int8", "sign"]


AnyCompressor = Annotated[RandK | TopK | Dithering | Plain, Field(discriminator="name")]


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
            raise ValueError(f'{key}: goes with how = "diana", not with "{self.how}"')
        if self.how == "diana" and name in ("top_k", "sign"):
            raise ValueError(f'how: "diana" needs an unbiased compressor, not {name}')
        if self.how == "ef21" and name == "rand_k":
            raise ValueError('how: "ef21" needs one that contracts, not rand_k')
        if self.rate is not None and np.max(self.rate) > 1:
            raise ValueError(f"rate: {self.rate} is not between 0 and 1")
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
    _check_list("compress.compressor.k", getattr(chosen, "k", None), clients)
    _check_list("compress.rate", table.rate, clients)
    made = compressor(chosen)
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


def compressor(chosen: Any) -> Compressor:
    """The compressor that a table ``compressor`` describes."""
    options = chosen.model_dump(exclude={"name"})
    if isinstance(options.get("k"), list):
        options["k"] = np.asarray(options["k"])
    return getattr(compress, chosen.name)(**options)


def _check_list(where: str, values: Any, clients: int) -> None:
    if isinstance(values, list) and len(values) != clients:
        raise ConfigError(
            f"{where}: {len(values)} numbers for {clients} clients; give one for each, "
            "or a single one"
        )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[federation]``: how a server waits for its nodes, and what it believes.

Where sums are secure, a configuration cannot have what needs the answers of single
clients, or shows them in a sum.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from fedblend.checks import Number
from fedblend.config.table import (
    Count,
    Index,
    Positive,
    Share,
    Table,
    limit,
)
from fedblend.errors import SettingError

if TYPE_CHECKING:
    from fedblend.config.config import Config

LEAST = 3
"""Clients without which a sum hides nobody."""
APART = ("top_k", "rand_k")
"""Compressors whose entries differ by client in ``[compress]``."""
SUMMED = 'whole updates, quantizers, rand_k with masks = "one"'
"""Answers whose sum shows no single client."""


class Federation(Table):
    """How the server of a federation waits for its nodes, and whom it believes."""

    deadline: Positive = 600.0
    resend: Positive = 120.0
    attempts: Count = 20
    quorum: Share = 1.0
    spare: Index = 0
    longest_update: Positive | None = None
    longest_rest: Positive | None = None
    largest_answer: Count | None = None
    norm_ratio: Positive | None = 100.0
    clip_ratio: Positive | None = 3.0
    weight_ratio: Annotated[float, limit(Number(least=1))] | None = 3.0
    max_rows: Count = 1_000_000
    secure: bool = False
    secure_bits: Literal[32, 64] = 64
    secure_clip: Positive = 65536.0


def check_secure(config: "Config", clients: int) -> None:
    """Refuse what needs the answers of single clients, or shows them in a sum.

    Raises:
        SettingError: what it is, and what is allowed.
    """
    asked, run, compress = config.federation, config.run, config.compress
    cohort = run.cohort or clients
    name = getattr(getattr(compress, "compressor", None), "name", None)
    one = compress is not None and compress.masks == "one"
    for key, value, wrong, allowed in (
        ("run.reduction", run.reduction, run.reduction != "mean", "mean"),
        ("compress.compressor", name, name in APART and not one, SUMMED),
        (
            "compress.start",
            "first",
            compress is not None and compress.start == "first",
            "zero; the first answers would be whole, and of some clients only",
        ),
        (
            "compress.rate",
            "a list",
            compress is not None and isinstance(compress.rate, list),
            "one rate for all clients",
        ),
        (
            "compress.how",
            "perm_k",
            compress is not None and compress.how == "perm_k",
            SUMMED,
        ),
        (
            "compress.masks",
            "one",
            one and config.privacy is not None,
            "own, with a quantizer; [privacy] clips each answer, and not their sum",
        ),
        (
            "run.cohort",
            cohort,
            config.privacy is not None and cohort < clients,
            "all nodes; with [privacy] nobody may know who takes part",
        ),
        ("run.cohort", cohort, cohort < LEAST, f"{LEAST} or more"),
        *(
            (f"federation.{name}", getattr(asked, name), getattr(asked, name), "none")
            for name in ("spare", "longest_update", "longest_rest")
        ),
    ):
        if wrong:
            raise SettingError(
                key, f"is {value}; with federation.secure allowed: {allowed}"
            )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[compress]``: the transforms that it puts around an algorithm.

Where ``start`` is not given, DIANA's memories start at the first gradient if the dense
message that this takes is at most a seventh of what a client sends in the run: if it
answers at least ``7 (omega + 1)`` times, since a dense message has as many entries as
omega + 1 answers of rand-k. Bounds are the same for both starts, so that the factor is
measured: ``benchmarks/diana_start.py``. With ``masks = "one"`` they start at zero.
"""

from functools import partial
from warnings import catch_warnings, simplefilter

import numpy as np

from fedblend import transforms
from fedblend.compress import Compressor
from fedblend.config.config import named_by_key
from fedblend.config.schema.table import check_lists
from fedblend.config.schema.tables import Compress, CompressorTable
from fedblend.core import Algorithm, Needs
from fedblend.errors import ConfigError
from fedblend.transforms._compose import adds_up
from fedblend.transforms.diana import check_rate

ANSWERS = 7
"""How many times more a run sends than the message that starts memories."""


def first_memories(omega: float | np.ndarray, answers: float) -> str:
    """How DIANA's memories start: "first" where a client answers often enough.

    Args:
        omega: the compressors' variance.
        answers: of a client in the run.
    """
    return "first" if answers >= ANSWERS * (np.max(omega) + 1) else "zero"


def compressed(
    table: Compress | None,
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
    if table is None:
        return algorithm
    check_lists("compress", table, clients)
    with catch_warnings():
        simplefilter("ignore")  # ``feedback_warnings`` has the text
        algorithm = _compressed_up(table, algorithm, dim, clients, answers)
        if table.down is None:
            return algorithm
        made = fitting("compress.down", table.down, dim)
        if made.delta is None or not np.min(made.delta(dim)) > 0:
            raise ConfigError(
                f"compress.down: {made.name} does not contract {dim} parameters"
            )
        return transforms.downlink(algorithm, made)


def feedback_warnings(table: Compress | None, needs: Needs) -> list[str]:
    """What may diverge, of an algorithm with these needs under the table."""
    if table is None:
        return []
    noisy = table.how == "perm_k" or table.compressor is not None
    up = needs.feedback if noisy and table.how != "ef21" else ""
    down = needs.exact if table.down is not None else ""
    return [
        *filter(None, (adds_up(up, "compress.how"), adds_up(down, "compress.down")))
    ]


def fitting(key: str, chosen: CompressorTable, dim: int) -> Compressor:
    """The compressor of a table, for a model of ``dim`` numbers; ``key`` names it.

    Raises:
        ConfigError: it is to keep more entries than there are.
    """
    most = np.max(getattr(chosen, "k", 1))
    if most > dim:
        raise ConfigError(f"{key}.k: {most} is more than the model's {dim} parameters")
    return chosen.make({})


def _compressed_up(
    table: Compress, algorithm: Algorithm, dim: int, clients: int, answers: float
) -> Algorithm:
    """The algorithm with compressed answers of the clients."""
    if table.how == "perm_k":
        return transforms.perm_k(algorithm, clients=clients)
    if table.compressor is None:
        return algorithm
    made = fitting("compress.compressor", table.compressor, dim)
    one = table.masks == "one"
    if table.how == "plain":
        use = transforms.common_mask if one else transforms.compressed
        return use(algorithm, made)
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
    # With one mask memories follow the mean alone, which is 0 at the optimum.
    chosen = "zero" if one else first_memories(made.omega(dim), answers)
    diana = partial(transforms.diana, rate=rate, start=table.start or chosen)
    if one:
        return transforms.common_mask(algorithm, made, how=diana)
    return diana(algorithm, made)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The inputs of a ``scan`` in a jaxpr, whose parameters JAX has renamed."""

from collections.abc import Mapping
from typing import Any


def scan_inputs(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan stay the same, and how many are carried on.

    Args:
        params: those of the jaxpr's equation.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since JAX 0.11: trees of the inputs that stay, are carried on, are looped over.
    same, carried, _ = params["ft_in"].unpack()
    return len(same.vals), len(carried.vals)

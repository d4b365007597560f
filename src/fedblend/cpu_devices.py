# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How many devices JAX makes of a CPU: one for each core that this process may use.

JAX fixes the number when it starts. ``import fedblend`` comes before that in most
programs, and sets it without importing JAX. ``FEDBLEND_DEVICES`` is another number;
whoever has told JAX one (``JAX_NUM_CPU_DEVICES``, ``XLA_FLAGS``) keeps it.
"""

import os
import sys
import warnings

VARIABLE = "FEDBLEND_DEVICES"
FLAG = "xla_force_host_platform_device_count"

_missed = 0
"""Devices that were wanted when JAX had already started."""


def count_devices() -> int:
    """Number of devices that the CPU is split into."""
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        from fedblend.errors import UserError  # imports NumPy, which is slow

        raise UserError(VARIABLE, given, "a whole number of at least 1")
    return int(given)


_LINUX = hasattr(os, "sched_getaffinity")


def set_up() -> None:
    """Have JAX create these devices when it starts, unless JAX is set up by itself.

    Importing fedblend never fails: a wrong number is refused where it is used.
    """
    global _missed
    told = "JAX_NUM_CPU_DEVICES" in os.environ and VARIABLE not in os.environ
    if told or FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        number, jax = count_devices(), sys.modules.get("jax")
    except ValueError:
        return
    if jax is None:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(number)
    elif jax.config.jax_num_cpu_devices < 1:
        try:
            jax.config.update("jax_num_cpu_devices", number)
        except RuntimeError:  # it has started
            _missed = number if number > 1 else 0


def warn_once() -> None:
    """Say that JAX had started before fedblend could set the number of devices."""
    global _missed
    number, _missed = _missed, 0
    if number > 1:
        warnings.warn(
            f"JAX started before fedblend was imported, and uses 1 of {number} cores; "
            f"import fedblend first, or set JAX_NUM_CPU_DEVICES={number}",
            stacklevel=2,
        )

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


def wanted() -> int:
    """Devices to make of the CPU."""
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        return len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1
    if not said.isdecimal() or int(said) < 1:
        from fedblend.errors import UserError  # NumPy takes its time

        raise UserError(VARIABLE, said, "a whole number of at least 1")
    return int(said)


_LINUX = hasattr(os, "sched_getaffinity")


def set_up() -> None:
    """Have JAX make these devices when it starts, if nobody has told it a number.

    Importing fedblend never fails: a number that is wrong is refused where it is used.
    """
    global _missed
    told = "JAX_NUM_CPU_DEVICES" in os.environ and VARIABLE not in os.environ
    if told or FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        number, jax = wanted(), sys.modules.get("jax")
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

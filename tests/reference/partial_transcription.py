# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedSim and FedAlt of Pillutla et al. 2022 in NumPy loops; nothing of fedblend.

Device i has ``F_i(u, v) = 1/2 w^T A_i w - b_i^T w`` with w = (u, v), in blocks.
"""

import numpy as np


def gradients(matrix, vector, u, v):
    """Of F_i in u and in v, block by block."""
    k = len(u)
    in_u = matrix[:k, :k] @ u + matrix[:k, k:] @ v - vector[:k]
    in_v = matrix[k:, :k] @ u + matrix[k:, k:] @ v - vector[k:]
    return in_u, in_v


def local_sim(matrix, vector, u, v, rates, steps):
    """LocalSim: both parts move at once, from the old pair."""
    for _ in range(steps):
        in_u, in_v = gradients(matrix, vector, u, v)
        u, v = u - rates[0] * in_u, v - rates[1] * in_v
    return u, v


def local_alt(matrix, vector, u, v, rates, steps_v, steps_u):
    """LocalAlt: first the personal part, at the u received; then the shared one."""
    for _ in range(steps_v):
        v = v - rates[1] * gradients(matrix, vector, u, v)[1]
    for _ in range(steps_u):
        u = u - rates[0] * gradients(matrix, vector, u, v)[0]
    return u, v


def rounds(local, matrices, vectors, u, v, cohorts, *settings):
    """The server's loop: the mean of the devices' u; their v stay with them."""
    own = {device: v.copy() for device in range(len(vectors))}
    for cohort in cohorts:
        total = np.zeros_like(u)
        for i in cohort:
            reached, own[i] = local(matrices[i], vectors[i], u, own[i], *settings)
            total += reached
        u = total / len(cohort)
    return u, np.stack([own[device] for device in sorted(own)])

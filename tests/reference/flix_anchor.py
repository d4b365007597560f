# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Optimal values of FLIX on ijcnn1, through the engine in float64; prints JSON.

Eight contiguous clients, an intercept column that is regularized too, l2 = 0.1, alpha
from 0.1 to 1 as one sweep; DGD at its theoretical step, and DIANA with rand-k at its
own.
"""

import json

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import fedblend as fb  # noqa: E402
from fedblend.compress import rand_k  # noqa: E402
from fedblend.transforms import diana  # noqa: E402

CLIENTS, L2, K = 8, 0.1, 6
ALPHAS = np.arange(1, 11) / 10


def main() -> None:
    data = fb.datasets.load("ijcnn1", intercept=True, dtype="float64")
    parts = fb.partition.contiguous(len(data.rows[1]), CLIENTS)
    federated_data = fb.federate(data.rows, parts)
    dim = data.rows[0].shape[1]
    model = fb.models.logistic(dim, intercept=False, dtype=jnp.float64)
    loss = fb.losses.l2(fb.losses.logistic(model.apply), L2)
    smooth = np.array(
        [_smoothness(federated_data.train.rows(i)[0]) for i in range(CLIENTS)]
    )
    local = fb.solvers.newton(loss, tolerance=1e-11)
    omega = dim / K - 1

    def dgd(alpha):
        step = 1 / (alpha**2 * smooth.mean())
        return flix(
            alpha, lambda f: fb.fedavg(f, fb.Work(step, steps=1, batch_size=None))
        )

    def compressed(alpha):
        # b = 1/(omega + 1) for all: L_alpha + (2 + 4) max(L_i alpha_i^2 omega) / n
        step = 1 / (alpha**2 * (smooth.mean() + 6 * smooth.max() * omega / CLIENTS))
        plain = flix(
            alpha, lambda f: fb.fedavg(f, fb.Work(step, steps=1, batch_size=None))
        )
        return diana(plain, rand_k(K), rate=1 / (omega + 1))

    def flix(alpha, method):
        return fb.flix(loss, method, alpha=alpha, local=local, smooth=smooth)

    values = {}
    for name, build, rounds in (("dgd", dgd, 40), ("diana", compressed, 260)):
        run = fb.simulate(
            build,
            model.init,
            federated_data,
            jax.random.key(0),
            rounds=rounds,
            every=rounds,
            over=jnp.asarray(ALPHAS),
            measure={"loss": fb.metrics.mean_loss(loss)},
        )
        values[name] = [
            replica["measures"]["train"]["personal"]["loss"]["mean"]
            for replica in run.summary()
        ]
    print(json.dumps(values))


def _smoothness(inputs: np.ndarray) -> float:
    return float(np.linalg.eigvalsh(inputs.T @ inputs)[-1] / (4 * len(inputs)) + L2)


if __name__ == "__main__":
    main()

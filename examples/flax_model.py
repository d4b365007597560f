# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model written with Flax NNX, trained by SCAFFOLD.

Any Flax NNX or Equinox module becomes a pair of functions (init, apply), and its
parameters a plain dictionary of arrays.
"""

import os

import jax
from flax import nnx

import fedblend as fb

TINY = os.environ.get("FEDBLEND_TINY") == "1"
ROUNDS = 2 if TINY else 40


class Net(nnx.Module):
    """Two layers with layer normalization, which has no batch statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        """Ten scores for every image."""
        hidden = self.norm(self.first(images.reshape(len(images), 64)))
        return self.last(nnx.relu(hidden))


digits = fb.datasets.load("digits")
parts = fb.partition.shards(digits.rows[1], clients=20, per_client=3)
federated_data = fb.federate(digits.rows, parts, test=0.3)

model = fb.models.from_flax(Net)
loss = fb.losses.cross_entropy(model.apply)
run = fb.simulate(
    fb.scaffold(loss, fb.Work(0.1, steps=fb.Epochs(2), batch_size=10)),
    model.init,
    federated_data,
    jax.random.key(0),
    rounds=ROUNDS,
    cohort=10,
    every=ROUNDS // 2,
    measure=fb.metrics.standard(digits.kind, loss, model.apply),
    splits=["test"],
)

print("parameters:", ", ".join(sorted(run.shared)))
reached = run.summary()["measures"]["test"]["shared"]["accuracy"]["mean"]
print(f"shared accuracy {reached:.3f} (expected 0.93 to 0.98 after 40 rounds)")

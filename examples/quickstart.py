# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training alone, FedAvg and fine-tuning compared on handwritten digits.

Thirty clients hold the digits in different proportions: most clients have many of some
digits and none of others.
"""

import os

import jax

import fedblend as fb

TINY = os.environ.get("FEDBLEND_TINY") == "1"
ROUNDS = 4 if TINY else 100

digits = fb.datasets.load("digits")
parts = fb.partition.dirichlet(
    digits.rows[1], clients=30, concentration=0.3, minimum=10
)
federated_data = fb.federate(digits.rows, parts, test=0.3)

model = fb.models.build("softmax", (8, 8, 1), digits.outputs)
loss = fb.losses.cross_entropy(model.apply)
key = jax.random.key(0)
work = fb.Work(0.3, steps=10, batch_size=10)
settings = {
    "rounds": ROUNDS,
    "measure": fb.metrics.standard(digits.kind, loss, model.apply),
    "splits": ["test"],
}

alone = fb.train_alone(
    fb.local_only(loss, work), model.init, federated_data, key, **settings
)
tuned = fb.finetune(fb.fedavg(loss, work), loss, work)
run = fb.simulate(
    tuned, model.init, federated_data, key, cohort=10, local=alone, **settings
)

for block in run:
    accuracy = block.measures["test"]["shared"]["accuracy"].mean
    print(f"round {block.round:3d}: shared model {accuracy:.1%}")

summary = run.summary()
for name, measured in summary["measures"]["test"].items():
    spread = measured["accuracy"]
    print(
        f"{name:9s} mean {spread['mean']:.1%}, worst tenth {spread['worst_tenth']:.1%}"
    )
harmed = summary["harmed"]["test"]["accuracy"]["than_local"]["count"]
rounds = summary["alone"]["rounds"]
print(
    f"{harmed} of {federated_data.clients} clients would clearly have done better alone"
)
print(f"(training alone: {rounds} rounds, its best on held-out rows)")

reached = summary["measures"]["test"]["personal"]["accuracy"]["mean"]
print(f"personal accuracy {reached:.3f} (expected 0.94 to 0.96 after 100 rounds)")

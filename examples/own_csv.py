# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Your own table: a CSV file with a column that names the client of each row.

This example first writes such a file: six clinics measure tumors on shifted scales, so
that one shared model cannot fit them all.
"""

import csv
import os
import tempfile
from pathlib import Path

import jax
import numpy as np

import fedblend as fb

TINY = os.environ.get("FEDBLEND_TINY") == "1"
ROUNDS = 4 if TINY else 60


def write_table(path: Path) -> None:
    tumors = fb.datasets.load("breast_cancer")
    inputs, labels = tumors.rows
    draw = np.random.default_rng(0)
    shifts = draw.normal(scale=2.0, size=(6, 4))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["clinic", "radius", "texture", "perimeter", "area", "outcome"])
        for row, label in zip(inputs[:, :4], labels, strict=True):
            clinic = draw.integers(6)
            name = tumors.label_names[label]
            table.writerow([f"clinic {clinic}", *(row + shifts[clinic]), name])


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "tumors.csv"
    write_table(path)

    # A file of your own is read alike.
    table = fb.data.read(path, target="outcome", client="clinic")
    parts = fb.partition.by_key(table.keys)
    federated_data = fb.data.federate_dataset(table, parts, test=0.3)

print(f"{federated_data.clients} clients, classes {table.label_names}")
model = fb.models.build("logistic", (4,), table.outputs)
loss = fb.losses.logistic(model.apply)
shared = fb.fedavg(loss, fb.Work(0.1, steps=10, batch_size=10))
run = fb.simulate(
    fb.finetune(shared, loss, fb.Work(0.1, steps=50, batch_size=10)),
    model.init,
    federated_data,
    jax.random.key(0),
    rounds=ROUNDS,
    measure=fb.metrics.standard(table.kind, loss, model.apply),
    splits=["test"],
).complete()

measured = run.summary()["measures"]["test"]
for name in ("shared", "personal"):
    print(f"{name:9s} accuracy {measured[name]['accuracy']['mean']:.3f}")
area = measured["personal"]["auc"]["mean"]
print(f"personal AUC {area:.3f} (expected 0.94 to 0.99 after 60 rounds)")

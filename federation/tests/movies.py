# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Movies of three users, on nodes and in a simulation: few rows of a table count."""

import lzma
from pathlib import Path

import numpy as np
from configured import CLIENTS

from fedblend_reproductions.datasets.movielens import MOVIES, movielens

WIDTH = 4
MOVIES_METHOD = (
    f'[model]\nname = "dual_encoder"\nwidth = {WIDTH}\n'
    '[algorithm]\nname = "fedavg"\nrate = 0.25\nsteps = 2\nbatch_size = 4\n'
    '[central]\nhow = "one_way"\npenalty = "spreadout"\n'
    '[select]\nparameters = ["embedding"]\n'
    "[run]\nrounds = 2\nevery = 2\nchunk = 1\nseed = 5\n"
    "[measure]\nlocal = false\n"
)
ON_NODES = (
    'version = 1\nname = "movies"\n[data]\npartition = "nodes"\n'
    f'clients = {CLIENTS}\nkind = "classes"\nclasses = {MOVIES + 1}\nshape = [10]\n'
    "test = 0.25\nseed = 2\n[federation]\ndeadline = 60.0\n"
)


def write_movies(folder: Path) -> str:
    """Ratings of three users, and the rows of each as a node has them."""
    rng = np.random.default_rng(0)
    lines = [
        f"{user}::{movie}::5"
        for user in range(1, CLIENTS + 1)
        for movie in rng.choice(np.arange(1, 31), 7 + 3 * user, replace=False)
    ]
    path = folder / "ratings.dat.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    rows = movielens(file=str(path))
    assert rows.keys is not None
    for client in range(CLIENTS):
        own = rows.keys == client + 1
        np.savez(
            folder / f"rows{client}.npz",
            inputs=rows.rows[0][own],
            targets=rows.rows[1][own],
        )
    return str(path)


def in_one(ratings: str) -> str:
    """The configuration of the simulation."""
    return (
        'version = 1\nname = "one"\n[data]\nsource = "movielens"\n'
        f'options = {{ file = "{ratings}" }}\npartition = "by_key"\n'
        f"test = 0.25\nseed = 2\n{MOVIES_METHOD}"
    )

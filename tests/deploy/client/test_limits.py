# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Limits that hold: memory, time and what stays after an experiment."""

import gc
import weakref

from malicious import Attacker, config, write_node

from fedblend.deploy.client import programs
from fedblend.deploy.client.shared_builds import EXPERIMENTS


def test_one_experiment_after_the_other_leaves_no_programs(tmp_path):
    attacker, functions = Attacker(write_node(tmp_path / "node")), []
    for number in range(EXPERIMENTS + 2):
        attacker.begin(config(algorithm={"rate": 0.1 + number / 100}))
        attacker.round(0)
        functions.append(weakref.ref(attacker.executor.setup.algorithm.client))
    gc.collect()
    assert functions[0]() is None and functions[-1]() is not None
    assert programs.update.cache_info().currsize == 1  # pyright: ignore

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Training alone, computed once for several runs.

What every client could do without the others often costs more than the run that is
compared with it, and does not depend on how models are mixed. Runs whose work of
training alone is equal take it from each other: its checkpoints are copied, and the
later run restores them as if it had been interrupted there.
"""

from typing import Any

from fedblend.config.config import Config, dump
from fedblend.config.tables.local_work import LocalWork
from fedblend.runs.run_folder import Folder
from fedblend.simulation.io import checkpoint

STAGES = ("trial", "local")
NOT_ALONE = {
    *("cohort", "epoch", "separation", "sampling", "weights", "dropout"),
    *("reduction", "trim", "until"),
}
"""Keys of ``[run]`` that are about clients together."""
RATE = {"rate", "optimizer", "schedule"}
"""Keys of ``[algorithm]`` that ``measure.local_rate`` takes the place of."""
ROWS = ("classes", "share")
"""Keys of ``[central]`` that decide which rows are the clients'."""


def work_alone(config: Config) -> dict[str, Any] | None:
    """All keys that training alone depends on; None where nobody trains alone."""
    if not config.measure.local or config.algorithm.name == "local_only":
        return None
    options, central, lies = config.algorithm, config.central, config.attack
    work = set(LocalWork.model_fields)
    if isinstance(config.measure.local_rate, float):
        work -= RATE
    return {
        "data": config.data.model_dump(),
        "central": {key: getattr(central, key, None) for key in ROWS},
        "attack": lies.model_dump() if lies and lies.how == "flip_labels" else None,
        "model": config.model.model_dump(),
        "algorithm": {key: getattr(options, key) for key in sorted(work)},
        "run": config.run.model_dump(exclude={*NOT_ALONE, "keep_personal"}),
        "measure": config.measure.model_dump(),
    }


def share(done: Folder, config: Config, folder: Folder) -> bool:
    """Copy training alone from a finished run to one that is about to begin.

    Args:
        done: a finished run whose ``work_alone`` is equal.
        config: that of the other run.
        folder: the folder of the other run; what it has of its own stays.

    Returns:
        Whether there was something to copy. A store on disk stays where it is.
    """
    if done.states("local").exists() or not done.checkpoint("local").exists():
        return False
    folder.path.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        there, here = done.checkpoint(stage), folder.checkpoint(stage)
        if there.exists() and not here.exists():
            checkpoint.copy(there, here, {"config": dump(config)})
    return True

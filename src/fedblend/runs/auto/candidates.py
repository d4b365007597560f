# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The methods that are compared, and the configuration of each.

All models are linear and at their optimum, so that methods differ in what is shared,
and not in how well they were optimized: ``linear`` finds them with all rows in one
place, ``fedblend run`` of the configuration in rounds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.config.config import Config, check
from fedblend.data.readers.tables import table_name
from fedblend.metrics.registry import STANDARD

VALIDATION, TEST = 0.2, 0.2
"""Parts of each client's rows that every split holds out. Settings are chosen on
validation rows; the models that are tested are trained on these, too."""
BY_TIME = 0.5
"""Times these parts by time, where every further split ends one test part earlier."""
MOST_ROWS = 200_000
"""Rows of a table on which networks are compared."""
MODEL = "softmax"
"""Linear in its inputs; with one output it is logistic or linear regression."""
NEWTON = {"rate": 1.0, "batch_size": "all"}
SLOW = (16, 10)
ROUNDS = {"regression": (1, 1), "binary": SLOW, "classes": SLOW, "counts": SLOW}
"""Rounds, and Newton steps of a client in each, after which a model is at its optimum;
for squared errors one of each is exact. Classes that inputs separate take a round for
each unit by which scores grow."""
ALONE_STEPS = 16
"""Newton steps of training alone, where no round follows."""
GRADIENT = {
    "rate": "theory",
    "steps": 1,
    "batch_size": "all",
    "personal": {"solver": "newton"},
    "server": {"name": "nesterov", "rate": 1.0, "momentum": "theory"},
}
FLIX_ROUNDS = 30
"""Rounds of FLIX times the root of l2: momentum needs more where l2 is small."""


NO_LEVEL = {"survival": {"level": 0.0}}
"""Where the hazard of each client is its own anyhow."""


class Candidate(NamedTuple):
    """A method of the comparison."""

    name: str
    title: str
    first: Mapping[str, float]
    """Where the search for its settings begins."""
    takes: Mapping[str, tuple[str, str]] = {}
    """Settings that begin where another method's ended: its name, and theirs."""
    fixed: Mapping[str, Mapping[str, float]] = {}
    """Settings that are not chosen, by the kind of target."""
    again: Mapping[str, float] = {}
    """Where a second search begins, if there is one: near a constant prediction."""
    model: str = "linear"
    """What predicts: "linear", or the name of another model that ``comparison`` knows;
    a "reference" is compared and shown, and never deployed."""

    not_for: tuple[str, ...] = ()
    """Kinds of targets that it is not compared for."""

    @property
    def deployable(self) -> bool:
        """Whether a federation can have it."""
        return self.model != "reference"


ALONE, OWN_TREES, POOLED_TREES = "local_only", "own_trees", "pooled_trees"
CANDIDATES = (
    Candidate(
        ALONE,
        "local only",
        {"level": 1.0, "slopes": 0.1},
        # Targets are centered at the mean of all clients, which one alone cannot know.
        fixed={
            "regression": {"level": 1e4},
            "counts": {"level": 100.0},
            **NO_LEVEL,
        },
        again={"slopes": 1e-4},
    ),
    Candidate("fedavg", "FedAvg", {"ridge": 1e-3}),
    Candidate(
        "own_intercepts",
        "own intercepts",
        {"level": 0.1},
        {"ridge": ("fedavg", "ridge")},
    ),
    Candidate(
        "hierarchical",
        "hierarchical",
        {"slopes": 0.01, "level": 0.1},
        {"ridge": ("fedavg", "ridge"), "level": ("own_intercepts", "level")},
        fixed=NO_LEVEL,
    ),
    # Its rates come from constants that the Poisson loss does not have.
    Candidate("flix", "FLIX", {"alpha": 0.5, "l2": 0.01}, not_for=("counts",)),
    Candidate(
        "additive",
        "additive model, own intercepts",
        {"ridge": 1e-3, "level": 0.1},
        {"ridge": ("fedavg", "ridge"), "level": ("own_intercepts", "level")},
        model="additive",
    ),
    Candidate(OWN_TREES, "own boosted trees", {}, model="reference"),
    Candidate("network", "one network", {"rate": 3e-3, "rounds": 1}, model="tabular"),
    Candidate(
        "network_level",
        "one network, own intercepts",
        {"rate": 3e-3, "own_rate": 0.03, "rounds": 1},
        model="tabular",
    ),
    Candidate(
        "network_head",
        "one network, own last layers",
        {"rate": 3e-3, "own_rate": 0.003, "rounds": 1},
        model="tabular",
    ),
    Candidate(POOLED_TREES, "boosted trees on the rows of all", {}, model="reference"),
)
"""The simplest first: this order decides between methods that are as good."""
BY_NAME = {one.name: one for one in CANDIDATES}
COX = (ALONE, "fedavg", "hierarchical")
"""Methods for times until an event: a row of these has no loss by itself."""
OWN = {"network_level": "last/bias", "network_head": "last"}
"""The part of the network that is a client's own."""


class Request(NamedTuple):
    """What the user asked for."""

    table: Path
    client: str
    target: str
    kind: str | None = None
    inputs: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    scale: str | None = None
    """Of targets that are numbers: "log" or "linear"; by their values if None."""
    once: bool | None = None
    """Whether all is found from letters."""
    keep: tuple[str, ...] = ()
    time: str | None = None
    group: str | None = None
    preprocess: Mapping[str, str] | None = None
    """What ``looks`` make of some columns."""
    event: str | None = None
    """Of times: column that is 1 where the event was seen, 0 where it was not yet."""


def configuration(
    request: Request,
    name: str,
    setting: Mapping[str, float],
    *,
    seeds: list[int] | int,
    kind: str = "binary",
    validation: float = 0.0,
    test: float = TEST,
    metric: str | None = None,
    log_shift: float | None = None,
) -> Config:
    """The configuration of a method.

    Args:
        request: which table, and what it is about.
        name: of the method.
        setting: what was chosen for it.
        seeds: of the splits.
        kind: of the target.
        validation: part of each client's rows that is not trained on.
        test: another such part.
        metric: what is measured first, before the usual ones.
        log_shift: of targets on the log scale.
    """
    data: dict[str, Any] = {
        "file": str(request.table),
        "client": request.client,
        "target": request.target,
        "partition": "by_key",
        "validation": validation * (BY_TIME if request.time else 1),
        "test": test * (BY_TIME if request.time else 1),
    }
    columns = {"inputs": list(request.inputs), "drop": list(request.drop)}
    own = ("kind", "time", "group", "preprocess")
    asked = {key: getattr(request, key) for key in own} | columns
    data |= {key: value for key, value in asked.items() if value}
    if log_shift is not None:
        data["log_shift"] = log_shift
    rounds, steps = (1, ALONE_STEPS) if name == ALONE else ROUNDS[kind]
    model: dict[str, Any] = {"name": MODEL}
    run: dict[str, Any] = {"seed": seeds}
    if name == "flix":
        model["l2"] = setting["l2"]
        rounds = min(max(round(FLIX_ROUNDS / setting["l2"] ** 0.5), 300), 10_000)
        algorithm = {"name": "flix", "alpha": setting["alpha"], **GRADIENT}
    elif BY_NAME[name].model == "tabular":
        model, rounds = {"name": "tabular"}, int(setting["rounds"])
        run["weights"] = "by_count"
        algorithm = {
            "name": "fedopt",
            "rate": 1.0,
            "steps": 1,
            "batch_size": int(setting.get("batch_size", 1)),
            "server": {"name": "adam", "rate": setting["rate"]},
        }
        if name in OWN:
            algorithm |= {"name": "partial", "personal": [OWN[name]]}
            algorithm |= {"order": "together", "personal_rate": setting["own_rate"]}
    else:
        own = {"level": 0.0, "slopes": 0.0, **setting, "share": name != ALONE}
        if "bins" in own:
            model = {"name": "additive", "bins": own.pop("bins")}
        algorithm = {"name": "hierarchical", **NEWTON, "steps": steps, **own}
    measure: dict[str, Any] = {"local": False}
    if test:
        measure["splits"] = ["test"]
    if metric is not None:
        measure["metrics"] = [*dict.fromkeys([metric, *STANDARD[kind]])]
    content = {
        "version": 1,
        "name": f"{table_name(request.table)}-{name}",
        "data": data,
        "model": model,
        "algorithm": algorithm,
        "run": {"rounds": rounds, "every": rounds, **run},
        "measure": measure,
    }
    return check(content, str(request.table))

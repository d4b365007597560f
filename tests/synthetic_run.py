# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run with drawn numbers, of any size, written as a run writes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.metrics import client_spread, standard
from fedblend.report import measures
from fedblend.runs.run_folder import Folder, json_text, write_table, write_text
from fedblend.stats.gains import Evidence, harms

NOTHING: Any = lambda *of: None  # noqa: E731
METRICS = standard("classes", NOTHING, NOTHING)
LEVELS = {"personal": 0.85, "shared": 0.75, "local": 0.8}
CONFIG = """version = 1
name = {name}

[data]
source = "synthetic"

[algorithm]
name = "{algorithm}"
alpha = {alpha}

[run]
rounds = {rounds}
seed = {seeds}
"""


def write_run(
    path: Path,
    *,
    clients: int = 30,
    rounds: int = 20,
    seeds: tuple[int, ...] = (0,),
    name: str = "made",
    algorithm: str = "apfl",
    alpha: float = 0.5,
    names: dict[int, str] | None = None,
    finished: bool = True,
    salt: int = 0,
) -> Folder:
    """Write the folder of a run.

    Args:
        path: the folder; made.
        clients: how many; those at 3, 13, 23 ... of them are harmed.
        rounds: rows of ``metrics.jsonl`` for each seed, besides that of round 0.
        seeds: of the run.
        name: in the configuration.
        algorithm: in the configuration.
        alpha: in the configuration; the better the nearer to 0.7.
        names: of some clients, by id.
        finished: also write the files that end a run.
        salt: for other numbers.
    """
    folder, draw = Folder(path), np.random.default_rng((clients, rounds, salt))
    path.mkdir(parents=True)
    seed_text = str(list(seeds) if len(seeds) > 1 else min(seeds))
    text = CONFIG.format(
        name=json.dumps(name),
        algorithm=algorithm,
        alpha=alpha,
        rounds=rounds,
        seeds=seed_text,
    )
    write_text(folder.config, text)
    origin = {"fedblend": "0.1.0", "jax": "0.10.2", "device": "cpu"}
    write_text(folder.origin, json_text({**origin, "data": {"name": "synthetic"}}))
    train = np.clip(draw.lognormal(4, 0.8, clients), 5, 150).astype(int)
    test = np.maximum(train // 4, 4) * 2
    measured = [_measured(draw, clients, test, 0.1 * abs(alpha - 0.7)) for _ in seeds]
    ends = [_spreads(of, test) for of in measured]
    lines = [
        json_text(_row(at, seed, _before(ends[place], 0.5 / (at + 1))), None)
        for at in range(rounds + 1)
        for place, seed in enumerate(seeds)
    ]
    write_text(folder.metrics, "".join(f"{line}\n" for line in lines))
    if not finished:
        return folder
    evidence = Evidence(measured, (), {"test": test, "train": train}, METRICS)
    tested = [{"test": of["test"]} for of in measured]
    known = measures.compare_models(evidence, "test", "accuracy")
    assert known is not None
    labels = [(names or {}).get(client, str(client)) for client in range(clients)]
    alphas = draw.uniform(0, 1, clients)
    facts = measures.Clients(np.arange(clients), labels, train, test, alphas)
    write_table(folder.harm, measures.harm_rows(known, facts))
    _write_clients(folder, facts, measured, seeds, rounds)
    runs = [
        _end(rounds, seed, ends[place], clients) for place, seed in enumerate(seeds)
    ]
    summary = {
        "name": name,
        "algorithm": algorithm,
        "warnings": [],
        "harmed": harms(evidence._replace(measured=tested)),
        "runs": runs,
    }
    write_text(folder.summary, json_text(summary))
    return folder


def _measured(draw: np.random.Generator, clients: int, test: np.ndarray, less: float):
    """Accuracies of whole rows, and losses; some clients are harmed for sure."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for model, level in LEVELS.items():
        right = draw.binomial(test, level - (less if model == "personal" else 0))
        if model == "personal":
            right[3::10] = 0
        if model == "local":
            right[3::10] = test[3::10]
        found[model] = {
            "accuracy": right / test,
            "loss": draw.gamma(2, 0.3, clients),
        }
    return {"test": found, "train": found}


def _spreads(measured, counts: np.ndarray) -> dict[str, Any]:
    return {
        split: {
            model: {
                metric: client_spread(
                    values, counts, METRICS[metric].higher_is_better
                )._asdict()
                for metric, values in by_metric.items()
            }
            for model, by_metric in models.items()
        }
        for split, models in measured.items()
    }


def _before(spreads: dict[str, Any], gap: float) -> dict[str, Any]:
    """The measures of an earlier round: worse by so much."""
    return {
        split: {
            model: {
                metric: {
                    of: value + (gap if metric == "loss" else -gap / 2)
                    for of, value in spread.items()
                }
                for metric, spread in by_metric.items()
            }
            for model, by_metric in models.items()
        }
        for split, models in spreads.items()
    }


def _row(at: int, seed: int, spreads: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": seed,
        "round": at,
        "seconds": 0.01 * at,
        "received": 10 * at,
        "dropped": 0,
        "rejected": 0,
        "bits_up": 1_000 * at,
        "bits_down": 3_000 * at,
        "measures": spreads,
    }


def _end(
    rounds: int, seed: int, spreads: dict[str, Any], clients: int
) -> dict[str, Any]:
    each = {"least": 0, "mean": 1_000 * rounds / clients, "most": 2_000 * rounds}
    return {
        **_row(rounds, seed, spreads),
        "clients": clients,
        "cohort": clients,
        "compile_seconds": 1.25,
        "bits": {
            "up": 1_000 * rounds,
            "down": 3_000 * rounds,
            "up_per_client": each,
            "down_per_client": each,
        },
        "alone": {
            "rounds": 44,
            "chosen_on": "validation rows",
            "metric": "accuracy",
            "tried": 100,
            "improving": False,
            "seconds": 0.5,
        },
        "warnings": [],
    }


def _write_clients(folder, facts: measures.Clients, measured, seeds, rounds) -> None:
    assert facts.alpha is not None
    rows = []
    for place, seed in enumerate(seeds):
        for client in range(len(facts.names)):
            row = {"seed": seed, "id": client, "name": facts.names[client]}
            row |= {"train": int(facts.train[client]), "validation": 0}
            row |= {"test": int(facts.test[client]), "bits_up": 1000 * rounds}
            row |= {"bits_down": 3000 * rounds}
            for split, models in measured[place].items():
                for model, by_metric in models.items():
                    for metric, values in by_metric.items():
                        row[f"{split}_{model}_{metric}"] = float(values[client])
            rows.append(row | {"alpha": float(facts.alpha[client])})
    write_table(folder.clients, rows)

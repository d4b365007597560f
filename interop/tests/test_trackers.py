# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Trackers: the real packages write local files, which are read back."""

import copy
import json
import struct
import sys
import time

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.config import toml
from fedblend.runs import run_folder
from fedblend.runs.run_folder import Folder
from fedblend_interop import trackers
from tiny_config import TINY

NAME = "test/accuracy/personal"


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled):
    """The folder of a run of two seeds, tracked by TensorBoard while it ran."""
    tables = copy.deepcopy(TINY)
    tables["run"]["seed"] = [3, 5]
    tables["measure"] |= {"splits": ["test"], "metrics": ["accuracy", "recall@2"]}
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "tiny.toml").write_text(toml.write(tables))
    out = folder / "run"
    command = ["run", str(folder / "tiny.toml"), "--out", str(out)]
    assert main([*command, "--track", "tensorboard"]) == 0
    return out


def expected(run, name=NAME, seed=5) -> list[tuple[int, float]]:
    """The points of a run, from its rows."""
    rows = [row for row in run_folder.read_rows(Folder(run)) if row["seed"] == seed]
    split, metric, model = name.replace("_at_", "@").split("/")
    return [
        (row["round"], row["measures"][split][model][metric]["mean"]) for row in rows
    ]


def assert_same(found, points):
    """The same steps, each once, and the same values; TensorBoard's are float32."""
    assert [step for step, _ in found] == [step for step, _ in points]
    assert dict(found) == pytest.approx(dict(points))


def read_tensorboard(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_tensorboard_has_every_point_once_also_after_resuming(run):
    for _ in range(2):
        for seed in (3, 5):
            found = read_tensorboard(run / "tensorboard" / f"seed{seed}")
            for name in (NAME, "test/recall_at_2/shared"):
                points = expected(run, name, seed)
                assert [step for step, _ in points] == [0, 2, 4]
                assert_same(found[name], points)
            assert found["bits/up"][-1][1] > 0
        # As a run that goes on after it was killed: all rows come again.
        assert main(["track", str(run), "--to", "tensorboard"]) == 0
    assert len(list((run / "tensorboard" / "seed3").iterdir())) == 1


@pytest.mark.slow
def test_mlflow_has_every_point_once(run, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        assert main(["track", str(run), "--to", "mlflow"]) == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert sorted(one.data.tags["seed"] for one in found) == ["3", "5"]
    (own,) = (one for one in found if one.data.tags["seed"] == "5")
    assert own.data.params["algorithm.name"] == "fedavg"
    assert own.info.status == "FINISHED"
    history = client.get_metric_history(own.info.run_id, NAME)
    points = sorted((point.step, point.value) for point in history)
    assert_same(points, expected(run))


def wandb_records(path):
    """The records of an offline run: a log as LevelDB's, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no record begins in the last bytes of a block
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(whole)
            whole = b""


def wandb_points(folder):
    """The points of every offline run, by its name."""
    by_name = {}
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        points, name = [], ""
        for record in wandb_records(path):
            name = record.run.display_name or name
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if NAME in items:
                points.append((items["_step"], items[NAME]))
        by_name[name] = points
    return by_name


@pytest.mark.slow
def test_wandb_has_every_point_once_offline(run, monkeypatch):
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    for _ in range(2):
        assert main(["track", str(run), "--to", "wandb"]) == 0
        # A process of its own writes the files; a command that ends waits for it.
        wandb.teardown()
    until = time.monotonic() + 20
    while len(found := wandb_points(run / "wandb")) < 2 or "" in found:
        assert time.monotonic() < until, found
        time.sleep(0.2)
    assert len(found) == 2, "one for each seed"
    assert_same(found["seed 5"], expected(run))


def test_a_run_in_memory_is_followed(tmp_path):
    rows = np.ones((6, 2), np.float32), np.array([0, 1] * 3)
    model = fb.models.softmax(2, 2)
    loss = fb.losses.cross_entropy(model.apply)
    run = fb.simulate(
        fb.fedavg(loss, fb.Work(0.1, 1, None)),
        model.init,
        fb.federate(rows, [np.arange(3), np.arange(3, 6)]),
        jax.random.key(0),
        rounds=2,
        every=1,
        measure={"loss": fb.metrics.mean_loss(loss)},
    )
    tracker = fb.trackers.tensorboard(tmp_path)
    records = list(fb.trackers.follow(run, tracker, seeds=[7]))
    found = read_tensorboard(tmp_path / "seed7")["train/loss/personal"]
    means = [one.measures.train.personal.loss.mean for one in records]
    assert_same(found, list(enumerate(means)))


def test_values_have_names_that_every_tracker_takes():
    spread = {"mean": 0.5, "worst_tenth": None}
    row = {
        **dict.fromkeys(trackers.COUNTS, 1),
        "bits_up": 8,
        "bits_down": 9,
        "measures": {"test": {"shared": {"recall@5": spread}}},
    }
    found = trackers.values_of(row)
    assert found["test/recall_at_5/shared"] == 0.5
    assert not any(name.startswith("worst_tenth") for name in found)
    assert (found["bits/up"], found["bits/down"]) == (8.0, 9.0)


def test_wrong_trackers_and_folders_are_one_line(run, tmp_path, capsys, monkeypatch):
    for command, line in (
        (["track", str(run), "--to", "excel"], "'excel' is not one of tensorboard"),
        (["track", str(tmp_path), "--to", "wandb"], "not the folder of a run"),
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert line in said
        assert len(said.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["track", str(run), "--to", "mlflow"]) == 2
    assert "pip install 'fedblend[trackers]'" in capsys.readouterr().err

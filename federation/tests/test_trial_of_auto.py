# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From the verdict of ``fedblend auto`` to a federation: the same models come out."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.errors import RunError
from fedblend.runs.auto import candidates, comparison
from fedblend.runs.run_folder import Folder, read_model, read_table
from fedblend_federation.client.node import node_of
from fedblend_federation.client.predict import predict_rows
from fedblend_federation.ops.from_auto import node_names, trial_of
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

SITES, ROWS = ("St. Mary's", "north", "south"), (60, 50, 40)


def write_table(path: Path) -> Path:
    """Sites with levels of their own, texts, empty cells and a column that is left."""
    draw, lines = np.random.default_rng(0), ["dose,site,ward,id,ill"]
    for number, (site, rows) in enumerate(zip(SITES, ROWS, strict=True)):
        for row in range(rows):
            dose, ward = draw.normal(), ("a", "b", "")[draw.integers(3)]
            ill = draw.random() < 1 / (1 + np.exp(2 - 2 * dose - 2 * number))
            shown = "" if row % 9 == 0 else f"{dose:.3f}"
            lines.append(f"{shown},{site},{ward},{number}-{row},{'yn'[int(ill)]}")
    # Rows of sites alternate in the table.
    order = np.random.default_rng(1).permutation(len(lines) - 1)
    path.write_text("\n".join([lines[0], *(lines[1 + at] for at in order)]) + "\n")
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Path:
    """A comparison of two methods, whose kept runs are those of a trial."""
    folder = tmp_path_factory.mktemp("auto")
    table, out = write_table(folder / "table.csv"), folder / "out"
    asked = {"client": "site", "target": "ill", "drop": ["id"], "quiet": True}
    kept = ("local_only", "fedavg", "own_intercepts")
    few = [one for one in candidates.CANDIDATES if one.name in kept]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CANDIDATES", few)
        patch.setattr(comparison, "SPLITS", 3)
        fb.auto(table, out=out, **asked)
    return out


def test_a_federation_finds_the_models_of_the_kept_run(found, tmp_path, capsys):
    place = tmp_path / "trial"
    asked = ["init", str(place), "--from", str(found), "--with-keys"]
    assert main(["federation", *asked]) == 0
    names = ["st-mary-s", "north", "south"]
    title = trial_of(found).method
    said = capsys.readouterr()
    assert f"a trial of {title}" in said.out
    assert f"fedblend federation run {place}/server/trial.toml" in said.out
    # Whoever takes the policies of a trial for real rows has been warned.
    assert "add no noise to gradients" in " ".join((said.out + said.err).split())
    homes = {path.name: path for path in (place / "nodes").iterdir()}
    assert sorted(homes) == sorted(names)
    assert "min_batch_rows = 8" in (homes["north"] / "policy.toml").read_text()
    own = read_table(homes["north"] / "rows.csv")
    assert len(own) == 50 and [*own[0]] == ["dose", "ward", "ill"]
    settings = [load_as(NodeSettings, home / "node.toml") for home in homes.values()]
    nodes = {one.client: node_of(one) for one in settings}
    run = place / "server" / "runs" / "trial"
    run.mkdir()
    (run / "config.toml").write_text((place / "server" / "trial.toml").read_text())
    run_server(run, LoopbackTransport(nodes), poll=0.0)
    method = next(one.name for one in candidates.CANDIDATES if one.title == title)
    kept = fb.load(found / "runs" / method)
    here, _ = read_model(Folder(run).model(None), kept.portable.shapes)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), here, kept.shared(0))
    for one in settings:
        (client, own), *_ = one.client_settings().items()
        rows = one.folder.parent / "rows.csv"
        mine = predict_rows(own, rows)
        there = kept.predict(rows, client=kept.names[client], seed=0)
        assert [*mine.values] == [*there]


def test_names_of_nodes_are_allowed_and_differ():
    names = node_names(["A b", "a-b", "", "server", "Zürich"])
    assert names == ["a-b", "node-1", "node-2", "node-3", "z-rich"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "here"], "--nodes: is missing"),
        (["--nodes", "a,b"], "--host: is missing"),
    ],
)
def test_without_a_result_names_are_needed(tmp_path, capsys, words, said):
    assert main(["federation", "init", str(tmp_path / "lab"), *words]) == 2
    assert said in capsys.readouterr().err


def test_only_the_folder_of_auto_gives_a_trial(tmp_path):
    with pytest.raises(RunError, match="is not the folder of fedblend auto"):
        trial_of(tmp_path)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The board: its protocols, cells, interruptions and pages, on tiny tasks."""

import itertools
import json
import subprocess
import sys
import types

import numpy as np
import pytest

import fedblend as fb
from fedblend.data.dataset import DataError
from fedblend_reproductions.board import (
    cells,
    page,
    protocol,
    runs,
    scafflix,
    tasks,
)
from fedblend_reproductions.board.__main__ import main
from fedblend_reproductions.board.cells import TUNING_SEED, Place
from fedblend_reproductions.board.methods import METHODS
from fedblend_reproductions.board.published import ON_TASK, PFLLIB, Published
from fedblend_reproductions.board.rows import row_of
from fedblend_reproductions.board.tasks import TASKS, Task, by_classes, by_dirichlet
from fedblend_reproductions.datasets import synthetic_mixture
from fedblend_reproductions.datasets.download import PUBLIC_SETS


def tiny_data():
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(240, 6)).astype(np.float32)
    labels = np.argmax(inputs[:, :3], axis=1).astype(np.int32)
    parts = np.split(np.arange(240), [120, 200])
    return fb.federate((inputs, labels), parts, validation=0.125, test=0.125)


MODEL = fb.models.mlp(6, 3, hidden=(8,))
TINY = Task("tiny", "Tiny", {"batch_size": 10}, tiny_data, MODEL, 10, (0.01, 0.3), 8)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(TASKS, "tiny", TINY)
    monkeypatch.setitem(ON_TASK, "tiny", Published("nobody", {"tiny": {"APFL": 12.34}}))
    for name in list(TASKS):
        if name != "tiny":
            monkeypatch.delitem(TASKS, name)
    return TINY


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two rows of the tiny task, and their folder."""
    folder = tmp_path_factory.mktemp("board")
    plan = runs.Plan(folder, None, [0, 1])
    for name in ("finetune", "local_only"):
        runs.measure_row(TINY, METHODS[name], tiny_data(), plan)
    return folder


# The protocols.

CORRECT = np.array([[[5], [2]], [[3], [9]], [[4], [6]]])
"""Right rows at three measurements of one client: validation rows, test rows."""


def test_the_honest_round_is_chosen_on_the_other_rows():
    chosen = protocol.choose(CORRECT, [10, 20, 30])
    assert chosen["validation"] == {"round": 10, "score": 5, "correct": [2]}
    assert chosen["test"] == {"round": 20, "score": 9, "correct": [3]}
    assert chosen["all"] == {"round": 20, "score": 12, "correct": [12]}
    rates = dict.fromkeys(protocol.CHOICES, 0.1)
    assert protocol.honest(rates, {0.1: chosen}).tolist() == [5]  # and theirs is 12


def test_each_half_chooses_its_own_rate():
    other = protocol.choose(CORRECT[:, ::-1], [10, 20, 30])  # better by validation
    rates = protocol.chosen_rates(
        {0.1: protocol.choose(CORRECT, [10, 20, 30]), 0.2: other}
    )
    assert rates == {"validation": 0.2, "test": 0.1, "all": 0.1}


def test_a_paired_difference():
    draws = np.random.default_rng(0)
    rows = np.full(20, 100)
    base = draws.integers(60, 90, (3, 20))
    same = protocol.difference(base, base, rows)
    assert same == (0, 0, 0)
    assert same.verdict == "undecided"
    ahead = protocol.difference(base + draws.integers(1, 4, (3, 20)), base, rows)
    assert ahead.verdict == "ahead"
    assert 0.01 < ahead.low < ahead.mean < ahead.high < 0.03
    noise = base + draws.integers(-5, 6, (3, 20))
    assert protocol.difference(noise, base, rows).verdict == "undecided"
    assert protocol.difference(base, base + 1, rows).verdict == "behind"


# Tasks and methods.


def test_two_classes_a_client_as_in_pfllib():
    labels = np.repeat(np.arange(10), 700)
    parts = by_classes(labels, 1)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(7000))
    pairs = {tuple(np.unique(labels[part])) for part in parts}
    assert pairs == {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)}
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= 2 * 17 and sum(sizes[:5]) > 0.4 * 7000


def test_the_dirichlet_partition():
    labels = np.repeat(np.arange(10), 700)
    parts = by_dirichlet(labels, 1)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(7000))
    assert min(map(len, parts)) >= 40
    main = [np.bincount(labels[part]).max() / len(part) for part in parts]
    assert np.mean(main) > 0.5  # few classes a client


def test_the_halves_of_fedems_test_rows_are_alike(monkeypatch):
    """Each row is in one half, and labels do not tell the halves apart."""
    small = synthetic_mixture(clients=30, dim=5, test_points=400, as_in_code=True)
    rows = (small.rows, small.test_rows, small.keys, small.test_keys)
    monkeypatch.setattr(tasks, "_mixture", lambda: rows)
    data = tasks.fedem_data()
    halves = [data.splits[name].examples for name in runs.HALVES]
    both = np.concatenate([inputs for inputs, _ in halves])
    assert small.test_rows is not None
    everything = small.test_rows[0]
    assert np.array_equal(np.sort(both[:, 0]), np.sort(everything[:, 0]))
    first, second = (labels.mean() for _, labels in halves)
    assert abs(first - second) < 0.03  # 0.1 and more in the order of the rows
    assert (np.diff(data.train.counts) <= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_set_up(name):
    """Traced, not compiled; a rate changes no shape."""
    method = METHODS[name]
    if "body" in method.options:  # the layers of another network
        method = method._replace(options={"body": ["hidden"]})
    places = [Place(TINY, method, 4, rate, 0) for rate in TINY.rates]
    run = runs.set_up(places, tiny_data())
    assert run.replicas == 2
    json.dumps(METHODS[name].options)


def test_published_numbers_are_complete():
    for task in ("fashion_classes", "fashion_dirichlet"):
        numbers = PFLLIB.numbers[task]
        assert len(numbers) == 20
        text = page.page([])
        for name, number in numbers.items():
            assert f"| {number:.2f} |" in text, name
    known = {name for task in TASKS for name in ON_TASK[task].numbers[task]}
    assert {method.published for method in METHODS.values()} <= known | {""}
    assert ON_TASK.keys() == TASKS.keys()
    assert all(skipped in METHODS for task in TASKS.values() for skipped in task.skips)
    assert "Nothing was run" in text


# Cells.


@pytest.mark.slow
def test_a_row_has_its_trials_and_its_seeds(measured, tiny):
    stored = [cell for _, cell in cells.all_cells(measured)]
    trials = [c for c in stored if c["settings"]["seed"] == TUNING_SEED]
    assert len(trials) == 4  # two methods, two rates
    assert {c["settings"]["rounds"] for c in trials} == {2}
    row = row_of(TINY, METHODS["finetune"], 8, stored)
    assert row is not None
    assert row.theirs.keys() == row.honest.keys() == row.on_test.keys() == {0, 1}
    assert row.rates == {0.3}  # ten times better on so few rounds
    worth = row.worth
    assert worth is not None and worth >= 0
    assert all(0.3 < value <= 1 for value in row.accuracies.values())
    assert row_of(TINY, METHODS["apfl"], 8, stored) is None
    text = page.page(stored)
    assert "2 of 16 methods" in text.replace(f"of {len(METHODS)}", "of 16")
    assert "| APFL | 12.34 | not run | not run |" in text
    assert "### Tiny: 8 rounds" in text and "published table has" not in text
    shorter = json.loads(json.dumps(stored))
    for cell in shorter:
        cell["settings"]["rounds"] //= 2
    text = page.page(shorter)
    assert "Nothing was run with this number of rounds" in text
    assert "### Tiny: 4 rounds, the published table has 8" in text


@pytest.mark.slow
def test_finished_cells_are_not_measured_again(measured, monkeypatch):
    monkeypatch.setattr(runs, "set_up", None)
    plan = runs.Plan(measured, None, [0, 1])
    runs.measure_row(TINY, METHODS["finetune"], tiny_data(), plan)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(measured, tmp_path, monkeypatch):
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr(runs, "time", clock)
    method, data = METHODS["local_only"], tiny_data()
    stops = 0
    while True:  # each budget allows some measurements more
        plan = runs.Plan(tmp_path, None, [0, 1], deadline=next(ticks) + 5)
        try:
            runs.measure_row(TINY, method, data, plan)
            break
        except runs.OutOfTime:
            stops += 1
            assert stops < 20
    assert stops >= 2
    assert not list(tmp_path.rglob("*.checkpoint"))
    names = ("settings", "hash", "rows", "curve", "chosen")
    for path, cell in cells.all_cells(tmp_path):
        whole = cells.read(measured / path.relative_to(tmp_path))
        assert [cell[name] for name in names] == [whole[name] for name in names]


@pytest.mark.slow
def test_a_run_stops_where_no_replica_has_patience_left(tmp_path, tiny, monkeypatch):
    """The first replica stands still from round 2 on, the second from round 4 on."""
    looked = []

    def right_rows(run, counts):
        looked.append(run.round)
        best = [min(run.round, last) for last in (2, 4)[: run.replicas]]
        return np.stack([np.full(counts.shape, number) for number in best])

    monkeypatch.setattr(runs, "right_rows", right_rows)
    places = [Place(TINY, METHODS["local_only"], 8, 0.3, seed, 2) for seed in (0, 1)]
    plan = runs.Plan(tmp_path, None, [0, 1], patience=2)
    first, second = runs.measure(places, tiny_data(), plan)
    assert looked == [2, 4, 6]
    assert first["curve"]["rounds"] == [2, 4]
    assert second["curve"]["rounds"] == [2, 4, 6]
    stored = list(cells.all_cells(tmp_path))
    assert [line for path, cell in stored for line in cells.check(path, cell)] == []
    found = [cell for _, cell in stored]
    assert row_of(TINY, METHODS["local_only"], 8, found) is None
    assert row_of(TINY, METHODS["local_only"], 8, found, patience=2) is not None
    assert "### Tiny: 8 rounds, or until none was better for 2" in page.page(found)


def test_patience_counts_rounds_without_a_better_one_by_any_choice():
    """Validation rows get better until round 2, test rows until round 6."""
    correct = np.array([[[3], [1]], [[4], [1]], [[4], [1]], [[2], [2]], [[2], [2]]])
    looks = [1, 2, 4, 6, 8]
    assert protocol.stops_at(correct, looks, 2) == 3
    assert protocol.stops_at(correct, looks, 3) is None
    assert protocol.stops_at(np.delete(correct, 2, axis=0), [1, 2, 6, 8], 2) == 4


@pytest.mark.slow
def test_other_settings_are_refused_in_one_line(measured, tmp_path):
    place = Place(TINY, METHODS["local_only"], 8, 0.3, 0)
    other = place._replace(method=place.method._replace(options={"new": 1}))
    assert cells.finished(measured, place) is not None
    with pytest.raises(DataError, match=r"other settings \(options\); delete it") as e:
        cells.finished(measured, other)
    assert "\n" not in str(e.value)
    path = place.path(tmp_path)
    cells.write(path, {"hash": "1"})
    with pytest.raises(DataError, match="not a cell of the board: no chosen, curve"):
        cells.finished(tmp_path, place)


@pytest.mark.slow
def test_the_check_finds_what_was_changed(measured, tiny):
    path, cell = next(cells.all_cells(measured))
    assert cells.check(path, cell) == []

    def problems(change):
        changed = json.loads(json.dumps(cell))
        change(changed)
        return " ".join(cells.check(path, changed))

    def better(changed):
        changed["chosen"]["all"]["score"] += 1
        changed["digest"] = cells.digest(
            {key: changed[key] for key in changed if key != "digest"}
        )

    assert "by all rows does not follow from its curve" in problems(better)
    found = problems(lambda c: c["settings"].update(batch_size=11))
    assert "not the board's: batch_size" in found and "its hash" in found
    assert "changed after" in problems(lambda c: c.update(device="another"))
    assert "its name" in problems(lambda c: c["settings"].update(seed=7))
    assert "no such task" in problems(lambda c: c["settings"].update(task="none"))


# The command.


@pytest.mark.slow
def test_the_command(measured, tiny, tmp_path, capsys):
    def run(*words):
        code = main([*words, "--out", str(tmp_path)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    code, text = run("--page")
    assert code == 2 and "holds no cell of the board" in text
    (tmp_path / "board").symlink_to(measured)
    code, text = run("tiny", "--only", "finetune, local_only", "--seeds", "0,1")
    assert code == 0 and (tmp_path / "board.md").exists()
    assert run("--check") == (0, "12 cells are those of the board\n")
    assert run("--list")[1].startswith(
        "tasks: tiny, scafflix_figure\nmethods: fedavg, "
    )
    for words, problem in (
        (("none",), "TASK: 'none' is none of tiny, scafflix_figure"),
        (("--only", "fedavg,none"), "--only: 'none' is none of fedavg, "),
        (("--seeds", "0,x"), "--seeds: '0,x' is no list of numbers"),
        (("--share", "4/3"), "--share: '4/3' is not K/N"),
        (("--rounds", "0"), "--rounds: 0 is not 1 or more"),
    ):
        code, text = run(*words)
        assert code == 2 and problem in text and text.count("\n") == 1, text
    path, _ = next(cells.all_cells(measured))
    content = path.read_text()
    try:
        path.write_text(content.replace('"seed": ', '"seed": 1'))
        code, text = run("--check")
    finally:
        path.write_text(content)
    assert code == 2 and "its hash is not that of its settings" in text


@pytest.mark.slow
def test_the_command_needs_no_command_line_of_fedblend():
    """It runs on a machine with JAX alone."""
    program = (
        "import sys; sys.modules.update(pydantic=None, flwr=None, sklearn=None); "
        "from fedblend_reproductions.board.__main__ import main; "
        "code = main(['--list']); assert 'fedblend.cli' not in sys.modules; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0 and b"fashion_classes" in done.stdout


# Scafflix' Figure 1.


def test_the_section_of_the_figure(tmp_path):
    assert scafflix.communications([2.0, 1e-3, 1e-6, 1e-9]) == 2
    assert scafflix.communications([2.0, 1.0]) is None
    gaps = [[1.0, 1e-3, 1e-7], [1.0, 1e-7, 1e-9], [1.0, 0.9, 0.8]]
    cell = {
        "settings": scafflix.settings("a6a"),
        "hash": cells.digest(scafflix.settings("a6a")),
        "local_steps": 4,
        "curve": {"gradient descent": gaps[::2] * 3, "scafflix": gaps[1:2] * 5},
    }
    path = tmp_path / scafflix.NAME / "a6a.json"
    cells.write(path, {**cell, "digest": cells.digest(cell)})
    text = "\n".join(scafflix.section(tmp_path))
    assert "| a6a | 4 | 2 / 1 | more than 150 / 1 | 2 / 1 |" in text
    assert "| w6a | not run |" in text
    assert scafflix.check(path) == []
    cells.write(path, {**cell, "local_steps": 5, "digest": cells.digest(cell)})
    assert scafflix.check(path) == [f"{path}: it was changed after it was measured"]


@pytest.mark.slow
def test_scafflix_needs_fewer_communications(tmp_path, monkeypatch):
    if not PUBLIC_SETS["a6a"].usable:
        pytest.skip("a6a is not downloaded")
    monkeypatch.setattr(scafflix, "ALPHAS", (1.0, 0.01))
    cell = scafflix.measure("a6a", tmp_path)
    for plainly, skipping in zip(*cell["curve"].values(), strict=True):
        assert plainly[0] == pytest.approx(skipping[0])  # both start at ones
        fewer, more = map(scafflix.communications, (skipping, plainly))
        assert fewer is not None and (more is None or 2 * fewer < more)
    assert scafflix.measure("a6a", tmp_path) == cell

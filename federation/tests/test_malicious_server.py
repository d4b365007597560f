# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A malicious server against the default policy: requests from honest to absurd.

No answer contains a row: what the server computes from answers is no nearer to the rows
of this node than to other rows of the same kind, which the node never had. Every
refusal is in the audit, and no request needs much memory or time.
"""

import resource
import time
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from malicious import (
    BARE,
    CLIENT,
    COLUMNS,
    HONEST,
    Attacker,
    Refused,
    by_known_batches,
    config,
    nearest,
    ratios,
    write_node,
)

from fedblend.theory.privacy import gaussian_epsilon
from fedblend_federation import message as messages
from fedblend_federation.client import state as states
from fedblend_federation.client.ledger import FILE, read_ledger
from fedblend_federation.client.node import node_of
from fedblend_federation.message import ENROLLED, Message
from fedblend_federation.ops.audit import verify
from fedblend_federation.ops.local_cluster import POLICY
from fedblend_federation.policy import admit

WHOLE = {"name": "fedavg", "rate": 1e-3, "steps": 1, "batch_size": "all"}
FEW = {"name": "fedavg", "rate": 1.0, "steps": 1, "batch_size": 1}
SGD = {"solver": "sgd", "rate": 0.1, "steps": 5, "batch_size": 8}
UNFIT = "data: the rows are not as the configuration says"
OLD = """
[accept]
min_batch_rows = 0
fewest_rows = 0
discloses = ["batches"]
[rows]
columns = "any"
changes = ["labels", "split"]
[metrics]
bound = 1e30
[protect.rows]
noise = 0.0
"""
"""What a node accepted by default before there were these keys."""


def algorithm(**options: Any) -> dict[str, Any]:
    return {"algorithm": HONEST["algorithm"] | options}


def sgd(**options: Any) -> dict[str, Any]:
    return {"solver": "sgd", "rate": 0.1, "steps": 4, "batch_size": 8} | options


HONEST_REQUESTS = {
    "batches": {},
    "all rows": {"algorithm": WHOLE},
    "epochs": algorithm(steps=None, epochs=2, batch_size=8),
    "apfl": algorithm(name="apfl", alpha=0.5, held_out=0.2),
    "another rate": algorithm(rate=1e-6),
}
REFUSED = {
    "one row": (algorithm(**FEW), "accept.min_batch_rows"),
    "one row, many steps": (algorithm(batch_size=1, steps=99), "accept.min_batch_rows"),
    "one step": (algorithm(steps=1), "accept.fewest_rows"),
    "one client's steps": (algorithm(steps=[1, 9]), "accept.fewest_rows"),
    "steps of no length": (
        algorithm(schedule={"name": "exponential", "unit": "step", "decay": 1e-9}),
        "accept.fewest_rows",
    ),
    "a last batch of one row": (
        algorithm(steps=None, epochs=1, batch_size=39),
        "accept.min_batch_rows",
    ),
    "another part": (algorithm(name="apfl", alpha=0.5, held_out=0.4), "rows.changes"),
    "one row for the own model": (
        algorithm(name="flix_local_steps", alpha=0.5, personal=sgd(batch_size=1)),
        "accept.min_batch_rows",
    ),
    "few rows": ({"data": {"test": 0.9}}, "rows.changes"),
    "another test row": ({"data": {"test": 0.36}}, "rows.changes"),
    "another order": ({"data": {"seed": 1}}, "rows.changes"),
    "another split": ({"run": {"rounds": 100, "seed": 1}}, "rows.changes"),
    "validation rows": ({"data": {"validation": 0.1}}, "rows.changes"),
    "one column": ({"data": {"columns": ["age"]}}, UNFIT),
    "the target as a column": ({"data": {"columns": [*COLUMNS, "state"]}}, UNFIT),
    "a column that may be there": ({"data": {"columns": [*COLUMNS, "hiv"]}}, UNFIT),
    "a label that may be there": ({"data": {"labels": ["ill", "dead"]}}, UNFIT),
    "labels as numbers": ({"data": {"labels": None, "classes": 2}}, UNFIT),
    "another kind": ({"data": {"kind": "binary"}}, UNFIT),
    "gradients": (algorithm(name="scaffold"), "accept.algorithms"),
    "losses": (algorithm(name="agnostic", q_rate=0.1), "accept.algorithms"),
    "endless steps": (algorithm(steps=20_000_000), "limits: algorithm"),
    "endless epochs": (algorithm(steps=None, epochs=10**9), "limits: algorithm"),
    "endless turns": (
        algorithm(name="flix_local_steps", alpha=0.5, personal=sgd(turns=10**9)),
        "limits: algorithm",
    ),
    "an endless solver": (
        algorithm(name="flix_local_steps", alpha=0.5, personal=SGD | {"turns": 10**9}),
        "limits: algorithm",
    ),
    "a grid of losses": (algorithm(name="mapper", grid=10), "protect.rows"),
    "a huge batch": (algorithm(batch_size=10**9), "limits.memory_gb"),
    "endless rounds": ({"run": {"rounds": 10**9}}, "budget.answers"),
    "endless training alone": ({"measure": {"local": 10**9}}, "budget.answers"),
    "a huge model": (
        {"model": {"name": "mlp", "hidden": [10**6, 10**6]}},
        "limits.memory_gb",
    ),
    "a deep model": (
        {"model": {"name": "mlp", "hidden": [1] * 3000}},
        "limits: hidden",
    ),
    "a huge compressor": (
        {"compress": {"compressor": {"name": "rand_k", "k": 2**31 - 1}}},
        "limits.memory_gb",
    ),
    "many clients": ({"data": {"clients": 2**31 - 1}}, "limits: data.clients"),
    "too much work": (
        algorithm(steps=10_000, batch_size=99_999)
        | {"model": {"name": "mlp", "hidden": [2000, 2000]}},
        "limits.seconds",
    ),
    "a file of the server": (
        {"central": {"how": "two_way", "file": "/etc/passwd", "upload": True}},
        "accept.discloses",
    ),
    "a configuration for one machine": (
        {"data": {"partition": "iid", "source": "digits"}},
        "data",
    ),
}
TERMS = {
    "memory for 10^7 rows": (
        {"train": 10**7, "test": 24},
        "limits.memory_gb: capacities",
    ),
    "no rows": ({"train": -1, "test": 24}, "capacities.train"),
    "words": ({"train": "many", "test": 24}, "capacities.train"),
    "no split": ({"train": 40}, "has no capacities"),
    "nothing": (None, "has no capacities"),
}


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Attacker:
    """A server and the node that it is after, with FLIX allowed besides."""
    home = tmp_path_factory.mktemp("node") / "victim"
    attacker = Attacker(write_node(home, policy=POLICY))
    attacker.begin(config())
    attacker.begin(config(**HONEST_REQUESTS["apfl"]))
    return attacker


def drawn_out(attacker: Attacker, changes: dict[str, Any], rounds: int = 3) -> list:
    """What a server computes from some answers of an experiment."""
    attacker.begin(config(**changes))
    found = []
    for number in range(rounds):
        found += ratios(attacker.round(number))
    return found


@pytest.mark.parametrize("name", HONEST_REQUESTS)
def test_honest_requests_are_answered_and_hold_no_row(name, victim):
    found = drawn_out(victim, HONEST_REQUESTS[name])
    assert nearest(found) > 0.5 * min(nearest(found, seed) for seed in range(1, 41))
    measured = victim.measure(0)
    assert set(measured) == {"test"}
    victim.ask("stop")


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused_and_the_audit_says_why(name, victim):
    changes, key = REFUSED[name]
    started, before = time.monotonic(), _memory()
    with pytest.raises(Refused, match=key):
        victim.begin(config(**changes))
    last = victim.audit()[-1]
    assert last["event"] == "refused" and key in last["fields"]["reason"]
    assert time.monotonic() - started < 5.0 and _memory() - before < 100e6


@pytest.mark.parametrize(
    "more, why", [("a." * 30_000 + "b = 1", "8 parts"), ("#" * 70_000, "65536 bytes")]
)
def test_text_is_measured_before_it_is_parsed(more, why, victim):
    started, before = time.monotonic(), _memory()
    with pytest.raises(Refused, match=why):
        victim.begin(f"{more}\n{config()}")
    assert time.monotonic() - started < 2.0 and _memory() - before < 100e6


@pytest.mark.parametrize("name", TERMS)
def test_terms_are_checked_before_memory_is_allocated(name, victim):
    capacities, key = TERMS[name]
    victim.begin(config())
    fields, before = {**victim.terms, "capacities": capacities}, _memory()
    victim.experiment = "terms"
    with pytest.raises(Refused, match=key):
        victim.ask("enroll", victim.model(0.0), fields=fields)
    assert _memory() - before < 100e6


def _memory() -> float:
    """The largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("held_out", [0.025, 0.9])
def test_parts_of_few_rows_are_refused(held_out, tmp_path):
    attacker = Attacker(write_node(tmp_path / "node"))
    changes = algorithm(name="apfl", alpha=0.5, held_out=held_out)
    with pytest.raises(Refused, match=r"accept.min_batch_rows"):
        attacker.begin(config(**changes))


def test_refusals_about_rows_are_one_line_whatever_is_wrong(victim):
    lines = set()
    for changes, key in REFUSED.values():
        if key == UNFIT:
            with pytest.raises(Refused) as error:
                victim.begin(config(**changes))
            lines.add(str(error.value))
    assert lines == {admit.UNFIT}


def test_messages_that_make_no_sense_end_no_process(victim):
    victim.begin(config())
    nan, huge = victim.model(np.nan), victim.model(3e38)
    for number, model in enumerate((nan, huge)):
        victim.round(number, model)
    short = jax.tree.map(lambda leaf: leaf[:1], victim.model(0.0))
    with pytest.raises(Refused):
        victim.round(2, short)
    for head in (
        {"round": -1},
        {"round": 5, "base": 7},
        {"round": 2**31 - 1},
        {"experiment": "unknown"},
        {"client": 1},
        {"kind": "refused"},
    ):
        message = Message("round", victim.experiment, CLIENT, 0, base=ENROLLED)
        with pytest.raises(Refused):
            victim.send(messages.encode(message._replace(**head)))
    for data in (b"", b"\xff" * 64, bytes(2**20), b"\x08" + bytes(99)):
        with pytest.raises(Refused):
            victim.send(data)
    victim.round(0)
    verify(victim.settings.folder / "audit.jsonl")


@pytest.mark.parametrize("name", ["scaffnew", "l2gd"])
def test_numbers_of_steps_in_a_message_are_limited(name, victim):
    options = {"lam": 0.5} if name == "l2gd" else {}
    victim.begin(config(**algorithm(name=name, **options)))
    extra = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 2**31 - 1, leaf.dtype),
        victim.executor.message.extra,
    )
    with pytest.raises(Refused, match=r"limits: a number in the message"):
        victim.round(0, extra=extra)
    victim.ask("stop")


def test_work_is_in_the_audit_before_it_begins(victim):
    victim.begin(config())
    victim.round(0)
    events = [line["event"] for line in victim.audit()[-2:]]
    assert events == ["begins", "round"]


# What the old defaults allowed, and the new ones do not.


def test_one_row_a_message_was_that_row(tmp_path):
    for policy in (OLD, OLD + "[protect]\nclip = 0.01\n"):
        attacker = Attacker(write_node(tmp_path / str(len(policy)), policy=policy))
        assert nearest(drawn_out(attacker, algorithm(**FEW), rounds=5)) < 1e-5


def test_batches_that_the_server_knows_are_equations(tmp_path, victim):
    """As many answers as rows, all from one model: the server chose the seed."""
    changes = algorithm(rate=1e-7) | {"run": {"rounds": 100, "precision": "float64"}}
    shared = Attacker(write_node(tmp_path / "shared", policy=OLD))
    for attacker, knows in ((shared, True), (victim, False)):
        attacker.begin(config(**changes))
        answers = [attacker.round(number) for number in range(60)]
        found = by_known_batches(attacker, answers, 8)
        assert (nearest(found) < 1e-4) == knows
        attacker.ask("stop")


def test_no_two_models_meet_the_same_batch(tmp_path):
    """Answers to nearly the same model are nearly the same, on the same batch."""
    for policy, same in ((OLD, True), (BARE, False)):
        attacker = Attacker(write_node(tmp_path / str(same), policy=policy))
        attacker.begin(config())
        answers = [attacker.round(0, attacker.model(value)) for value in (0.0, 1e-6)]
        gap = max(np.abs(answers[0][n] - answers[1][n]).max() for n in answers[0])
        assert (gap < 1e-5) == same
        np.testing.assert_equal(attacker.round(0, attacker.model(0.0)), answers[0])
        attacker.ask("stop")


def test_two_splits_told_a_row_by_their_difference(tmp_path):
    attacker = Attacker(write_node(tmp_path / "old", policy=OLD))
    answers = []
    for test in (0.375, 0.36):  # 40 and 41 training rows
        attacker.begin(config(algorithm=WHOLE, data={"test": test}))
        count = attacker.executor.train_rows
        answers.append({k: count * a for k, a in attacker.round(0).items()})
    gap = {name: answers[1][name] - answers[0][name] for name in answers[0]}
    assert nearest(ratios(gap)) < 1e-2


def test_measures_of_a_chosen_model_told_the_value_of_a_row(tmp_path, victim):
    """A model that is right about all rows but the one with the largest age."""
    attacker = Attacker(write_node(tmp_path / "old", policy=OLD))
    for server, told in ((attacker, True), (victim, False)):
        server.begin(config())
        values = [_age_of_oldest(server, steep) for steep in (1e7, 2e7)]
        assert (abs(values[0] - values[1]) < 1e-4 < values[0]) == told


def _age_of_oldest(server: Attacker, steep: float) -> float:
    """The part of the mean loss that grows with age beyond 1, for class 1."""
    shown = server.measure(0, server.steep(steep, 1.0))
    return shown["test"]["shared"]["loss"] / steep


def test_measurements_are_counted_over_experiments_and_restarts(tmp_path, monkeypatch):
    monkeypatch.setattr("fedblend_federation.client.ledger.MEASURES", 3)
    policy = "[metrics]\ntotal = 5\n"
    settings = write_node(tmp_path / "node", policy=policy)
    attacker = Attacker(settings)
    attacker.begin(config())
    first = attacker.measure(0)
    for number in (1, 2):
        attacker.measure(number)
    with pytest.raises(Refused, match=r"policy metrics: 3 so far; allowed"):
        attacker.measure(3)
    attacker.node = node_of(settings)
    with pytest.raises(Refused, match=r"policy metrics: 3"):
        attacker.measure(4)
    attacker.begin(config())
    assert attacker.measure(0) == first
    assert attacker.measure(0) == first  # the same message again, not counted
    attacker.measure(1)
    with pytest.raises(Refused, match=r"metrics.total: 5 so far; allowed: at most 5"):
        attacker.measure(2)
    model = settings.folder / attacker.experiment / "personal.safetensors"
    before = model.read_bytes()
    assert attacker.measure(3, attacker.model(1.0), last=True) == {}
    assert model.read_bytes() != before
    assert "metrics.total" in attacker.audit()[-1]["fields"]["withheld"]
    assert read_ledger(settings.folder).measures == 5


def test_columns_and_labels_cannot_be_tried_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(admit, "MISFITS", 2)
    policy = '[rows]\ncolumns = "any"\n'
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    for number in range(4):
        with pytest.raises(Refused, match="data: the rows are not as"):
            attacker.begin(config(data={"columns": [f"column{number}"]}))
    details = [line["fields"]["detail"] for line in attacker.audit()]
    assert ["policy rows: 2 desc" in detail for detail in details] == [
        False,
        False,
        True,
        True,
    ]
    with pytest.raises(Refused, match="data: the rows are not as"):
        attacker.begin(config(data={"columns": ["age"]}))  # would fit
    before = read_ledger(attacker.settings.folder).misfits
    with pytest.raises(Refused):
        attacker.begin(config(data={"columns": ["column0"]}))
    assert read_ledger(attacker.settings.folder).misfits == before


def test_experiments_without_end_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "EXPERIMENTS", 3)
    attacker = Attacker(write_node(tmp_path / "node"))
    folder = attacker.settings.folder
    for _ in range(3):
        attacker.begin(config())
    with pytest.raises(Refused, match=r"policy limits: experiments under way is 3"):
        attacker.begin(config())
    attacker.experiment = "experiment2"
    attacker.measure(0)
    attacker.ask("stop")
    attacker.begin(config())
    assert not (folder / "experiment2").exists() and (folder / "experiment1").exists()
    ledger = read_ledger(folder)
    assert set(ledger.accounts) == {"experiment1", "experiment3", "experiment5"}
    assert ledger.experiments == 4
    ledger.age += 31 * 86400
    ledger.write(folder)
    attacker.begin(config())
    assert [path.name for path in folder.glob("experiment*")] == ["experiment6"]
    assert [line["event"] for line in attacker.audit()].count("ended") == 4


@pytest.mark.parametrize("clock", ["time", "monotonic"])
@pytest.mark.parametrize("days", [31, -31])
def test_one_clock_that_jumps_ends_no_experiment(clock, days, tmp_path, monkeypatch):
    attacker = Attacker(write_node(tmp_path / "node"))
    attacker.begin(config())
    real = getattr(time, clock)
    monkeypatch.setattr(time, clock, lambda: real() + days * 86400)
    attacker.begin(config())
    assert "ended" not in [line["event"] for line in attacker.audit()]
    attacker.experiment = "experiment1"
    attacker.round(0)


def test_the_model_of_an_experiment_that_is_over_stays(tmp_path):
    attacker = Attacker(write_node(tmp_path / "node"))
    attacker.begin(config())
    place = attacker.settings.folder / attacker.experiment
    attacker.measure(0)
    attacker.ask("stop")
    attacker.begin(config())
    kept = {path.name for path in place.iterdir()}
    assert kept == {"personal.safetensors", "terms.json", "measures.json"}


def test_noise_is_what_stops_models_made_to_extract_rows(tmp_path):
    """Without it two models, whose updates differ by one row, tell that row."""
    noisy = "[protect]\nclip = 1.0\nnoise = 1.0\n[protect.rows]\nnoise = 0.0\n"
    for number, (policy, told) in enumerate(
        ((BARE, True), (noisy, False), ("", False))
    ):
        settings = write_node(tmp_path / f"node{number}", policy=policy)
        attacker = Attacker(settings)
        run = {"rounds": 100, "precision": "float64"}
        attacker.begin(config(algorithm=WHOLE, run=run))
        answers = [
            attacker.round(number, attacker.steep(1e5, age))
            for number, age in enumerate(np.linspace(-2.0, 3.0, 60))
        ]
        found = []
        for one, after in pairwise(answers):
            found += ratios({name: after[name] - one[name] for name in one})
        assert (nearest(found) < 1e-4) == told


def test_noise_is_what_hides_values_from_many_measurements(tmp_path):
    """Without it, models sure of a class above an age count the rows above that age."""
    for noise, told in ((0.0, True), (1.0, False)):
        policy = f"[metrics]\nnoise = {noise}\n"
        attacker = Attacker(write_node(tmp_path / str(noise), policy=policy))
        attacker.begin(config())
        ages = np.linspace(-2.0, 3.0, 50)
        right = [
            attacker.measure(number, attacker.steep(1e4, age))["test"]["shared"]
            for number, age in enumerate(ages)
        ]
        jumps = np.abs(np.diff([shown["accuracy"] for shown in right])) > 0.02
        tested = attacker.executor.setup.splits["test"].examples[0][:, 0]
        there = np.histogram(tested, ages)[0] > 0
        assert jumps.sum() > 5
        assert there[jumps].all() == told


def test_epsilon_is_a_budget_over_experiments(tmp_path):
    protect = "[protect]\nclip = 1.0\nnoise = 10.0\n[budget]\nepsilon = 2.0\n"
    settings = write_node(tmp_path / "node", policy=protect)
    attacker = Attacker(settings)
    with pytest.raises(Refused, match=r"budget.epsilon: 2\.\d+ with this answer"):
        for _ in range(3):
            attacker.begin(config())
            for number in range(3):
                attacker.round(number)
    ledger = read_ledger(settings.folder)
    assert 3 < ledger.answers < 9 and ledger.unprotected == 0
    assert ledger.squared == pytest.approx(ledger.answers * 0.04)
    attacker.node = node_of(settings)
    with pytest.raises(Refused, match=r"budget.epsilon"):
        attacker.begin(config())
        attacker.round(0)


def test_epsilon_of_a_row_is_a_budget_over_experiments(tmp_path):
    """At noise of one clip each answer from all rows costs a row mu = 1."""
    policy = "[budget]\nrow_epsilon = 12.0\n[protect.rows]\nnoise = 1.0\n"
    settings = write_node(tmp_path / "node", policy=policy)
    attacker = Attacker(settings)
    with pytest.raises(Refused, match=r"budget.row_epsilon: 1\d\.\d+ with this answer"):
        for _ in range(9):
            attacker.begin(config(algorithm=WHOLE))
            attacker.round(0)
    ledger = read_ledger(settings.folder)
    assert 1 < ledger.answers < 9 and ledger.experiments == ledger.answers + 1
    assert ledger.row_epsilon(1e-6) == gaussian_epsilon(ledger.answers, 1e-6) < 12.0


def test_nothing_leaves_a_node_whose_ledger_is_damaged(tmp_path):
    attacker = Attacker(write_node(tmp_path / "node"))
    attacker.begin(config())
    attacker.round(0)
    path = attacker.settings.folder / FILE
    path.write_text(path.read_text().replace('"answers": 1', '"answers": 0'))
    with pytest.raises(Refused, match="ledger: the file is damaged"):
        attacker.round(1)


def test_a_message_that_comes_again_after_a_crash_is_counted_once(
    tmp_path, monkeypatch
):
    settings = write_node(tmp_path / "node")
    attacker = Attacker(settings)
    attacker.begin(config())

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedblend_federation.client.state.write_reply", killed)
        with pytest.raises(KeyboardInterrupt):
            attacker.round(0)
    assert read_ledger(settings.folder).answers == 1
    attacker.node = node_of(settings)
    first, again = attacker.round(0), attacker.round(0)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert read_ledger(settings.folder).answers == 1
    attacker.round(1)
    assert read_ledger(settings.folder).answers == 2


def test_there_are_thirty_requests_at_least():
    assert len(HONEST_REQUESTS) + len(REFUSED) + len(TERMS) >= 30

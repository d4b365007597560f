# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which columns, labels and splits a node agrees to, by its policy."""

import pytest
from malicious import COLUMNS, Attacker, Refused, config, write_node

from fedblend_federation.message import UNKNOWN

UNFIT = "data: the rows are not as the configuration says"


def begins(tmp_path, policy: str, **changes) -> Attacker:
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    attacker.begin(config(**changes))
    return attacker


@pytest.mark.parametrize(
    ("rows", "columns", "fits"),
    [
        ('columns = ["age", "dose"]', ["dose", "age"], True),
        ('columns = ["age", "dose"]', ["age"], False),
        ('columns = "file"', COLUMNS[::-1], True),
        ('columns = "file"', COLUMNS[1:], False),
        ('columns = "any"', ["age"], True),
    ],
)
def test_columns_are_those_agreed_on(rows, columns, fits, tmp_path):
    changes = {"data": {"columns": columns}}
    if fits:
        begins(tmp_path, f"[rows]\n{rows}\n", **changes)
        return
    with pytest.raises(Refused, match=UNFIT):
        begins(tmp_path, f"[rows]\n{rows}\n", **changes)


def test_the_first_experiment_settles_labels_and_split(tmp_path):
    attacker = begins(tmp_path, "")
    attacker.begin(config())
    attacker.begin(config(run={"rounds": 9, "seed": 3}, data={"split_seed": 0}))
    with pytest.raises(
        Refused, match=r"rows.changes: data.split_seed is 3; allowed: 0"
    ):
        attacker.begin(config(run={"rounds": 9, "seed": 3}))
    with pytest.raises(Refused, match=UNFIT):
        attacker.begin(config(data={"labels": ["ill", "well", "dead"]}))
    policy = attacker.settings.policy
    policy.write_text('[rows]\nchanges = ["labels", "split"]\n')
    attacker.begin(config(data={"labels": ["ill", "well", "dead"], "test": 0.25}))


def test_constants_are_told_of_one_split(tmp_path):
    """They are exact: those of two splits that differ in a row would tell of it."""
    policy = '[accept]\nalgorithms = "any"\ndiscloses = ["constants"]\n'
    attacker = Attacker(write_node(tmp_path / "node", policy=policy))
    own = {"solver": "sgd", "rate": 0.1, "steps": 5, "batch_size": 8}
    flix = {"name": "flix", "alpha": 0.5, "steps": 1, "batch_size": None}
    flix["personal"] = own

    def told(test: float):
        text = config(algorithm=flix, data={"test": test})
        fields = {"config": text}
        return attacker.ask("describe", client=UNKNOWN, fields=fields).fields

    assert told(0.375)["constants"] == told(0.375)["constants"]
    with pytest.raises(
        Refused, match=r"rows.changes: data.test is 0.36; allowed: 0.375"
    ):
        told(0.36)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations over sequences and tags, and of the methods with inner steps."""

import json
import lzma
from typing import Any

import numpy as np
import pytest

from fedblend.config.build import build
from fedblend.config.config import check
from fedblend.errors import ConfigError
from fedblend.simulation.simulate import set_up

WORK = {"rate": 0.5, "steps": 3, "batch_size": 4}


@pytest.fixture
def said(tiny, tmp_path) -> dict[str, Any]:
    """Three roles who say the same again and again."""
    path = tmp_path / "roles.json.xz"
    roles = {r: {"lines": [f"{r} ho!"] * 12} for r in ("tra", "la", "hey")}
    path.write_bytes(lzma.compress(json.dumps(roles).encode()))
    options = {"length": 8, "minimum": 2, "file": str(path)}
    data = {"source": "shakespeare", "options": options, "partition": "by_key"}
    model = {"name": "char_rnn", "embedding": 3, "hidden": 8, "layers": 1}
    run = {"rounds": 4, "every": 4}
    return {**tiny, "data": {**data, "test": 0.25}, "model": model, "run": run}


@pytest.fixture
def tagged(tiny, tmp_path) -> dict[str, Any]:
    """Three users; every post is about one of six things and says so."""
    rows = [
        f'<row Id="{n}" PostTypeId="1" OwnerUserId="{n % 3 + 1}" '
        f'Tags="&lt;t{n % 6}&gt;" Body="word{n % 6} word{n % 2}" />'
        for n in range(60)
    ]
    path = tmp_path / "Posts.xml"
    path.write_text(f"<posts>{''.join(rows)}</posts>")
    options = {"words": 6, "tags": 6, "file": str(path)}
    data = {"source": "stackexchange", "options": options, "partition": "by_key"}
    run = {"rounds": 4, "every": 4}
    return {**tiny, "data": {**data, "test": 0.25}, "run": run}


def trained(config):
    """The losses before and after, on the clients' own training rows."""
    made = build(check(config, "here"))
    params = made.model.init(made.key)
    done = set_up(made.spec).complete()
    clients = range(made.federated_data.clients)
    rows = [made.federated_data.train.rows(client) for client in clients]
    before = np.mean([made.loss(params, row).mean() for row in rows])
    after = [made.loss(done.personal(i), rows[i]).mean() for i in clients]
    return set(made.spec.measure), before, np.mean(after)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) for one in ("reptile", "fomaml")]
)
def test_sequences_are_learned(name, said):
    said["algorithm"] = {"name": name, "server": 0.5, **WORK}
    measures, before, after = trained(said)
    assert measures == {"loss", "accuracy"}
    assert after < 0.9 * before


SMALL = {"name": "transformer", "width": 8, "layers": 1, "heads": 2}


@pytest.mark.slow
def test_a_transformer_learns_sequences(said):
    work = {"optimizer": {"name": "adam", "rate": 0.02}, "steps": 20, "batch_size": 4}
    said |= {"model": SMALL, "algorithm": {"name": "fedavg", **work}}
    measures, before, after = trained(said)
    assert measures == {"loss", "accuracy"}
    assert after < 0.9 * before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reptile", "fomaml"])
def test_tags_are_learned(name, tagged):
    server = {"name": "adam", "rate": 0.1}
    tagged["algorithm"] = {"name": name, "server": server, **WORK}
    measures, before, after = trained(tagged)
    assert measures == {"loss", "recall@5"}
    assert after < 0.9 * before


@pytest.mark.slow
def test_a_metric_asked_for_is_that_of_the_kind(said, tagged):
    for config, metric in ((said, "accuracy"), (tagged, "recall@2")):
        config["measure"] = {**config["measure"], "metrics": [metric]}
        assert set(trained(config)[0]) == {metric}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"name": "mlp"}}, '"mlp" is for single rows, not for sequence'),
        (
            {"model": {"name": "char_rnn", "cell": "rnn"}},
            "cell: 'rnn' is not 'lstm'",
        ),
        ({"model": {"name": "char_rnn", "loss": "cross_entropy"}}, "not for sequence"),
        ({"model": {**SMALL, "kv_heads": 3}}, "kv_heads: 3 is not a divisor"),
        ({"model": {**SMALL, "width": 0}}, "width: 0 is not a whole number"),
        (
            {"model": {"name": "text_classifier"}},
            '"text_classifier" is for single rows, not for sequence',
        ),
        ({"algorithm": {"name": "fomaml", "server": 0.0, **WORK}}, "server"),
        ({"algorithm": {"name": "reptile", "server": -1.0, **WORK}}, "server"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(change, message, said):
    with pytest.raises(ConfigError, match=message) as error:
        build(check({**said, **change}, "here"))
    assert "\n" not in str(error.value)


def test_a_network_for_sequences_takes_no_other_rows(tagged):
    tagged["model"] = {"name": "char_rnn"}
    with pytest.raises(ConfigError, match='"char_rnn" is for sequences, not for tags'):
        build(check(tagged, "here"))

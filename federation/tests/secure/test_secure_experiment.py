# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``federation.secure`` of a configuration, policies and rosters of nodes."""

import base64
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from configured import (
    CLIENTS,
    OPEN,
    experiment,
    federated,
    few,
    method,
    newest,
    settings_of,
    write_rows,
)
from safetensors.numpy import save_file

import fedblend as fb
from fedblend.config import toml
from fedblend.config.config import check
from fedblend.errors import ConfigError, RunError
from fedblend.simulation.serialize import unpack
from fedblend.trees import leaves_by_path
from fedblend_federation.client.node import node_of
from fedblend_federation.ops import credentials
from fedblend_federation.ops.provision import provision
from fedblend_federation.ops.settings import ClientSettings, NodeSettings, load_as
from fedblend_federation.secure.roster import keys_of
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

POLICY = few(OPEN + "[metrics]\nnames = []\n")
"""Without measures no figures are drawn, which takes longer than the rounds."""
DIANA = {
    "how": "diana",
    "compressor": {"name": "rand_k", "k": 2},
    "masks": "one",
}
PRIVACY = {"clip": 1.0, "noise": 1.0, "delta": 1e-5}
DEMANDING = POLICY.replace("[accept]\n", "[accept]\nsecure = true\n", 1)
NOWHERE = Path()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "lab"
    names = ["alice", "bob", "carol"]
    provision(folder, host="127.0.0.1", nodes=names, with_keys=True)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The folder of a frozen base, as every node has it."""
    place = tmp_path_factory.mktemp("bases")
    params = fb.models.mlp(6, 3, hidden=[16]).init(jax.random.key(7))
    arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_path(params).items()}
    save_file(arrays, place / "base.safetensors")
    return place


def node_settings(
    rows: Path, folder: Path, lab: Path, client: int, policy: str, bases: Path = NOWHERE
):
    """The settings of a node, with the keys that ``init`` made."""
    settings_of(rows, folder, client, policy)
    own, place = lab / "nodes" / ("alice", "bob", "carol")[client], folder / "node.toml"
    more = f'roster = "{own}/roster.toml"\nsecure_key = "{own}/secure.key"\n'
    more += f'bases = "{bases}"\n' if bases != NOWHERE else ""
    place.write_text(place.read_text().replace("[data]", f"{more}[data]"))
    return load_as(NodeSettings, place)


def nodes(
    rows: Path,
    folder: Path,
    lab: Path,
    policy: str = DEMANDING,
    bases: Path = NOWHERE,
) -> dict:
    return {
        100 + client: node_of(
            node_settings(rows, folder / f"node{client}", lab, client, policy, bases)
        )
        for client in range(CLIENTS)
    }


def secure(text: str, **more) -> str:
    given = "".join(f"{key} = {toml.literal(value)}\n" for key, value in more.items())
    return text.replace("[federation]\n", f"[federation]\nsecure = true\n{given}", 1)


ADAPTERS = (
    '[model]\nname = "mlp"\nhidden = [16]\n'
    '[adapt]\nrank = 2\nbase = "{base}/base.safetensors"\n'
    '[algorithm]\nname = "fedavg"\nrate = 0.3\nsteps = 3\nbatch_size = 8\n'
    "[run]\nrounds = 2\nevery = 2\nchunk = 1\nseed = 5\n"
)


@pytest.mark.parametrize(
    "name", ["fedavg", "adapters", pytest.param("flix", marks=pytest.mark.slow)]
)
def test_an_experiment_with_secure_sums_is_near_the_plain_one(
    name, rows, lab, base, tmp_path
):
    """Sums are off by 3 * 2**-46, and models by the rounding of float32.

    Weights are uniform: those by count are coarse in a secure sum.
    """
    adapters = name == "adapters"
    how = ADAPTERS.format(base=base) if adapters else method(name, rows, 2)
    how = how.replace("seed = 5\n", 'seed = 5\nweights = "uniform"\n')
    text = federated(how + "[measure]\nlocal = false\n", 60.0)
    models = {}
    for kind, how in (("secure", secure(text)), ("plain", text)):
        place = tmp_path / kind
        policy = DEMANDING if kind == "secure" else POLICY
        bases = base if adapters else NOWHERE
        transport = LoopbackTransport(nodes(rows, place, lab, policy, bases))
        summary = run_server(experiment(place / "run", how), transport, poll=0.0)
        assert summary["runs"][0]["round"] == 2
        shared, _ = unpack((place / "run" / "model.safetensors").read_bytes())
        own = [newest(place / f"node{client}") for client in range(CLIENTS)]
        models[kind] = [shared, *(unpack(path.read_bytes())[0] for path in own)]
    for mine, theirs in zip(models["secure"], models["plain"], strict=True):
        for leaf in mine:
            np.testing.assert_allclose(mine[leaf], theirs[leaf], atol=1e-6)
    audits = (tmp_path / "secure").glob("node*/state/audit.jsonl")
    texts = [path.read_text() for path in audits]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    events = {line["event"] for line in lines}
    assert {"shared", "round", "masked", "opened"} <= events
    masked = [line["fields"] for line in lines if line["event"] == "masked"]
    assert not any(one["clipped"] or one["zeros"] for one in masked)


def stopped(rows, tmp_path, made: dict, text: str) -> str:
    with pytest.raises(RunError) as error:
        run_server(
            experiment(tmp_path / "run", text), LoopbackTransport(made), poll=0.0
        )
    return str(error.value)


def test_a_policy_that_demands_secure_sums_refuses_others(rows, lab, tmp_path):
    made = nodes(rows, tmp_path, lab)
    line = stopped(rows, tmp_path, made, federated(method("fedavg", rows, 1), 0.2))
    expected = "policy accept.secure: federation.secure is false; allowed: true"
    assert expected in line


def test_a_policy_has_a_least_clip(rows, lab, tmp_path):
    """Numbers that are all clipped are signs."""
    made = nodes(rows, tmp_path, lab)
    text = secure(federated(method("fedavg", rows, 1), 0.2), secure_clip=1e-9)
    expected = "policy accept: federation.secure_clip is 1e-09; allowed: at "
    assert expected in stopped(rows, tmp_path, made, text)


def test_a_node_without_a_roster_refuses(rows, tmp_path):
    made = {
        100 + client: node_of(settings_of(rows, tmp_path / str(client), client, POLICY))
        for client in range(CLIENTS)
    }
    text = secure(federated(method("fedavg", rows, 1), 0.2))
    line = stopped(rows, tmp_path, made, text)
    assert "node.toml: roster and secure_key are missing" in line


def test_rosters_that_are_wrong_are_one_line(rows, lab, tmp_path):
    def settings(roster: str, key: bytes = b"") -> ClientSettings:
        found = node_settings(rows, tmp_path, lab, 0, POLICY)
        (tmp_path / "roster.toml").write_text(roster)
        alice = (lab / "nodes" / "alice" / "secure.key").read_bytes()
        (tmp_path / "secure.key").write_bytes(key or alice)
        more = {
            "roster": tmp_path / "roster.toml",
            "secure_key": tmp_path / "secure.key",
        }
        (own,) = found.model_copy(update=more).client_settings().values()
        return own

    whole = (lab / "nodes" / "alice" / "roster.toml").read_text()
    keys = keys_of(settings(whole)).public
    assert sorted(keys) == [0, 1, 2] and len(set(keys.values())) == 3
    other = credentials.secure_key()
    own = base64.b64encode(keys[0]).decode()
    for roster, key, line in (
        (whole.replace(own, other.public.decode()), b"", "is not that of secure.key"),
        (whole, other.key, "is not that of secure.key"),
        (whole.replace(own, "abc"), b"", "32 bytes in base64"),
        (whole.replace("client = 2", "client = 1"), b"", "a client or a key twice"),
        (whole, b"no key", "is not an X25519 key in PEM format"),
        ("version = 2\n", b"", "version"),
    ):
        with pytest.raises(ConfigError, match=line) as error:
            keys_of(settings(roster, key))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run": {"reduction": "median"}}, "run.reduction: is median; with"),
        ({"run": {"reduction": "trimmed_mean"}}, "run.reduction: is trimmed_mean"),
        (
            {"compress": {"compressor": {"name": "top_k", "k": 2}}},
            "compress.compressor: is top_k; with federation.secure allowed: whole",
        ),
        (
            {"compress": {"compressor": {"name": "rand_k", "k": 2}}},
            'quantizers, rand_k with masks = "one"',
        ),
        (
            {"compress": {**DIANA, "start": "first"}},
            "compress.start: is first; with federation.secure allowed: zero",
        ),
        (
            {"compress": {**DIANA, "rate": [0.1, 0.1, 0.1]}},
            "compress.rate: is a list; with federation.secure allowed: one rate",
        ),
        ({"compress": {"how": "perm_k"}}, "compress.how: is perm_k"),
        (
            {"compress": {**DIANA, "how": "plain"}, "privacy": PRIVACY},
            "compress.masks: is one; with federation.secure allowed: own",
        ),
        ({"federation": {"spare": 1}}, "federation.spare: is 1; with"),
        ({"federation": {"longest_update": 1.0}}, "federation.longest_update"),
        ({"run": {"cohort": 2}}, "run.cohort: is 2; with federation.secure allowed: 3"),
        (
            {
                "data": {"clients": 9},
                "run": {"cohort": 5},
                "privacy": PRIVACY,
            },
            "run.cohort: is 5; with federation.secure allowed: all nodes",
        ),
    ],
)
def test_what_is_not_a_sum_of_all_is_refused_in_one_line(change, line, rows):
    content = toml.parse(secure(federated(method("fedavg", rows, 1))), "test")
    for table, keys in change.items():
        content[table] = {**content.get(table, {}), **keys}
    with pytest.raises(ConfigError) as error:
        check(content, "test")
    assert line in str(error.value) and "\n" not in str(error.value)
    content["federation"]["secure"] = False
    check(content, "test")

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Raw tables on nodes: statistics travel, rows do not, and the models are the same."""

import json

import numpy as np
import pytest
from configured import experiment, few

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.data.readers.read import read
from fedblend.errors import ConfigError, RunError
from fedblend.runs import run_folder
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend_federation import message as messages
from fedblend_federation.client.node import node_of
from fedblend_federation.client.predict import predict_rows
from fedblend_federation.contract import parse_contract
from fedblend_federation.message import UNKNOWN, Message
from fedblend_federation.ops.settings import NodeSettings, load_as
from fedblend_federation.policy.admit import agree
from fedblend_federation.policy.limits import too_few_values
from fedblend_federation.policy.policy import Policy
from fedblend_federation.raw_tables import (
    data_of_nodes,
    raw_of,
    schema_of,
    statistics_in,
)
from fedblend_federation.server.run import run_server
from loopback import LoopbackTransport

ENDS = ("died", "recovered")
CLIENTS, ROWS = 3, (40, 25, 33)
COLUMNS = ("row_id", "age", "ward", "admitted", "smoker", "outcome")
OPEN = '[accept]\nalgorithms = "any"\ndiscloses = ["statistics"]\n'
POLICY = few(f"{OPEN}[metrics]\nround_to = 12\n")
HOW = """
kind = "binary"
labels = ["died", "recovered"]
test = 0.25
"""
METHOD = """
[model]
name = "softmax"
[algorithm]
name = "apfl"
rate = 0.3
steps = 3
batch_size = 8
alpha = 0.5
[run]
rounds = 2
[measure]
local = false
"""


def lines(client: int) -> list[str]:
    """The rows of one client, with empty cells, an own category and typing errors."""
    draw, found = np.random.default_rng(client), []
    for row in range(ROWS[client]):
        age = 1e6 + 10 * client + draw.normal(0, 5)
        typed = 9e9 if (client, row) in ((0, 3), (1, 5)) else age
        cells = (
            f"{client}-{row}",
            "" if draw.random() < 0.2 else f"{typed:.4f}",
            ("A", "B", f"own {client}", "")[draw.integers(4)],
            f"2023-{draw.integers(1, 13):02}-{draw.integers(1, 28):02}",
            ("yes", "no")[draw.integers(2)],
            "recovered" if draw.normal(age - 1e6 - 10, 3) > 0 else "died",
        )
        found.append(",".join(cells))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder, every = tmp_path_factory.mktemp("tables"), []
    for client in range(CLIENTS):
        text = "\n".join([",".join(COLUMNS), *lines(client)])
        (folder / f"node{client}.csv").write_text(f"{text}\n")
        every += [f"{line},{client}" for line in lines(client)]
    text = "\n".join([",".join((*COLUMNS, "client")), *every])
    (folder / "all.csv").write_text(f"{text}\n")
    return folder


@pytest.fixture(scope="module")
def raw(place) -> list:
    """``data.raw``, from the table that nobody has in a real federation."""
    dataset = read(place / "all.csv", target="outcome", client="client")
    assert dataset.schema is not None
    return raw_of(dataset.schema)


def federated(raw) -> str:
    columns = toml.literal(raw)
    start = f'version = 1\nname = "t"\n[data]\npartition = "nodes"\nclients = {CLIENTS}'
    return f"{start}{HOW}raw = {columns}\n{METHOD}"


def simulated(place) -> str:
    start = f'version = 1\nname = "t"\n[data]\nfile = "{place / "all.csv"}"\n'
    rows = 'target = "outcome"\nclient = "client"\npartition = "by_key"\n'
    return f'{start}{rows}kind = "binary"\ntest = 0.25\n{METHOD}'


def node_settings(place, folder, client, policy=POLICY) -> NodeSettings:
    home = folder / f"node{client}"
    home.mkdir(parents=True)
    (home / "policy.toml").write_text(policy)
    path = home / "node.toml"
    path.write_text(
        f"""version = 1
client = {client}
server = "localhost:443"
ca = "ca.crt"
key = "key"
folder = "state"
policy = "policy.toml"
[data]
file = "{place / f"node{client}.csv"}"
target = "outcome"
"""
    )
    return load_as(NodeSettings, path)


def describe(node, text: str, experiment: str = "e" * 16) -> Message:
    request = Message("describe", experiment, UNKNOWN, fields={"config": text})
    return messages.decode(node.reply(messages.encode(request)))


@pytest.mark.parametrize("model", ["softmax", "tabular"])
def test_nodes_find_the_preprocessing_and_the_model_of_a_simulation(
    place, raw, tmp_path, model
):
    text = simulated(place).replace("softmax", model)
    config = check(toml.parse(text, "test"), "test")
    there = run_config(config, tmp_path / "simulated")
    settings = [node_settings(place, tmp_path, client) for client in range(CLIENTS)]
    nodes = {client: node_of(one) for client, one in enumerate(settings)}
    text = federated(raw).replace("softmax", model)
    run = experiment(tmp_path / "run", text)
    here = run_server(run, LoopbackTransport(nodes), poll=0.0)
    mine, other = (
        run_folder.read_preprocessing(Folder(path), 0)
        for path in (run, tmp_path / "simulated")
    )
    assert mine is not None and other is not None
    assert mine.fitted == other.fitted
    age = mine.fitted[mine.columns.index("age")]
    assert abs(age.mean - 1e6) < 30 and age.deviation < 60  # in spite of 9e9
    one, two = (of["runs"][0]["measures"]["test"] for of in (here, there))
    for model in ("personal", "shared"):
        # Nodes train alone in their own process: sums in another order.
        assert one[model]["loss"]["mean"] == pytest.approx(
            two[model]["loss"]["mean"], rel=1e-5
        )
    found = predict_rows(settings[1].client_settings()[1], place / "node1.csv")
    assert set(found.values) <= {"died", "recovered"} and len(found.values) == ROWS[1]


def test_a_private_federation_with_raw_tables_says_that_it_has_no_guarantee(
    place, raw, tmp_path
):
    settings = [node_settings(place, tmp_path, client) for client in range(CLIENTS)]
    nodes = {client: node_of(one) for client, one in enumerate(settings)}
    text = f"{federated(raw)}[privacy]\nclip = 0.5\nnoise = 9.0\ndelta = 1e-3\n"
    run = experiment(tmp_path / "run", text)
    found = run_server(run, LoopbackTransport(nodes), poll=0.0)["privacy"]
    assert found["epsilon"] is None
    reason = "the inputs are standardized by means of the clients' rows"
    assert found["sentence"].startswith(f"no guarantee: {reason}")


@pytest.mark.slow
def test_nodes_train_a_regression_in_the_unit_of_a_simulation(place, tmp_path):
    """Ages near a million: without the unit the first step diverges."""
    text = (place / "all.csv").read_text().replace("9000000000.0000", "")
    (tmp_path / "all.csv").write_text(text)
    for client in range(CLIENTS):
        own = (place / f"node{client}.csv").read_text()
        own = own.replace("9000000000.0000", "")
        (tmp_path / f"node{client}.csv").write_text(own)
    start = simulated(tmp_path).replace('"outcome"', '"age"')
    start = start.replace('"binary"', '"regression"')
    config = check(toml.parse(start, "test"), "test")
    there = run_config(config, tmp_path / "simulated")
    dataset = read(tmp_path / "all.csv", target="age", client="client")
    stated = (
        f'version = 1\nname = "t"\n{data_of_nodes(dataset, CLIENTS)}\ntest = 0.25\n'
    )
    run = experiment(tmp_path / "run", f"{stated}{METHOD}")
    nodes = {}
    for client in range(CLIENTS):
        node_settings(tmp_path, tmp_path / "homes", client)
        path = tmp_path / "homes" / f"node{client}" / "node.toml"
        path.write_text(path.read_text().replace('"outcome"', '"age"'))
        nodes[client] = node_of(load_as(NodeSettings, path))
    here = run_server(run, LoopbackTransport(nodes), poll=0.0)
    one, two = (of["runs"][0]["measures"]["test"] for of in (here, there))
    for model in ("personal", "shared"):
        mine = one[model]["loss"]["mean"]
        assert mine == pytest.approx(two[model]["loss"]["mean"], rel=1e-3)
        assert mine < 200  # half a squared deviation of up to 20


def test_without_permission_nothing_is_told(place, raw, tmp_path):
    closed = POLICY.replace('"statistics", ', "")
    node = node_of(node_settings(place, tmp_path, 0, closed))
    told = describe(node, federated(raw))
    assert told.kind == "refused"
    assert "accept.discloses" in told.fields["reason"]


def test_statistics_of_other_parts_of_the_rows_are_refused(place, raw, tmp_path):
    """The difference of two means over n and n - 1 rows would be a row."""
    policy = POLICY.replace('changes = ["split"]', "changes = []")
    node = node_of(node_settings(place, tmp_path, 0, policy))
    assert describe(node, federated(raw)).kind == "describe"
    for other in ("test = 0.27", "test = 0.25\nseed = 1"):
        text = federated(raw).replace("test = 0.25", other)
        told = describe(node, text, "f" * 16)
        assert told.kind == "refused" and "rows.changes" in told.fields["reason"]
        assert "statistics" not in told.fields


def test_other_categories_are_other_statistics(place, raw, tmp_path):
    """Categories of one's choice would count any value of any row."""
    node = node_of(node_settings(place, tmp_path, 0))
    assert describe(node, federated(raw)).kind == "describe"
    curious = json.loads(json.dumps(raw))
    ward = next(one for one in curious if one["name"] == "ward")
    ward["categories"] = ["own 0", "own 1"]
    told = describe(node, federated(curious), "f" * 16)
    assert told.kind == "refused"
    assert "own" not in str(told.fields)


def test_a_first_experiment_on_numbers_leaves_no_choice_of_categories(raw, tmp_path):
    """After it, every request for means could have had categories of its own."""
    (tmp_path / "node0.csv").write_text(
        "age,ward,outcome\n"
        + "".join(f"{n},{n % 3},{ENDS[n % 2]}\n" for n in range(40))
    )
    node = node_of(node_settings(tmp_path, tmp_path / "home", 0))
    ages = {"name": "age", "encoding": "standardize"}
    wards = {"name": "ward", "encoding": "one_hot", "categories": ["0", "1"]}
    wards["other"] = True
    numbers = federated([ages]).replace(
        f"raw = {toml.literal([ages])}", 'columns = ["age", "ward"]'
    )
    told = describe(node, numbers)
    assert told.kind == "describe" and "statistics" not in told.fields
    contract = parse_contract(numbers)
    agree(tmp_path / "home" / "node0" / "state", contract)
    assert describe(node, federated([ages, wards])).kind == "describe"
    assert describe(node, numbers).kind == "describe"
    other = wards | {"categories": ["0", "2"]}
    assert describe(node, federated([ages, other]), "f" * 16).kind == "refused"


def test_means_of_rows_that_changed_stay_on_the_node(raw, tmp_path):
    """The difference of the means of n and n + 1 rows was the new row."""
    text = "\n".join([",".join(COLUMNS), *lines(0)])
    (tmp_path / "node0.csv").write_text(f"{text}\n")
    settings = node_settings(tmp_path, tmp_path / "home", 0)
    node = node_of(settings)
    for _ in range(2):
        assert describe(node, federated(raw)).kind == "describe"
    (tmp_path / "node0.csv").write_text(f"{text}\n{lines(1)[0]}\n")
    told = describe(node, federated(raw), "f" * 16)
    assert told.kind == "refused" and "rows.changes" in told.fields["reason"]
    settings.policy.write_text(few(OPEN + '[rows]\nchanges = ["rows", "split"]\n'))
    assert describe(node, federated(raw), "f" * 16).kind == "describe"
    audit = (settings.folder / "audit.jsonl").read_text()
    assert audit.count('"statistics"') == 3


def test_a_mean_of_one_value_is_not_sent(tmp_path):
    cells = ["70000", *[""] * 39]
    (tmp_path / "node0.csv").write_text(
        "income,outcome\n"
        + "".join(f"{cell},{ENDS[n % 2]}\n" for n, cell in enumerate(cells))
    )
    policy = few(f"{OPEN}min_batch_rows = 4\n")
    text = federated([{"name": "income", "encoding": "standardize"}])
    text = text.replace("test = 0.25", "test = 0.0")
    node = node_of(node_settings(tmp_path, tmp_path / "home", 0, policy))
    told = describe(node, text)
    assert told.kind == "refused" and "70000" not in str(told.fields)
    assert "accept.min_batch_rows: rows with a value" in told.fields["reason"]


@pytest.mark.parametrize("lie", ["nan", "short", "share", "missing"])
def test_statistics_that_cannot_be_are_denied(lie, place, raw, tmp_path):
    nodes = {
        client: node_of(node_settings(place, tmp_path, client))
        for client in range(CLIENTS)
    }
    transport = LoopbackTransport(nodes)

    def spoil(address, data):
        reply = messages.decode(data)
        if address == 0 and reply.kind == "describe":
            told = reply.fields["statistics"]
            if lie == "nan":
                told["mean"][0] = 1e300
            elif lie == "short":
                told["mean"] = told["mean"][:-1]
            elif lie == "share":
                told["present"][0] = 1.5
            else:
                del told["variance"]
            data = messages.encode(reply)
        return [data]

    transport.spoil = spoil
    text = federated(raw) + "[federation]\ndeadline = 0.3\n"
    run = experiment(tmp_path / "run", text)
    with pytest.raises(RunError, match="no usable statistics"):
        run_server(run, transport, poll=0.0)


def test_a_preprocessing_of_other_columns_is_refused(raw):
    schema = schema_of(check(toml.parse(federated(raw), "t"), "t").data)  # type: ignore
    assert schema is not None
    assert statistics_in(schema, None, 5) is None
    from fedblend_federation.raw_tables import preprocessing_in

    for text in (None, "{}", 5):
        with pytest.raises((ConfigError, ValueError)):
            preprocessing_in(schema, {"preprocessing": text})


def test_quantiles_of_few_rows_stay_on_the_node():
    accept = Policy().accept
    assert too_few_values(accept, [1.0], 40) is None
    assert too_few_values(accept, [1.0], 40, ranks=True) is not None
    assert too_few_values(accept, [1.0, 0.0], 100, ranks=True) is None


def test_a_column_that_stands_twice_is_one_line():
    columns = [{"name": "a", "encoding": "flag"}] * 2
    with pytest.raises(ConfigError, match=r"data\.raw.*differ in their names"):
        check(toml.parse(federated(columns), "test"), "test")


@pytest.mark.parametrize(
    ("column", "line"),
    [
        ({"name": "a", "encoding": "one_hot"}, "categories"),
        ({"name": "a", "encoding": "date", "categories": ["x", "y"]}, "categories"),
        ({"name": "a", "encoding": "flag", "parts": ["year"]}, "parts"),
        ({"name": "a", "encoding": "guess"}, "encoding"),
    ],
)
def test_a_column_that_cannot_be_is_one_line(column, line):
    with pytest.raises(ConfigError, match=line):
        check(toml.parse(federated([column]), "test"), "test")

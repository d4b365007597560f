# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor on rows, on services, and as a user who may not look."""

import os
import shutil
import socket
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from edits import edit, told

from fedblend.errors import RunError
from fedblend_federation import worker
from fedblend_federation.ops import doctor, registration
from fedblend_federation.ops.doctor import examine
from fedblend_federation.ops.settings import NodeSettings, ServerSettings, load_as

NOBODY = 65534
ROWS = "age,dose,ill\n" + "30,0.5,no\n40,0.7,yes\n" * 15


@pytest.fixture
def home(own, monkeypatch) -> Path:
    """A node with rows, of which only the network is not looked at."""
    monkeypatch.setattr(doctor, "public_findings", lambda address, ca: [])
    home = own / "nodes/bob"
    (home / "rows.csv").write_text(ROWS)
    (home / "rows.csv").chmod(0o600)
    edit(home / "node.toml", '# target = "label"', 'target = "ill"')
    return home


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", None),
        ("ill\n", "sick\n", "there is no column 'ill'; there are age, dose, sick"),
        ("30,", "thirty,", "column 'age' is not numeric: row 0"),
        (",no\n", ",\n", "column 'ill' is empty in row 0"),
    ],
)
def test_target_and_columns_of_the_rows(home, no_services, old, new, said):
    (home / "rows.csv").write_text(ROWS.replace(old, new, 1))
    found = examine(home)
    if said is None:
        assert found == []
        return
    (finding,) = found
    assert (finding.fault, finding.what) == (True, "rows cannot be used")
    assert finding.value.startswith(said)


def test_rows_without_a_target_or_too_few(home, no_services):
    (home / "rows.csv").write_text(ROWS[:55])
    (finding,) = examine(home)
    assert (finding.fault, finding.value) == (False, "4, accept.fewest_rows is 20")
    edit(home / "node.toml", 'target = "ill"', "")
    (finding,) = examine(home)
    assert finding.value == "target: name one of the columns age, dose, ill"


def test_columns_that_the_policy_names(home, no_services):
    (home / "rows.csv").write_text(ROWS.replace("dose", "name").replace("0.5", "x"))
    policy = home / "policy.toml"
    (finding,) = examine(home)
    assert finding.fault and "column 'name' is not numeric" in finding.value
    edit(policy, 'columns = "file"', 'columns = ["age"]')
    assert examine(home) == []
    edit(policy, 'columns = ["age"]', 'columns = ["age", "dose"]')
    (finding,) = examine(home)
    assert finding.fault and "there is no column 'dose'" in finding.value
    edit(policy, 'columns = ["age", "dose"]', 'columns = "any"')
    (finding,) = examine(home)
    assert not finding.fault


def test_the_worker(home):
    settings = load_as(NodeSettings, home / "node.toml")
    (finding,) = examine(home)
    assert (finding.what, finding.fault) == ("the worker does not answer", False)
    asked, ready = [], threading.Event()
    handler = worker.Handler(lambda data: asked.append(data) or b"x")
    threading.Thread(
        target=worker.serve,
        args=(settings.worker_socket, lambda: handler),
        kwargs={"ready": ready.set},
        daemon=True,
    ).start()
    assert ready.wait(10)
    assert examine(home) == []
    assert asked == []  # no message, and no line in the audit


def test_a_worker_that_died_or_computes(home, monkeypatch):
    settings = load_as(NodeSettings, home / "node.toml")
    with socket.socket(socket.AF_UNIX) as left:
        with worker._short(settings.worker_socket) as name:
            left.bind(name)
        settings.worker_socket.chmod(0o600)
        (finding,) = examine(home)
        assert finding.value == "Connection refused"
        left.listen()
        monkeypatch.setattr(doctor, "WORKER_ANSWERS", 0.1)
        (finding,) = examine(home)
        assert (finding.fault, finding.value) == (False, "timed out")
        assert finding.advice.startswith("unless it computes, start it")


def test_a_node_of_one_process_has_no_worker(home):
    (home / "state/carrier.lock").touch()
    (home / "flower").mkdir(mode=0o700)
    assert examine(home) == []


@pytest.fixture
def link(own, monkeypatch) -> ServerSettings:
    """A link that is up, has its guard, and knows alice and bob."""
    for name in ("public_findings", "link_findings"):
        monkeypatch.setattr(doctor, name, lambda *of: [])
    monkeypatch.setattr(doctor, "is_up", lambda settings: True)
    monkeypatch.setattr(doctor, "is_open", lambda link, ca: False)
    ids = iter(["1", "2"])
    stub = SimpleNamespace(
        register=lambda key, name: next(ids),
        unregister=lambda id: None,
        statuses=lambda: {"1": "online", "2": "online"},
    )
    monkeypatch.setattr(registration, "connect", lambda settings: nullcontext(stub))
    settings = load_as(ServerSettings, own / "server/server.toml")
    registration.register(settings)
    return settings


def test_keys_that_the_link_does_not_know(link, own, monkeypatch):
    assert examine(own / "server") == []
    shutil.copy(own / "server/nodes/alice.pub", own / "server/nodes/bob.pub")
    (finding,) = examine(own / "server")
    assert (finding.fault, finding.what) == (True, "the link does not know bob")
    (own / "server/state/members.json").unlink()
    said = told(examine(own / "server"))
    assert [line.partition(":")[0][-5:] for line in said] == ["alice", "w bob"]

    def refused(settings):
        raise RunError("link 127.0.0.1:8000: HTTP 403: Permission denied")

    monkeypatch.setattr(registration, "connect", refused)
    (finding,) = examine(own / "server")
    assert (finding.fault, finding.what) == (
        False,
        "the link was not asked for its keys",
    )


@pytest.fixture
def stranger(home, monkeypatch):
    """The folder of a node, and a user to whom most of it is closed."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o711)
    node = shutil.copytree(home, place / "node")
    node.chmod(0o711)
    for name in ("node.toml", "ca.crt", "fedblend-node.service"):
        (node / name).chmod(0o644)
    for name in ("node.key", "policy.toml", "rows.csv", "worker"):
        (node / name).chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield node
    os.seteuid(user)
    (node / "worker").chmod(0o700)
    shutil.rmtree(place)


def test_what_this_user_may_not_look_at_is_a_warning(stranger):
    found = examine(stranger / "node.toml")
    assert [one for one in found if one.fault] == []
    closed = [one for one in found if one.what == "could not be looked at"]
    names = [Path(one.where).relative_to(stranger).as_posix() for one in closed]
    closed_files = ["node.key", "policy.toml", "rows.csv"]
    assert sorted(names) == [*closed_files, "secure.key", "worker/socket"]
    assert all(one.advice.endswith("or root") for one in closed)
    assert all(" as " in one.advice and " may not" in one.value for one in closed)


def test_a_folder_that_this_user_may_not_enter_is_one_line(stranger):
    with pytest.raises(RunError, match="Permission denied; run the doctor as"):
        examine(stranger / "worker" / "other")

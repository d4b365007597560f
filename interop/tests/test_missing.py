# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Without the distribution: one line with the command that installs it."""

import sys

import pytest

import fedblend as fb
from fedblend.cli import main
from fedblend.errors import InputError
from fedblend.runs import results


@pytest.fixture
def missing(monkeypatch):
    """As if fedblend-interop were not installed."""
    for name in [*sys.modules, "fedblend_interop"]:
        if name.split(".")[0] == "fedblend_interop":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(vars(fb), "trackers", raising=False)


def test_trackers_name_their_extra(missing):
    line = "^fb.trackers: needs fedblend-interop: pip install 'fedblend.trackers.'$"
    with pytest.raises(InputError, match=line):
        fb.trackers.tensorboard  # noqa: B018
    assert "trackers" not in fb.__all__, "import * would fail"


def test_commands_name_their_extra(missing, write, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "draw", lambda *arguments: None)
    out = tmp_path / "run"
    assert main(["run", str(write(tiny)), "--out", str(out)]) == 0
    capsys.readouterr()
    for command, line in (
        (
            ["track", str(out), "--to", "tensorboard"],
            "error: trackers: needs fedblend-interop: pip install 'fedblend[trackers]'",
        ),
    ):
        assert main(command) == 2
        assert capsys.readouterr().err.strip() == line

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""systemd itself reads the units that ``init`` writes, and has nothing to say."""

import shutil
import subprocess

import pytest

from fedblend_federation.ops.credentials import PROGRAM

ANALYZE = shutil.which("systemd-analyze")
pytestmark = pytest.mark.skipif(ANALYZE is None, reason="systemd is not here")


def verified(text: str, place) -> str:
    """What systemd says of a unit whose program is one that is installed."""
    place.write_text(text.replace(str(PROGRAM), str(shutil.which("true"))))
    return subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(place)],
        capture_output=True,
        text=True,
    ).stderr


def test_systemd_understands_every_unit(lab, tmp_path):
    units = sorted(lab.rglob("*.service"))
    assert {unit.parent.name for unit in units} == {"server", "alice", "bob"}
    for unit in units:
        assert verified(unit.read_text(), tmp_path / unit.name) == ""


def test_systemd_reports_what_it_does_not_understand(lab, tmp_path):
    (unit,) = (lab / "server").glob("*.service")
    spoilt = unit.read_text().replace("Restart=always", "Restart=evermore")
    assert "evermore" in verified(spoilt, tmp_path / unit.name)


@pytest.mark.parametrize("limit", ["MemoryMax", "CPUQuota", "TasksMax"])
def test_every_unit_has_limits(lab, limit):
    for unit in lab.rglob("*.service"):
        assert unit.read_text().count(f"\n{limit}=") == 1, unit

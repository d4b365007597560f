# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor on the network: a stand-in for every fault."""

import socket
import time
from email.utils import formatdate

import pytest
from edits import at_port, certify, only, told
from http_stub import serving

from fedblend_federation.flower import processes as clock
from fedblend_federation.ops import probes
from fedblend_federation.ops.doctor import examine
from fedblend_federation.ops.settings import Address

pytestmark = pytest.mark.usefixtures("no_services")


def fleet_only(method: str, path: str) -> int:
    return 415 if path.startswith("/v1/fleet/") and method == "POST" else 403


def test_a_healthy_federation(own):
    with serving(fleet_only, own / "server") as port:
        file = at_port(own, port)
        assert examine(file) == []
        (finding,) = examine(own / "nodes/bob")
    assert str(finding) == (
        f"warning: {own}/nodes/bob/rows.csv: rows are missing: no such file; put the "
        "node's rows there, or name them in [data]"
    )


@pytest.mark.parametrize("status", [200, 401, 405, 415, 500, 502])
@pytest.mark.parametrize(("method", "path"), probes._ROUTES)
def test_open_routes(own, status, method, path):
    def answer(*asked: str) -> int:
        return status if asked == (method, path) else 403

    with serving(answer, own / "server") as port:
        finding = only(at_port(own, port))
    assert finding.fault
    assert finding.where == f"https://127.0.0.1:{port}{path}"
    assert finding.value == f"{method} answers {status}"


def test_a_node_sees_open_routes_too(own):
    with serving(lambda *asked: 200, own / "server") as port:
        at_port(own, port)
        faults = [one for one in examine(own / "nodes/bob/node.toml") if one.fault]
    assert len(faults) == len(probes._ROUTES)


def test_plain_http(own):
    with serving(lambda *asked: 200) as port:
        finding = only(at_port(own, port))
    assert finding.fault
    assert (finding.what, finding.value) == ("speaks plain HTTP", "GET answers 200")


def test_no_http_at_all(own):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = only(at_port(own, port))
    assert not finding.fault
    assert (finding.what, finding.value) == ("cannot be reached", "Connection refused")


def test_the_link_where_the_public_comes_in():
    with serving(lambda *asked: 200, host="127.0.0.2") as port:
        link, public = Address("127.0.0.1", port), Address("127.0.0.2", 443)
        (finding,) = probes.link_findings(public, link)
        assert finding.where == f"127.0.0.2:{port}"
        assert list(probes.link_findings(Address("127.0.0.1", 443), link)) == []
        assert list(probes.link_findings(Address("127.0.0.3", 443), link)) == []


@pytest.mark.parametrize(
    ("days", "said"),
    [
        (0, "certificate is not accepted: certificate has expired"),
        (20, "certificate expires soon: "),
    ],
)
def test_the_term_of_a_certificate_as_a_node_sees_it(own, days, said):
    certify(own, days=days)
    with serving(fleet_only, own / "server") as port:
        at_port(own, port)
        assert told(examine(own / "nodes/bob/node.toml"))[1].startswith(said)


@pytest.mark.parametrize(
    ("ahead", "value"),
    [(260, "260 s ahead of"), (-320, "320 s behind"), (-100, None), (0, None)],
)
def test_clocks_that_differ(own, monkeypatch, ahead, value):
    now = int(time.time())
    monkeypatch.setattr(clock.time, "time", lambda: now + ahead)
    with serving(fleet_only, own / "server", date=formatdate(now, usegmt=True)) as port:
        at_port(own, port)
        faults = [one for one in examine(own / "nodes/bob/node.toml") if one.fault]
    if value is None:
        assert not faults
        return
    (finding,) = faults
    assert (finding.what, finding.where) == ("clocks differ", f"127.0.0.1:{port}")
    assert finding.value == f"this machine's clock is {value} the link's"
    assert "refuses a node more than 250 s behind or 4 s ahead" in finding.advice


def test_a_certificate_for_another_host(own):
    with serving(fleet_only, own / "server", host="127.0.0.2") as port:
        address = Address("127.0.0.2", port)
        (seen,) = probes.public_findings(address, own / "ca/ca.crt")
    assert seen.fault
    assert "IP address mismatch" in seen.value

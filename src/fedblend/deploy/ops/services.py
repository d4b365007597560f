# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What keeps a federation running: the proxy's configuration, and systemd's units."""

from pathlib import Path

from fedblend.deploy.ops.flwr_environment import environment
from fedblend.deploy.ops.settings import Address

HOME = Path("/var/lib/fedblend")
"""Where the files of a machine are expected by the units and by the proxy."""
PROGRAM = Path("/opt/fedblend/bin/fedblend")
"""Where fedblend is installed."""
USER, CARRIER = "fedblend", "fedblend-carrier"
"""Whose the rows and states are, and who runs Flower's half of a node."""


def nginx(address: Address, link: Address) -> str:
    """The proxy before the link, to be included by nginx inside its http block."""
    six = ":" in address.host
    listen = f"[::]:{address.port}" if six else f"{address.port}"
    name = f"[{address.host}]" if six else address.host
    home = HOME / "server"
    return _NGINX.format(name=name, listen=listen, link=link, home=home)


def link_unit() -> str:
    """The service that keeps the link and the server's half running."""
    return _unit(
        "fedblend: the server of a federation, on loopback behind a proxy",
        f"server {HOME}/server/server.toml",
        HOME / "server",
        "state",
        user=USER,
        more=f"ReadWritePaths={HOME}/server/runs\nPrivateDevices=true\n"
        "IPAddressDeny=any\nIPAddressAllow=localhost",
        families="AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    )


def node_unit() -> str:
    """The service of a node's Flower: it has the network, and nothing of the rows."""
    return _unit(
        "fedblend: a node of a federation, the half that has the network",
        f"node {HOME}/node/node.toml --carrier-only",
        HOME / "node",
        "carrier",
        user=CARRIER,
        more="PrivateDevices=true",
        families="AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    )


def door_unit() -> str:
    """The service of a node's rows: it has no network, only the socket."""
    return _unit(
        "fedblend: a node of a federation, the half that has the rows",
        f"door {HOME}/node/node.toml --group {CARRIER}",
        HOME / "node",
        "state",
        user=USER,
        # Accelerators are devices, so this half keeps them.
        more=f"SupplementaryGroups={CARRIER}\nReadWritePaths={HOME}/node/door\n"
        "PrivateDevices=false\nPrivateNetwork=true",
        families="AF_UNIX",
    )


def _unit(
    what: str,
    run: str,
    home: Path,
    state: str,
    *,
    user: str,
    more: str,
    families: str,
) -> str:
    variables = environment(home / state)
    # There is no home to write to: caches go where the state is.
    variables["XDG_CACHE_HOME"] = str(home / state / "cache")
    # Flower looks for its own programs by name.
    variables["PATH"] = f"{PROGRAM.parent}:/usr/bin:/bin"
    return _UNIT.format(
        what=what,
        run=f"{PROGRAM} federation {run}",
        variables="\n".join(f"Environment={k}={v}" for k, v in variables.items()),
        user=user,
        home=home,
        state=home / state,
        more=more,
        families=families,
    )


_NGINX = """\
# The only door of a federation: /v1/fleet/ for nodes, nothing else. The link behind it
# answers anyone who reaches it, also calls that start runs, so it listens on loopback.
# Include this file inside http {{ }}, as Debian's nginx does with conf.d/*.conf.
limit_req_zone $binary_remote_addr zone=fedblend_rate:10m rate=50r/s;
limit_conn_zone $binary_remote_addr zone=fedblend_open:10m;

upstream fedblend_link {{
    server {link};
    keepalive 32;
}}

server {{
    listen {listen} ssl;
    server_name {name};
    server_tokens off;

    ssl_certificate {home}/server.crt;
    ssl_certificate_key {home}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_session_tickets off;

    # Flower cuts arrays in pieces of 5 MB; a larger body is refused unread.
    client_max_body_size 64m;
    client_header_timeout 10s;
    client_body_timeout 60s;
    send_timeout 60s;
    limit_req zone=fedblend_rate burst=200 nodelay;
    limit_req_status 429;
    limit_conn fedblend_open 100;

    location / {{
        return 403;
    }}

    # The path is put together anew from one word, so that no spelling of it, with dots
    # or escapes, means one thing here and another behind.
    location ~ ^/v1/fleet/(?<call>[a-z-]+)$ {{
        limit_except POST {{ deny all; }}
        proxy_pass https://fedblend_link/v1/fleet/$call;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host localhost;
        # The link takes keys of nodes only when it speaks TLS itself.
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_ssl_trusted_certificate {home}/ca.crt;
        proxy_connect_timeout 5s;
        proxy_send_timeout 60s;
        proxy_read_timeout 60s;
        proxy_next_upstream off;
    }}
}}
"""

_UNIT = """\
[Unit]
Description={what}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={run}
User={user}
Group={user}
WorkingDirectory={home}
{variables}
# Flower's processes end with code 0 when the link forgets them.
Restart=always
RestartSec=5
TimeoutStopSec=30
KillMode=control-group
UMask=0077

NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={state}
ProtectHome=true
PrivateTmp=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectKernelLogs=true
ProtectControlGroups=true
ProtectClock=true
ProtectHostname=true
RestrictSUIDSGID=true
RestrictRealtime=true
RestrictNamespaces=true
RestrictAddressFamilies={families}
LockPersonality=true
CapabilityBoundingSet=
SystemCallArchitectures=native
# MemoryDenyWriteExecute is not here: compiled code is written and then run.
{more}

[Install]
WantedBy=multi-user.target
"""

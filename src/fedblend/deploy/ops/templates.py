# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a new federation, and what goes where."""

from collections.abc import Sequence

from fedblend.deploy.ops.services import CARRIER, HOME, PROGRAM, USER
from fedblend.deploy.ops.settings import Address


def server(address: Address, link: Address, nodes: Sequence[str]) -> str:
    """``server.toml``."""
    entries = "".join(
        f'\n[[nodes]]\nname = "{name}"\nkey = "nodes/{name}.pub"\nclient = {client}\n'
        for client, name in enumerate(nodes)
    )
    return _SERVER.format(address=address, link=link) + entries


def node(address: Address, client: int) -> str:
    """``node.toml``."""
    return _NODE.format(address=address, client=client)


def policy() -> str:
    """``policy.toml``, with its defaults."""
    return _POLICY


def readme(address: Address, nodes: Sequence[str]) -> str:
    """What goes where."""
    rows = "".join(
        f"| `nodes/{name}/` | the machine of {name} (client {client}) |\n"
        for client, name in enumerate(nodes)
    )
    return _README.format(
        address=address,
        rows=rows,
        home=HOME,
        program=PROGRAM,
        user=USER,
        carrier=CARRIER,
    )


_SERVER = """\
# The server of a federation. Check it with: fedblend federation doctor server.toml
# Paths are relative to this file.
version = 1
address = "{address}"   # what nodes reach: the proxy
link = "{link}"            # Flower's SuperLink, never to be seen from outside
certificate = "server.crt"         # of the proxy and of the link
key = "server.key"
ca = "ca.crt"
folder = "state"                   # of the server: checkpoints, records, the audit
"""

_NODE = """\
# A node of a federation. Check it with: fedblend federation doctor node.toml
# Paths are relative to this file.
version = 1
server = "{address}"
client = {client}
ca = "ca.crt"
key = "node.key"
folder = "state"          # this node's own models; they never leave it
policy = "policy.toml"    # what this node agrees to
carrier = "carrier"       # of Flower's half, which has the network and nothing else
door = "door/messages"     # the socket between the two halves

[data]
file = "rows.csv"         # this node's rows: .csv, .parquet, .npz
# target = "label"        # the column to predict; in .npz the array is called targets
# client = "who"          # a column that is not an input
"""

_POLICY = """\
# What this node agrees to. docs/policy.md explains the keys. A change counts from the
# next message on.
[accept]
# "updates": algorithms whose clients send updates of the model and nothing else. Or
# "any", or a list of names; fedblend list algorithms shows what each sends.
algorithms = "updates"
losses = "any"                  # or a list, such as ["cross_entropy"]
compress = true                 # whether answers may be compressed
select = false                  # whether to say which rows of a table its rows use
upload = false                  # whether to send gradients for a loss of the server's
constants = false               # whether to say how steep its loss is, for flix
min_rows = 20                   # to train on; each answer is made of so many
max_rounds = 1000
max_message_bytes = 100_000_000

[protect]
# clip = 1.0                    # longest answer that leaves, as an l2 norm
# noise = 1.0                   # Gaussian noise on it, in units of the clip

[metrics]
names = ["loss", "accuracy"]    # told to the server; or "any"
splits = ["test"]
minimum_count = 20              # rows below which a split is not measured for others
round_to = 3                    # decimals
"""

_README = """\
# A federation at {address}

Made by `fedblend federation init`. Carry these folders, over a channel you trust, to
`{home}` on their machines, then delete the copies of the nodes here.

| folder | goes to |
|---|---|
| `ca/` | nowhere: keep it offline. Its key makes servers that all nodes believe |
| `server/` | the server, as `{home}/server` |
{rows}
On a node its folder is called `{home}/node`.

- `*.key` are secret. `server.key` is only ever on the server, a `node.key` only on its
  node. A node may also make its own with `ssh-keygen -t ecdsa -b 384` and hand over
  `node.pub` alone, to be put in `server/nodes/` under its name.
- `ca.crt`, `server.crt` and `*.pub` are no secrets.
- `state/` holds models and rows' traces. It belongs to its machine.

On every machine, as root:

    useradd --system --user-group --home-dir {home} --shell /usr/sbin/nologin {user}
    python3 -m venv /opt/fedblend
    /opt/fedblend/bin/pip install 'fedblend[cli,flower]'
    chown -R {user}: {home}

On the server:

    install -m 644 {home}/server/nginx.conf /etc/nginx/conf.d/fedblend.conf
    nginx -t
    install -m 644 {home}/server/fedblend-link.service /etc/systemd/system/
    systemctl daemon-reload && systemctl enable --now fedblend-link
    systemctl reload nginx
    {program} federation doctor {home}/server/server.toml

Experiments are run there by `{user}`, for their folders are written by the service:

    cd {home}/server
    runuser -u {user} -- {program} federation run trial.toml --out runs/trial

A node has two services. Flower's half runs what the server hands it, so it is a user of
its own, `{carrier}`: it has `node.key` and the network, and can read neither rows
nor states. The other half has the rows, and no network. Messages go from one to the
other through a socket. After reading `policy.toml` and naming the rows in `node.toml`
(here they are `rows.csv`):

    useradd --system --user-group --home-dir {home} --shell /usr/sbin/nologin {carrier}
    usermod --append --groups {carrier} {user}
    cd {home}/node
    chmod 711 {home} . && chmod 644 node.toml ca.crt
    chown -R {carrier}: carrier node.key
    chown {user}: rows.csv && chmod 600 rows.csv
    install -m 644 fedblend-door.service fedblend-node.service /etc/systemd/system/
    systemctl daemon-reload && systemctl enable --now fedblend-door fedblend-node
    {program} federation doctor node.toml

Before the server's certificate ends: `fedblend federation renew` here, with `ca/`, then
carry `server.key` and `server.crt` over.
"""

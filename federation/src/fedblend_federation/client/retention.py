# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which experiments stay on the disk of a node, and for how long.

An experiment is over when the server stops it, measures for the last time, or has sent
nothing for some days. Before the node is enrolled in another one, experiments that are
over lose their states and replies; the model that the client deploys stays, until newer
experiments need the room.
"""

from collections.abc import Callable
from pathlib import Path

from fedblend_federation.client import state as states
from fedblend_federation.client.ledger import Account, Ledger
from fedblend_federation.client.permissions import Refusal
from fedblend_federation.client.policy import Limits, refusal_line


def make_room(
    folder: Path,
    limits: Limits,
    ledger: Ledger,
    note: Callable[..., str],
    home: Path,
) -> None:
    """End experiments that are over, and refuse one too many.

    Args:
        folder: of the client.
        limits: of its policy.
        ledger: of the client.
        note: writes to the audit.
        home: the folder of the node, whose size is limited.

    Raises:
        Refusal: there are too many experiments, or too little room on the disk.
    """
    now, found = ledger.count_age(), states.experiments(folder)
    # What is in no account is as old as the ledger.
    own = {place: ledger.accounts.get(place.name, Account()) for place in found}
    over, known = [], sorted(found, key=lambda place: own[place].age)
    for place in known:
        days = (now - own[place].age) / 86400
        if own[place].over or days > limits.idle_days:
            over.append(place)
            if states.rounds(place):
                states.end_experiment(place)
                note("ended", experiment=place.name, days=round(days, 1))
    known, over = ([p for p in some if p.exists()] for some in (known, over))
    for place in over[: max(0, len(known) + 1 - limits.experiments)]:
        states.remove_experiment(place)
        known.remove(place)
    names = {place.name for place in known}
    ledger.accounts = {n: own for n, own in ledger.accounts.items() if n in names}
    ledger.write(folder)
    if len(known) >= limits.experiments:
        most, where = f"at most {limits.experiments}", "experiments under way"
        raise Refusal(refusal_line("limits.experiments", where, len(known), most))
    used = states.bytes_of(home) / 1e9
    if used > limits.disk_gb:
        most = f"at most {limits.disk_gb:g} GB"
        raise Refusal(refusal_line("limits.disk_gb", "disk", f"{used:.2f} GB", most))

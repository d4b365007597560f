# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a node keeps on its disk for an experiment, and for how long.

Terms, states and replies are files with a checksum, written whole or not at all. An
experiment is over when the server stops it, measures for the last time, or has sent
nothing for some days. Before the node is enrolled in another one, experiments that are
over lose their states and replies; the model that the client deploys stays, until newer
experiments need the room.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.data.federated import Shards
from fedblend.simulation.serialize import (
    DAMAGE,
    WireError,
    build_tree,
    pack,
    unpack,
    write_atomically,
)
from fedblend_federation.client.ledger import Account, Ledger
from fedblend_federation.ops.audit import hash_json
from fedblend_federation.policy.policy import Limits, Refusal, refusal_line

MODEL = "personal.safetensors"
"""The model that the client deploys."""
SECRET_BYTES = 32
EXPERIMENTS, IDLE_DAYS = 20, 30.0
"""Experiments on the disk, and days without a message after which one is over."""
STATES = 3
"""Kept on disk: the one to start from, the newest, and one before, in case the server
itself goes back to its last checkpoint but one."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process of this node handles a message."""
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_terms(place: Path, terms: Mapping[str, Any], request: str = "") -> None:
    """Write the terms of an experiment as JSON that the operator can read.

    ``request`` is the digest of the message they came in, with the first parameters.
    """
    content = {"terms": dict(terms), "request": request}
    content["sha256"] = hash_json(content)
    write_atomically(place / "terms.json", json.dumps(content).encode())


def read_terms(place: Path) -> dict[str, Any]:
    """The terms of an experiment.

    Raises:
        FileNotFoundError: there are none.
        WireError: the file is not what was written.
    """
    return dict(_enrollment(place)["terms"])


def enrollment_digest(place: Path) -> str:
    """The digest of the message by which a node was enrolled; raises as above."""
    return str(_enrollment(place)["request"])


def _enrollment(place: Path) -> dict[str, Any]:
    data = (place / "terms.json").read_bytes()
    try:
        content = dict(json.loads(data.decode()))
        whole = content.pop("sha256") == hash_json(content)
    except DAMAGE:
        whole, content = False, {}
    if not whole:
        raise WireError("terms: the file is damaged on the disk of this node")
    return content


def fingerprint(splits: Mapping[str, Shards]) -> str:
    """A hash of a node's rows, and of which of them are held out."""
    found = hashlib.sha256()
    for name, split in sorted(splits.items()):
        for leaf in jax.tree.leaves(split.rows(0)):
            array = np.ascontiguousarray(leaf)
            found.update(f"{name} {array.dtype} {array.shape} ".encode())
            found.update(array.tobytes())
    return found.hexdigest()


def write_fingerprints(place: Path, known: Sequence[str]) -> None:
    """Write the hashes of the rows that an experiment used, the newest last."""
    write_atomically(place / "rows.json", json.dumps({"sha256": list(known)}).encode())


def read_fingerprints(place: Path) -> list[str]:
    """The hashes of the rows that an experiment used; none before enrollment.

    Raises:
        WireError: the file is not what was written.
    """
    try:
        found = json.loads((place / "rows.json").read_bytes())
        return [str(one) for one in found["sha256"]]
    except FileNotFoundError:
        return []
    except DAMAGE:
        raise WireError("rows: the file is damaged on the disk of this node") from None


def write_state(place: Path, round: int, state: PyTree, request: str = "") -> None:
    """The state after a round, with the digest of the request that it came from."""
    write_atomically(place / f"state-{round}", pack(state, {"request": request}))


def is_first_request(place: Path, round: int, request: str) -> bool:
    """Whether no other request than this one can have asked for a round.

    States between two counted ones are removed. If a round before the newest one has no
    state any more, nobody knows which request it came from.
    """
    if not (place / f"state-{round}").exists():
        return all(other < round for other in rounds(place))
    return request_of(place, round) == request


def request_of(place: Path, round: int) -> str:
    """The digest of the request that a state came from; empty where there is none."""
    try:
        _, metadata = unpack((place / f"state-{round}").read_bytes())
    except FileNotFoundError:
        return ""
    return metadata.get("request", "")


class Record(NamedTuple):
    """One file: words about some bytes, and the bytes."""

    about: dict[str, Any]
    data: bytes


def write_record(place: Path, name: str, about: dict[str, Any], data: bytes) -> None:
    """Write a file, whole or not at all."""
    content = pack(np.frombuffer(data, np.uint8), {"about": json.dumps(about)})
    write_atomically(place / name, content)


def read_record(place: Path, name: str) -> Record | None:
    """A file; None where there is none.

    Raises:
        WireError: it is not what was written.
    """
    try:
        arrays, metadata = unpack((place / name).read_bytes())
        return Record(json.loads(metadata["about"]), arrays["value"].tobytes())
    except FileNotFoundError:
        return None
    except (ValueError, LookupError) as error:
        raise WireError(f"{name}: the file is damaged ({error})") from None


def write_reply(
    place: Path, round: int | str, request: str, protection: str, reply: bytes
) -> None:
    """The reply of a round, or to the newest request of "measures".

    Beside it are the digest of its request and the protection.
    """
    about = {"request": request, "protection": protection}
    write_record(place, f"reply-{round}", about, reply)


def read_reply(
    place: Path, round: int | str, request: str, protection: str
) -> bytes | None:
    """The reply to that request under that protection; None if it is not there, whole.

    The state that belongs to the reply of a round must be the one on disk.
    """
    about = {"request": request, "protection": protection}
    try:
        record = read_record(place, f"reply-{round}")
        known = isinstance(round, str) or request_of(place, round) == request
    except WireError:
        return None
    return record.data if known and record and record.about == about else None


def read_state(place: Path, round: int, template: PyTree) -> PyTree:
    """The state after a round.

    Raises:
        WireError: there is none, or it is not what was written.
    """
    try:
        arrays, _ = unpack((place / f"state-{round}").read_bytes())
        return build_tree(arrays, template)
    except FileNotFoundError:
        raise WireError(
            f"state: that of round {round} is asked for, this node has {rounds(place)}"
        ) from None
    except WireError as error:
        raise WireError(f"state: that of round {round}: {error}") from None


def hash_of_state(place: Path, round: int) -> str:
    """A hash of the state after a round; empty where there is none."""
    path = place / f"state-{round}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def rounds(place: Path, kind: str = "state") -> list[int]:
    """The rounds of which there is a file of a kind, in order."""
    names = [re.fullmatch(rf"{kind}-(-?\d+)", one.name) for one in os.scandir(place)]
    return sorted(int(name[1]) for name in names if name)


def remove_old(place: Path, base: int, newest: int) -> None:
    """Remove the states and replies that no request can need any more.

    The states of ``base`` and ``newest`` stay, the newest of those before, and all that
    are newer: a request that comes late must not undo later rounds.
    """
    known = rounds(place)
    before = [r for r in known if r < base][: -(STATES - 2)]
    between = [r for r in known if base < r < newest]
    for round in before + between:
        for kind in ("state", "reply"):
            (place / f"{kind}-{round}").unlink(missing_ok=True)


def experiments(folder: Path) -> list[Path]:
    """The folders of experiments that a node was enrolled in, or had begun to be."""
    known = (*folder.glob("*/terms.json"), *folder.glob("*/params"))
    return sorted({path.parent for path in known})


def bytes_of(folder: Path) -> int:
    """The size of all files in a folder and in those in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def end_experiment(place: Path) -> None:
    """Remove states and replies of an experiment that is over; its model stays.

    Where it left no model that the client deploys, nothing stays.
    """
    if not (place / MODEL).exists():
        shutil.rmtree(place)
        return
    for path in place.iterdir():
        if path.name not in (MODEL, "terms.json", "measures.json"):
            path.unlink()


def remove_experiment(place: Path) -> None:
    """Remove all that an experiment left."""
    shutil.rmtree(place, ignore_errors=True)


def read_secret(folder: Path, name: str = "batches.key") -> bytes:
    """A secret of a node, such as that of its batches; it is drawn on first use.

    Raises:
        WireError: it is not what was written: whoever knows that a file is empty, or
            cut off, would know all that is drawn from it.
    """
    path = folder / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = add_checksum(secrets.token_bytes(SECRET_BYTES))
        write_atomically(path, data)
    secret = data[:SECRET_BYTES]
    if len(secret) < SECRET_BYTES or data != add_checksum(secret):
        damaged = "the file is damaged on the disk of this node"
        raise WireError(f"{name}: {damaged}; restore it from a copy")
    return secret


def add_checksum(secret: bytes) -> bytes:
    """What the file of a secret has."""
    return secret + hashlib.sha256(secret).digest()


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
    now, found = ledger.count_age(), experiments(folder)
    # What is in no account is as old as the ledger.
    own = {place: ledger.accounts.get(place.name, Account()) for place in found}
    over, known = [], sorted(found, key=lambda place: own[place].age)
    for place in known:
        days = (now - own[place].age) / 86400
        if own[place].over or days > IDLE_DAYS:
            over.append(place)
            if rounds(place):
                end_experiment(place)
                note("ended", experiment=place.name, days=round(days, 1))
    known, over = ([p for p in some if p.exists()] for some in (known, over))
    for place in over[: max(0, len(known) + 1 - EXPERIMENTS)]:
        remove_experiment(place)
        known.remove(place)
    names = {place.name for place in known}
    ledger.accounts = {n: own for n, own in ledger.accounts.items() if n in names}
    ledger.write(folder)
    if len(known) >= EXPERIMENTS:
        most, where = f"at most {EXPERIMENTS}", "experiments under way"
        raise Refusal(refusal_line("limits", where, len(known), most))
    used = bytes_of(home) / 1e9
    if used > limits.disk_gb:
        most = f"at most {limits.disk_gb:g} GB"
        raise Refusal(refusal_line("limits.disk_gb", "disk", f"{used:.2f} GB", most))

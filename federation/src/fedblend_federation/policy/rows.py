# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What an experiment may use of a node's rows: columns, labels, the split.

The policy names the columns, or they are those of the node's table. The first
experiment that the node was enrolled in settles the labels, which rows are held out,
and by which seed: another choice would put a row on one side here and on the other side
there, and the difference of two answers would be that row.

A configuration that does not agree about the rows is refused like one that the rows do
not fit, with the same line. What the server learns by trying is one bit a try, and the
number of different tries is limited.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedblend.config.tables.data import splits_of
from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.readers.tables import FILES, input_columns
from fedblend.simulation.io.serialize import WireError, write_atomically
from fedblend_federation.client.ledger import read_ledger
from fedblend_federation.contract import Contract
from fedblend_federation.ops.settings import NodeData
from fedblend_federation.policy.limits import parts_of
from fedblend_federation.policy.policy import Rows, refusal_line

FILE = "agreement.json"
MISFITS = 20
"""Different descriptions that may fail to fit before nobody looks any more."""


def asked(contract: Contract) -> dict[str, Any]:
    """What an experiment asks of the rows; JSON."""
    task, data = contract.task, contract.nodes
    return {
        "rows": {
            "kind": task.kind,
            "outputs": task.outputs,
            "labels": sorted(task.labels),
            "columns": sorted(task.columns),
            "shape": list(task.shape),
            **_raw(contract),
        },
        "split": {
            "data.validation": data.validation,
            "data.test": data.test,
            "data.seed": data.seed,
            "data.split_seed": splits_of(data, contract.seed)[0],
        },
        "parts": parts_of(contract.config),
    }


def _raw(contract: Contract) -> dict[str, Any]:
    """The columns of a raw table: other categories would be other statistics."""
    raw = contract.nodes.raw
    return {} if raw is None else {"raw": [one.model_dump() for one in raw]}


def read_agreement(folder: Path) -> dict[str, Any] | None:
    """What the first experiment asked for; None before there was one.

    Raises:
        WireError: the file cannot be read.
    """
    try:
        found = json.loads((folder / FILE).read_bytes())
        return {key: dict(found[key]) for key in ("rows", "split", "parts")}
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise WireError(
            "agreement: the file is damaged on the disk of this node"
        ) from None


def agree(folder: Path, contract: Contract, means: str | None = None) -> None:
    """Settle what is not settled yet, when the node is enrolled in an experiment.

    Args:
        folder: of the node.
        contract: of the experiment.
        means: a hash of the statistics that the node is about to send.
    """
    first, wanted = read_agreement(folder), asked(contract)
    settled = wanted
    if first is not None:
        settled = first | {
            # A later experiment may be the first with a raw table.
            "rows": _raw(contract) | first["rows"],
            "parts": wanted["parts"] | first["parts"],
        }
    if means is not None:
        settled = settled | {"rows": settled["rows"] | {"means": means}}
    if settled != first:
        write_atomically(folder / FILE, json.dumps(settled, indent=1).encode())


def check_rows(
    policy: Rows, contract: Contract, first: dict[str, Any] | None, data: NodeData
) -> None:
    """Refuse columns and labels that were not agreed on.

    Raises:
        DataError: for the operator alone; the server gets one line for all of them.
    """
    task = contract.task
    if contract.nodes.raw is not None and data.file.suffix not in FILES:
        raise DataError(f"{data.file}: data.raw needs a table, {' or '.join(FILES)}")
    if "labels" not in policy.changes and first is not None:
        wanted, known = asked(contract)["rows"], first["rows"]
        for key in ("kind", "outputs", "labels"):
            if wanted[key] != known[key]:
                raise DataError(
                    f"policy rows.changes: {key} is {wanted[key]}; allowed: "
                    f"{known[key]}, as in the first experiment"
                )
    if policy.columns == "any" or not task.columns:
        return
    if contract.nodes.raw is not None and first is not None:
        wanted, before = asked(contract)["rows"]["raw"], first["rows"].get("raw")
        if before is not None and wanted != before:
            raise DataError(
                "policy rows.columns: data.raw is not as in the first experiment; "
                "allowed: the same columns, encodings and categories"
            )
    known = policy.columns
    if known == "file":
        if data.file.suffix not in FILES:
            return
        known = input_columns(data.file, (data.target, data.client))
    columns = tuple(one.name for one in contract.nodes.raw or ()) or task.columns
    _same("rows.columns", columns, known)


def means_refusal(policy: Rows, first: dict[str, Any] | None, means: str) -> str | None:
    """Why statistics other than those sent before stay on the node, or None.

    Between them lie rows that came or went: the difference of two exact means is that
    of these rows, however many others there are.
    """
    known = None if first is None else first["rows"].get("means")
    if known in (None, means) or "rows" in policy.changes:
        return None
    return (
        "policy rows.changes: the rows of this node changed since it sent their "
        "means; allowed: the rows of then"
    )


def split_refusal(
    policy: Rows, contract: Contract, first: dict[str, Any] | None
) -> str | None:
    """Why another split than the first one is refused, in one line, or None."""
    if "split" in policy.changes or first is None:
        return None
    wanted = asked(contract)
    known = first["split"] | first["parts"]
    for key, value in (wanted["split"] | wanted["parts"]).items():
        if key in known and known[key] != value:
            allowed = f"{known[key]}, as in the first experiment"
            return refusal_line("rows.changes", key, value, allowed)
    return None


@contextmanager
def counting_misfits(folder: Path, contract: Contract) -> Iterator[None]:
    """Remember what the rows did not fit, and refuse to look after too many tries.

    Raises:
        DataError: the rows do not fit, or nobody looked whether they do.
    """
    wanted, ledger = asked(contract)["rows"], read_ledger(folder)
    text = json.dumps(wanted, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()[:16]
    known, first = digest in ledger.misfits, read_agreement(folder)
    settled = first is not None and wanted.items() <= first["rows"].items()
    if len(ledger.misfits) >= MISFITS and not known and not settled:
        raise DataError(
            f"policy rows: {len(ledger.misfits)} descriptions of the rows did not fit; "
            f"allowed: at most {MISFITS}"
        )
    try:
        yield
    except DataError as error:
        if not known and not isinstance(error, MissingDataError):
            ledger.misfits.append(digest)
            ledger.write(folder)
        raise


def _same(key: str, wanted: tuple[str, ...], known: list[str]) -> None:
    if sorted(wanted) != sorted(known):
        shown = ", ".join(wanted)
        raise DataError(f"policy {key}: {shown}; allowed: {', '.join(known)}")

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which experiments a node takes part in, and what they may use of its rows.

The policy is read once for every message, a configuration is validated once for every
experiment, and what an experiment computes is built once. What is too large is refused
before rows are read or memory is allocated.

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
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedblend.config.tables.data import splits_of
from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.readers.tables import FILES, read_table
from fedblend.errors import ConfigError
from fedblend.simulation.serialize import DAMAGE, WireError, write_atomically
from fedblend.trees import precision
from fedblend_federation.client.build import (
    EXPERIMENTS,
    SharedBuilds,
    prepare,
    rows_of,
)
from fedblend_federation.client.executor import Executor
from fedblend_federation.client.ledger import read_ledger
from fedblend_federation.contract import Contract
from fedblend_federation.message import schema_hash
from fedblend_federation.ops.settings import ClientSettings, NodeData
from fedblend_federation.policy import limits
from fedblend_federation.policy.limits import parts_of
from fedblend_federation.policy.policy import (
    Permissions,
    Policy,
    Refusal,
    Rows,
    load_policy,
    refusal_line,
)
from fedblend_federation.secure.roster import means_of

if TYPE_CHECKING:
    from fedblend.data.federated import Shards

UNFIT = "data: the rows are not as the configuration says; this node's audit says more"
COMPUTED: Any = {
    "accept": {"discloses"},
    "rows": True,
    "protect": True,
    "metrics": {"bound"},
}
"""The keys of a policy on which what a node computes depends."""


class Admission:
    """Admits the requests of experiments that the policy of a client allows."""

    def __init__(self, settings: ClientSettings, shared: SharedBuilds | None = None):
        self.settings = settings
        self._shared = shared or SharedBuilds(settings.bases)
        self._parse = self._shared.parse
        self._accepted = lru_cache(EXPERIMENTS)(self._check_text)
        self._executor = lru_cache(EXPERIMENTS)(self._build)

    def permissions(self) -> Permissions:
        """What the policy permits now; nothing, if it cannot be read."""
        try:
            with _refusing():
                policy = load_policy(self.settings.policy)
        except Refusal as error:
            return Permissions(
                describe=partial(_raise, error),
                executor=partial(_raise, error),
                disclose=lambda measured, counts: {},
            )
        return Permissions(
            describe=partial(self._describe, policy),
            executor=partial(self._admit, policy),
            disclose=policy.disclose,
            secure=partial(self._secure, policy),
            policy=policy,
        )

    def _read_contract(self, policy: Policy, fields: Mapping[str, Any]) -> "Contract":
        """The contract of the configuration in a message, if the policy allows it."""
        text = fields.get("config")
        if not isinstance(text, str):
            raise Refusal("message: has no configuration")
        with _refusing():
            contract = self._accepted(policy.model_dump_json(), text)
        with precision(contract.config.run.precision), _refusing():
            first = read_agreement(self.settings.folder)
            _refuse(split_refusal(policy.rows, contract, first))
            self._means(policy, contract)
        return contract

    def _check_text(self, allowed: str, text: str) -> "Contract":
        """The same, as far as policy and text alone decide; checked once for both."""
        policy = Policy.model_validate_json(allowed)
        _refuse(policy.import_refusal(text))
        contract = self._parse(text)
        _refuse(policy.refusal(contract.config))
        with precision(contract.config.run.precision):
            _refuse(limits.too_large(policy.limits, contract))
            _refuse(limits.too_small(policy.accept, contract.config))
        return contract

    def _means(self, policy: Policy, contract: "Contract") -> Any:
        """What the secure sums of an experiment need; None where it has none."""
        asked = contract.config.federation
        if asked is None or not asked.secure:
            return None
        return means_of(self.settings, contract.config, policy.accept)

    def _secure(self, policy: Policy, terms: Mapping[str, Any]) -> Any:
        """What the secure sums of an experiment need; None where it has none."""
        with _refusing():
            return self._means(policy, self._parse(terms["config"]))

    def _rows(self, policy: Policy, contract: "Contract") -> "dict[str, Shards]":
        """The rows of the node, if the experiment is about what was agreed on."""
        folder, source = self.settings.folder, self.settings.data
        first = read_agreement(folder)
        with counting_misfits(folder, contract):
            check_rows(policy.rows, contract, first, source)
            return rows_of(self.settings, contract)

    def _describe(self, policy: Policy, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What the server may know of this node's rows."""
        contract = self._read_contract(policy, fields)
        config = contract.config
        with precision(config.run.precision), _refusing():
            splits = self._rows(policy, contract)
            rows = splits["train"].total
            _refuse(limits.too_small_for(policy, contract, rows))
            description: dict[str, Any] = {
                "counts": {name: split.total for name, split in splits.items()},
                "row": schema_hash(contract.row),
            }
            if contract.schema is not None:
                description["statistics"] = self._statistics(policy, contract, splits)
            own = contract.constants(splits)
        if own is not None and policy.discloses_constants:
            agree(self.settings.folder, contract)  # of one split only
            smooth, convex = float(own.smooth[0]), float(own.convex[0])
            description["constants"] = [smooth, convex, own.exact]
        return description

    def _statistics(
        self, policy: Policy, contract: "Contract", splits: "Mapping[str, Shards]"
    ) -> dict[str, list[float]]:
        """Those of the training rows; means over other rows would tell rows apart."""
        found, folder = contract.statistics(splits), self.settings.folder
        rows, present = splits["train"].total, found["present"]
        ranks = bool(found["quantiles"])
        _refuse(limits.too_few_values(policy.accept, present, rows, ranks=ranks))
        means = {name: of for name, of in found.items() if name != "quantiles"}
        means = hashlib.sha256(json.dumps(means).encode()).hexdigest()
        first = read_agreement(folder)
        _refuse(means_refusal(policy.rows, first, means))
        agree(folder, contract, means)
        return found

    def _admit(self, policy: Policy, terms: Mapping[str, Any]) -> Executor:
        """What computes an experiment under these terms, if the policy allows it."""
        contract = self._read_contract(policy, terms)
        if terms.get("constants") and not policy.discloses_constants:
            raise Refusal(
                "policy accept.discloses: this experiment began with constants of this "
                "node's loss; allowed: none"
            )
        with precision(contract.config.run.precision):
            clients = self.settings.clients
            _refuse(limits.terms_too_large(policy.limits, contract, terms, clients))
        text = json.dumps(dict(terms), sort_keys=True)
        computed = policy.model_dump_json(include=COMPUTED)
        executor = self._executor(text, computed, _stamps(self.settings.data.file))
        rows = executor.train_rows
        _refuse(limits.too_small_for(policy, contract, rows))
        with precision(contract.config.run.precision):
            room = limits.activations(contract, executor.setup.capacities)
            _refuse(limits.memory_refusal(policy.limits, room, "what layers compute"))
            agree(self.settings.folder, contract)
        return executor

    def _build(self, text: str, agreed: str, stamps: tuple) -> Executor:
        del stamps  # rows that changed are read again
        terms, policy = json.loads(text), Policy.model_validate_json(agreed)
        contract = self._parse(terms["config"])
        with precision(contract.config.run.precision), _refusing():
            splits = self._rows(policy, contract)
            setup = prepare(self.settings, policy, contract, terms, splits)
            alike = not terms.get("constants")  # those are of this client alone
            return Executor(self._shared.common(text, agreed, setup, alike))


def _stamps(file: Path) -> tuple[tuple[int, int, int], ...]:
    """What tells that a file, or one in a folder, was written again."""
    files = sorted(file.iterdir()) if file.is_dir() else [file] if file.exists() else []
    found = [one.stat() for one in files]
    return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


def _raise(error: Refusal, fields: Mapping[str, Any]) -> NoReturn:
    del fields
    raise error


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise Refusal(reason)


@contextmanager
def _refusing() -> Iterator[None]:
    """Errors of files and configurations become refusals.

    An error about rows may quote them, and the author of the configuration chooses
    which by its columns and classes: its text is for the operator alone. Folders of
    this machine are left out of all lines.
    """
    try:
        yield
    except DataError as error:
        raise Refusal(UNFIT, str(error)) from None
    except ConfigError as error:
        raise Refusal(re.sub(r"(?<!\S)(?:/[^/\s:]+)+/", "", str(error))) from None


FILE = "agreement.json"
MISFITS = 20
"""Different descriptions that may fail to fit before nobody looks any more."""


def agreement_of(contract: Contract) -> dict[str, Any]:
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
    except DAMAGE:
        raise WireError(
            f"{FILE}: is damaged on this node's disk; its operator must restore it"
        ) from None


def agree(folder: Path, contract: Contract, means: str | None = None) -> None:
    """Settle what is not settled yet, when the node is enrolled in an experiment.

    Args:
        folder: of the node.
        contract: of the experiment.
        means: a hash of the statistics that the node is about to send.
    """
    first, wanted = read_agreement(folder), agreement_of(contract)
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
        wanted, known = agreement_of(contract)["rows"], first["rows"]
        for key in ("kind", "outputs", "labels"):
            if wanted[key] != known[key]:
                raise DataError(
                    f"policy rows.changes: {key} is {wanted[key]}; allowed: "
                    f"{known[key]}, as in the first experiment"
                )
    if policy.columns == "any" or not task.columns:
        return
    if contract.nodes.raw is not None and first is not None:
        wanted, before = agreement_of(contract)["rows"]["raw"], first["rows"].get("raw")
        if before is not None and wanted != before:
            raise DataError(
                "policy rows.columns: data.raw is not as in the first experiment; "
                "allowed: the same columns, encodings and categories"
            )
    known = policy.columns
    if known == "file":
        if data.file.suffix not in FILES:
            return
        known = read_table(data.file).others((data.target, data.client))
    columns = tuple(one.name for one in contract.nodes.raw or ()) or task.columns
    if sorted(columns) != sorted(known):
        shown = ", ".join(columns)
        raise DataError(f"policy rows.columns: {shown}; allowed: {', '.join(known)}")


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
    wanted = agreement_of(contract)
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
    wanted, ledger = agreement_of(contract)["rows"], read_ledger(folder)
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

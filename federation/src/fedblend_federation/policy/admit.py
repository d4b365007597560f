# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which experiments a node takes part in: its policy, its rows, the terms of the
server.

The policy is read once for every message, a configuration is validated once for every
experiment, and what an experiment computes is built once. What is too large is refused
before rows are read or memory is allocated.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedblend.data.dataset import DataError
from fedblend.errors import ConfigError
from fedblend.trees import precision
from fedblend_federation.client.build import (
    EXPERIMENTS,
    SharedBuilds,
    prepared,
    rows_of,
)
from fedblend_federation.client.executor import Executor
from fedblend_federation.message import schema_hash
from fedblend_federation.ops.settings import ClientSettings
from fedblend_federation.policy import limits
from fedblend_federation.policy import rows as policy_rows
from fedblend_federation.policy.policy import (
    Limits,
    Permissions,
    Policy,
    Refusal,
    load_policy,
)
from fedblend_federation.secure.roster import means_of

if TYPE_CHECKING:
    from fedblend.data.federated import Shards
    from fedblend_federation.contract import Contract

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
                disclosed=lambda measured, counts: {},
                max_bytes=Limits().message_bytes,
            )
        return Permissions(
            describe=partial(self._describe, policy),
            executor=partial(self._admit, policy),
            disclosed=policy.disclosed,
            max_bytes=policy.limits.message_bytes,
            allowance=policy.allowance,
            limits=policy.limits,
            metric_noise=policy.metrics.noise,
            rows_may_change="rows" in policy.rows.changes,
            secure=partial(self._secure, policy),
        )

    def _allowed(self, policy: Policy, fields: Mapping[str, Any]) -> "Contract":
        """The contract of the configuration in a message, if the policy allows it."""
        with _refusing():
            text = fields.get("config")
            if not isinstance(text, str):
                raise Refusal("message: has no configuration")
            _refuse(policy.import_refusal(text))
            contract = self._parse(text)
        _refuse(policy.refusal(contract.config))
        with precision(contract.config.run.precision), _refusing():
            _refuse(limits.too_large(policy.limits, contract))
            _refuse(limits.too_small(policy.accept, contract.config))
            first = policy_rows.read_agreement(self.settings.folder)
            _refuse(policy_rows.split_refusal(policy.rows, contract, first))
            means_of(self.settings, contract.config, policy.accept)
        return contract

    def _secure(self, policy: Policy, terms: Mapping[str, Any]) -> Any:
        """What the secure sums of an experiment need; None where it has none."""
        with _refusing():
            config = self._parse(terms["config"]).config
            return means_of(self.settings, config, policy.accept)

    def _rows(self, policy: Policy, contract: "Contract") -> "dict[str, Shards]":
        """The rows of the node, if the experiment is about what was agreed on."""
        folder, source = self.settings.folder, self.settings.data
        first = policy_rows.read_agreement(folder)
        with policy_rows.counting_misfits(folder, contract):
            policy_rows.check_rows(policy.rows, contract, first, source)
            return rows_of(self.settings, contract)

    def _describe(self, policy: Policy, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What the server may know of this node's rows."""
        contract = self._allowed(policy, fields)
        config = contract.config
        with precision(config.run.precision), _refusing():
            splits = self._rows(policy, contract)
            rows = splits["train"].total
            _refuse(limits.too_small_for(policy.accept, config, rows))
            description: dict[str, Any] = {
                "counts": {name: split.total for name, split in splits.items()},
                "row": schema_hash(contract.row),
                "rooms": contract.rooms(splits),
            }
            if contract.schema is not None:
                description["statistics"] = self._statistics(policy, contract, splits)
            own = contract.constants(splits)
        if own is not None and policy.discloses_constants:
            policy_rows.agree(self.settings.folder, contract)  # of one split only
            smooth, convex = float(own.smooth[0]), float(own.convex[0])
            description["constants"] = [smooth, convex, own.exact]
        return description

    def _statistics(
        self, policy: Policy, contract: "Contract", splits: "Mapping[str, Shards]"
    ) -> dict[str, list[float]]:
        """Those of the training rows; means over other rows would tell rows apart."""
        found, folder = contract.statistics(splits), self.settings.folder
        rows, present = splits["train"].total, found["present"]
        _refuse(limits.too_few_values(policy.accept, present, rows))
        means = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        first = policy_rows.read_agreement(folder)
        _refuse(policy_rows.means_refusal(policy.rows, first, means))
        policy_rows.agree(folder, contract, means)
        return found

    def _admit(self, policy: Policy, terms: Mapping[str, Any]) -> Executor:
        """What computes an experiment under these terms, if the policy allows it."""
        contract = self._allowed(policy, terms)
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
        _refuse(limits.too_small_for(policy.accept, contract.config, rows))
        with precision(contract.config.run.precision):
            room = limits.activations(contract, executor.setup.capacities)
            _refuse(limits.memory_refusal(policy.limits, room, "what layers compute"))
            policy_rows.agree(self.settings.folder, contract)
        return executor

    def _build(self, text: str, agreed: str, stamps: tuple) -> Executor:
        del stamps  # rows that changed are read again
        terms, policy = json.loads(text), Policy.model_validate_json(agreed)
        contract = self._parse(terms["config"])
        with precision(contract.config.run.precision), _refusing():
            splits = self._rows(policy, contract)
            setup = prepared(self.settings, policy, contract, terms, splits)
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

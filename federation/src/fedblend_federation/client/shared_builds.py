# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the clients of one node build once for all of them."""

from functools import lru_cache
from pathlib import Path

from fedblend.errors import ConfigError
from fedblend_federation.client import programs
from fedblend_federation.client.bases import located, unnamed_base
from fedblend_federation.client.executor import ClientSetup
from fedblend_federation.contract import Contract, parse_contract

EXPERIMENTS = 4
"""Experiments whose rows and compiled functions stay in memory."""


class SharedBuilds:
    """What the clients of one node have in common: contracts, and compiled functions.

    Functions are compiled for an algorithm. Clients whose algorithms were built from
    the same terms and policy use that of the first.

    Args:
        bases: of ``node.toml``.
    """

    def __init__(self, bases: Path | None) -> None:
        self.bases = bases
        self.parse = lru_cache(EXPERIMENTS)(self._parse)
        self._first: dict[tuple[str, str], ClientSetup] = {}

    def _parse(self, text: str) -> Contract:
        """The contract of a configuration, with the base of this node."""
        refused = unnamed_base(text)
        if refused is not None:
            raise ConfigError(refused)
        return located(parse_contract(text), self.bases)

    def common(
        self, terms: str, agreed: str, setup: ClientSetup, alike: bool
    ) -> ClientSetup:
        """A setup with the functions of the first one under these terms, if ``alike``.

        One experiment too many ends the oldest one's programs, and JAX can only drop
        all of them.
        """
        first = self._first.setdefault((terms, agreed), setup)
        while len(self._first) > EXPERIMENTS:
            del self._first[next(iter(self._first))]
            programs.forget()
        if not alike:
            return setup
        names = ("algorithm", "measures", "alone", "perturb", "hidden")
        return setup._replace(**{name: getattr(first, name) for name in names})

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a doctor finds: a fault, or something that will become one."""

import datetime
from collections.abc import Iterator
from typing import NamedTuple

SOON = datetime.timedelta(days=30)
"""How long before its end a certificate is worth a warning."""


class Finding(NamedTuple):
    """What is not as it should be, where, its value, and what to do."""

    what: str
    where: str
    value: str
    advice: str
    fault: bool = True
    """Whether the federation must not run like this; otherwise it is a warning."""

    def __str__(self) -> str:
        kind = "fault" if self.fault else "warning"
        return f"{kind}: {self.where}: {self.what}: {self.value}; {self.advice}"


def ending(where: str, end: datetime.datetime, advice: str) -> Iterator[Finding]:
    """A certificate that has ended, or will soon."""
    now = datetime.datetime.now(datetime.UTC)
    value = f"{end:%Y-%m-%d}"
    if end <= now:
        yield Finding("certificate has expired", where, value, advice)
    elif end - now < SOON:
        yield Finding("certificate expires soon", where, value, advice, fault=False)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What losses and local steps tell ``fb.debug``; in other runs they tell nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax

from fedblend.core import PyTree

Hear = Callable[[str, PyTree], None]
_hear: ContextVar[Hear | None] = ContextVar("hear", default=None)


@contextmanager
def listen(hear: Hear) -> Iterator[None]:
    """Within, ``hear(what, value)`` is called with what ``tell`` is."""
    token = _hear.set(hear)
    try:
        yield
    finally:
        _hear.reset(token)


def tell(what: str, value: Callable[[], PyTree]) -> None:
    """Tell who listens; otherwise ``value`` is not called."""
    hear = _hear.get()
    if hear is not None:
        jax.debug.callback(partial(hear, what), value())

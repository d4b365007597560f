"""Only used in tests: its own types take minutes to read."""

from typing import Any

def __getattr__(name: str) -> Any: ...

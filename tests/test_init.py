# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The public names: all there, and imported only when they are used."""

import subprocess
import sys

import pytest

import fedblend as fb


def test_every_public_name_is_there():
    assert sorted(fb.__all__) == list(fb.__all__)
    for name in fb.__all__:
        assert getattr(fb, name).__name__.split(".")[-1] == name
    assert set(fb.__all__) <= set(dir(fb))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fb.nothing  # noqa: B018  # pyright: ignore


def test_importing_is_cheap():
    code = "import sys, fedblend; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

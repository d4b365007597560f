# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs."""

import jax
import pytest

import fedblend as fb

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def no_folder():
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("no_folder")
def test_programs_go_to_the_folder_that_was_named_first(tmp_path):
    first = fb.compile_cache(tmp_path / "programs")
    assert first == tmp_path / "programs"
    assert (tmp_path / "programs").is_dir()
    assert fb.compile_cache(tmp_path / "others") == first
    assert getattr(jax.config, NAMES[0]) == str(first)


@pytest.mark.usefixtures("no_folder")
def test_without_a_folder_that_can_be_written_runs_compile_anew(tmp_path):
    (tmp_path / "file").write_text("")
    assert fb.compile_cache(tmp_path / "file" / "programs") is None
    assert getattr(jax.config, NAMES[0]) is None

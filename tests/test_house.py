# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The measures of the house that are met stay met; ``tools/house.py`` prints them."""

import house

EVERY = house.modules(*house.FOLDERS.values())


def test_no_module_is_too_long():
    counts = {path.name: house.code_lines(path) for path in EVERY}
    long = {name: count for name, count in counts.items() if count > 400}
    assert not long, "a module has at most 400 code lines; split it by subject"


def test_no_algorithm_is_named_outside_its_own_file():
    assert house.named_algorithms(EVERY) == []


def test_one_folder_imports_private_packages_of_flower():
    assert len(house.private_flower(EVERY)) <= 1


def test_the_measures_notice_what_they_count(tmp_path):
    module = tmp_path / "module.py"
    text = '"""A module."""\n\nimport flwr.server.grid\n\n\n'
    text += (
        'def checked():\n    """Nothing."""\n\n\ndef of_run():\n    # none\n    pass\n'
    )
    module.write_text(text)
    assert house.code_lines(module) == 4
    assert house.nodes(module) == 8
    assert house.odd_names([module]) == (["checked"], ["of_run"], 2)

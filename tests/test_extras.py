# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked for of a distribution that is not installed: one line with the command.

Installed, each of these names is used by the tests of its own distribution.
"""

import subprocess
import sys
from pathlib import Path

ALONE = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: ()
sys.modules["fedblend_adapters"] = None
sys.path[:0] = sys.argv[1:]
import fedblend as fb
from fedblend.config.build import build
from fedblend.config.config import check
from tiny_config import TINY

def configured(**tables):
    return build(check({**TINY, **tables}, "here"))

for ask in (
    lambda: fb.adapt.lora(2),
    lambda: fb.lora,
    lambda: fb.models.transformer(9),
    lambda: fb.models.build("text_classifier", (3,), 2),
    lambda: fb.data.train_tokenizer([]),
    lambda: fb.algorithms.rolora,
    lambda: configured(algorithm={**TINY["algorithm"], "name": "fedsa_lora"}),
    lambda: configured(model={"name": "transformer"}),
    lambda: configured(model={"name": "mlp"}, adapt={"how": "lora"}),
    lambda: fb.algorithms.frob,
    lambda: fb.models.frob,
):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("nothing")
assert configured()
"""
NEEDS = "needs fedblend-adapters: pip install 'fedblend[adapters]'"
LINES = f"""
InputError fb.adapt: {NEEDS}
AttributeError module 'fedblend' has no attribute 'lora'
InputError fb.models.transformer: {NEEDS}
ValueError model: 'text_classifier' is unknown; it {NEEDS}
InputError fb.data.train_tokenizer: {NEEDS}
InputError fb.algorithms.rolora: {NEEDS}
ConfigError here: algorithm.name: "fedsa_lora" is unknown; it {NEEDS}
ConfigError here: model.name: "transformer" is unknown; it {NEEDS}
InputError adapt: {NEEDS}
AttributeError module 'fedblend.algorithms' has no attribute 'frob'
AttributeError module 'fedblend.models' has no attribute 'frob'
"""


def test_one_line_says_what_to_install():
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", ALONE, here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == LINES.strip().splitlines()

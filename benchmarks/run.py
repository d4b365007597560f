# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Every measurement of speed by its name: ``python run.py TASK [OPTIONS]``.

Without a task it prints what there is; ``python run.py TASK --help`` has its options.
"""

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def tasks() -> dict[str, str]:
    """The scripts that can be run, with the first line of what they say."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text()
        if path != Path(__file__) and '__name__ == "__main__"' in text:
            about = ast.get_docstring(ast.parse(text)) or ""
            found[path.stem] = about.splitlines()[0]
    return found


if __name__ == "__main__":
    known = tasks()
    if len(sys.argv) > 1 and sys.argv[1] in known:
        name = sys.argv.pop(1)
        sys.path.insert(0, str(HERE))
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    else:
        for name, about in known.items():
            print(f"{name:18} {about}")
        sys.exit(len(sys.argv) > 1)

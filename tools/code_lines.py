# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Count code lines: neither blank, nor comment, nor docstring.

python tools/code_lines.py                  each part of the package, and the sum
python tools/code_lines.py --modules        the longest modules
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "fedblend"
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path, *, imports: bool = True) -> int:
    """The number of code lines of a file, with or without its import statements."""
    text = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        string = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        imported = isinstance(node, ast.Import | ast.ImportFrom) and not imports
        if string or imported:
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - left_out)


def main() -> None:
    """Print the counts."""
    counts = {path: code_lines(path) for path in sorted(PACKAGE.rglob("*.py"))}
    if "--modules" in sys.argv:
        for path, count in sorted(counts.items(), key=lambda pair: -pair[1])[:40]:
            print(f"{count:6d} {path.relative_to(PACKAGE)}")
    else:
        parts: Counter[str] = Counter()
        for path, count in counts.items():
            parts[path.relative_to(PACKAGE).parts[0]] += count
        for part, count in parts.items():
            print(f"{count:6d} {part}")
    print(f"{sum(counts.values()):6d} in {len(counts)} files")


if __name__ == "__main__":
    main()

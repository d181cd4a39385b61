"""Prints the lines of code of pflcore/ and csrc/ (no blanks, comments, docstrings) and fails where they exceed .ci/code_lines.json.

The numbers there grow with a reason in the changelog only.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_suffix(".json")


def of_python(text: str) -> int:
    """Lines that hold code."""
    aside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in aside:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, clean=False):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def of_cpp(text: str) -> int:
    """Lines that hold code; comment marks within strings are not looked for."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in text.splitlines())


def count() -> dict[str, int]:
    """Code lines by folder."""
    python = sum(of_python(p.read_text()) for p in (ROOT / "pflcore").rglob("*.py"))
    kernels = sum(of_cpp(p.read_text()) for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cuh", ".cu"})
    return {"pflcore": python, "csrc": kernels}


if __name__ == "__main__":
    budget = json.loads(BUDGET.read_text())
    lines = count()
    print("code lines:", ", ".join(f"{k} {v} of {budget[k]}" for k, v in lines.items()))
    sys.exit(any(v > budget[k] for k, v in lines.items()))

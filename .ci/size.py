"""Prints how much code there is, in tokens without comments and docstrings, and fails where that
exceeds .ci/size.json.

Tokens, because a budget in lines is met by wide lines. The numbers there grow with a reason in the
changelog only.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_suffix(".json")
ASIDE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMMENTS = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
WORDS = re.compile(r'"(?:\\.|[^"\\\n])*"|\w+|::|->|<<|>>|[-+*/<>=!&|]=|\+\+|--|&&|\|\||[^\s\w]')


def docstrings(text: str) -> Iterator[int]:
    """Their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def of_python(path: Path) -> int:
    lines = set(docstrings(path.read_text(encoding="utf-8")))
    with tokenize.open(path) as file:
        return sum(
            t.type not in ASIDE and t.start[0] not in lines
            for t in tokenize.generate_tokens(file.readline)
        )


def of_cpp(path: Path) -> int:
    return len(WORDS.findall(COMMENTS.sub(lambda m: m[1] or " ", path.read_text(encoding="utf-8"))))


def count() -> dict[str, int]:
    """Tokens by folder; csrc without CUDA."""
    python = {
        room: sum(map(of_python, (ROOT / room).rglob("*.py")))
        for room in ("pflcore", "tests", "bench", "examples")
    }
    kernels = [
        p
        for p in (ROOT / "csrc").rglob("*")
        if p.suffix in {".h", ".cpp"} and p.parent.name != "cuda"
    ]
    return {**python, "csrc": sum(map(of_cpp, kernels))}


if __name__ == "__main__":
    budget, found = json.loads(BUDGET.read_text()), count()
    print(
        "tokens of code:",
        ", ".join(f"{room} {n:,} of {budget[room]:,}" for room, n in found.items()),
    )
    sys.exit(any(n > budget[room] for room, n in found.items()))

"""Prints which of pflcore's packages imports which, as the picture in CONTRIBUTING.md.

An arrow that follows from two others is left out.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pflcore"


def imports() -> dict[str, set[str]]:
    """The packages that each package imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package.startswith("__"):
            continue
        imported = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                first, *inside = str(node.module).split(".")
                names = inside[:1] or [a.name for a in node.names]
                imported |= {*names} if first == "pflcore" else set()
    return {name: others & {*found} - {name} for name, others in found.items()}


def picture() -> str:
    """The imports as a Mermaid graph.

    A package points to those that it imports and that no other of them imports.
    """
    packages = imports()

    def below(package: str) -> set[str]:
        return packages[package].union(*map(below, packages[package]))

    arrows = [
        f"    {package} --> {other}"
        for package, others in packages.items()
        for other in sorted(others)
        if not any(other in below(third) for third in others - {other})
    ]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```", ""])


if __name__ == "__main__":
    print(picture())

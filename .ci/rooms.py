"""Prints pflcore's rooms and which imports which, as the picture in CONTRIBUTING.md;
what a room imports by way of another is left out."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pflcore"


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        mine = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                first, *inside = str(node.module).split(".")
                names = inside[:1] or [a.name for a in node.names]
                mine |= {*names} if first == "pflcore" else set()
    return {room: others & {*found} - {room} for room, others in found.items()}


def picture() -> str:
    """Mermaid: an arrow from each room to those that it needs and none of the others
    brings."""
    rooms = imports()

    def below(room: str) -> set[str]:
        return rooms[room].union(*map(below, rooms[room]))

    arrows = [
        f"    {room} --> {other}"
        for room, others in rooms.items()
        for other in sorted(others)
        if not any(other in below(third) for third in others - {other})
    ]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```", ""])


if __name__ == "__main__":
    print(picture())

"""All makers at once: `python tests/golden/make`, with --write to replace numbers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from cases import Result, load, main, shape_of

SHARED = ("__main__", "cases", "clients")


def makers() -> list[str]:
    """The names of all makers."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [name for name in names if name not in SHARED]


def all_results() -> Iterator[Result]:
    """The results of all makers, one after the other."""
    for name in makers():
        yield from importlib.import_module(name).results()


def cases_without_maker(results: list[Result]) -> list[tuple]:
    """The cases of rounds.json and uploads.json with numbers that no maker makes."""
    made = set()
    for result in results:
        for path in shape_of(result.value):
            made.add((result.file, *result.path, *path))
    missing = {}
    for file in ("rounds", "uploads"):
        for path in shape_of(load(file)):
            if "then" in path and (file, *path) not in made:
                missing[file, path[0]] = True
    return list(missing)


if __name__ == "__main__":
    found = list(all_results())
    for file, case in cases_without_maker(found):
        print(f"{file}.json [{case!r}]: no maker")
    main(found)

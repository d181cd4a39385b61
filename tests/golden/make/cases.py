"""The golden files, the cases in them, and the comparison with a program's numbers.

A case of rounds.json or uploads.json holds a method, its options and its inputs. Under
"then" each round has the numbers that the method must give. A program gets the inputs
alone and yields all that it knows after each round. Of that, the numbers that "then"
names are compared.

A path is the place of a number in a file: the keys and positions that lead to it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent.parent
# A string, or a number; strings are matched so that digits inside are passed over.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?(?:Infinity|\d[\d.eE+-]*)|NaN')
DIGITS = 14  # of a number that is written


class Result(NamedTuple):
    """A program's numbers for one place of a golden file.

    Attributes:
        file: the file's name without ".json"
        path: the keys and positions that lead to the numbers
        value: the numbers, nested as they are in the file
        rtol: relative tolerance of the test that uses the numbers
        atol: absolute tolerance of that test
    """

    file: str
    path: tuple[str | int, ...]
    value: Any
    rtol: float = 1e-9
    atol: float = 1e-12


class Cohort(NamedTuple):
    """The clients of one round.

    Attributes:
        ids: the clients' numbers
        sizes: their numbers of training samples
        round: the round's number, from 1
        rounds: rounds of the whole run
        n: clients of the federation
    """

    ids: list[int]
    sizes: np.ndarray
    round: int
    rounds: int
    n: int


def load(file: str) -> Any:
    """The contents of tests/golden/FILE.json."""
    return json.loads((FOLDER / f"{file}.json").read_text())


def at(contents: Any, path: Iterable[str | int]) -> Any:
    """The part of a file's contents at a path."""
    for key in path:
        contents = contents[key]
    return contents


def tolerances(case: dict, where: str) -> list[float]:
    """The tolerances, rtol and atol, that a case states for a part of its numbers."""
    return case.get("tolerance", {}).get(where, [1e-9, 1e-12])


def named_results(
    file: str, name: str, case: dict, found: Iterable[dict]
) -> Iterator[Result]:
    """The numbers of a case that "then" names, taken from what a program found."""
    for i, (wanted, values) in enumerate(zip(case["rounds"], found, strict=True)):
        for where, keys in wanted["then"].items():
            rtol, atol = tolerances(case, where)
            for key in keys:
                path = (name, "rounds", i, "then", where, key)
                value = np.asarray(values[where][key]).tolist()
                yield Result(file, path, value, rtol, atol)


def round_results(
    programs: dict[str, Callable], kinds: dict[str, Callable]
) -> Iterator[Result]:
    """The results of all cases of rounds.json whose methods have a program.

    Args:
        programs: the program of each method
        kinds: the functions that make the clients, by the names in the cases
    """
    for name, case in load("rounds").items():
        if case["method"] not in programs:
            continue
        program = programs[case["method"]]
        kind, arguments = case["clients"]
        for options in case["options"]:
            clients = kinds[kind](**arguments)
            everyone = list(range(clients.n))
            cohorts = [wanted.get("ids", everyone) for wanted in case["rounds"]]
            found = program(clients, cohorts, case.get("start", {}), **options)
            yield from named_results("rounds", name, case, found)


def upload_results(programs: dict[str, Callable]) -> Iterator[Result]:
    """The results of all cases of uploads.json whose methods have a program."""
    for name, case in load("uploads").items():
        if case["method"] not in programs:
            continue
        program = programs[case["method"]]
        rounds = []
        for wanted in case["rounds"]:
            uploads = {key: np.array(rows) for key, rows in wanted["up"].items()}
            rounds.append((read_cohort(case["n"], wanted.get("cohort", {})), uploads))
        start = {key: np.array(v, float) for key, v in case.get("start", {}).items()}
        x0 = np.array(case["x0"])
        found = program(rounds, x0, case["n"], start, **case["options"])
        yield from named_results("uploads", name, case, found)


def read_cohort(n: int, given: dict) -> Cohort:
    """The cohort of a round of uploads.json; all n clients, one sample each."""
    ids = given.get("ids", list(range(n)))
    sizes = np.array(given.get("size", [1] * len(ids)), float)
    return Cohort(ids, sizes, given.get("round", 1), 100, n)


# Comparing and writing -------------------------------------------------------


def numbers(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, float]]:
    """The numbers of a nested value with their paths, in the order of the text."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers(part, (*path, key))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from numbers(part, (*path, i))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def shape_of(value: Any) -> list[tuple]:
    """The paths of all numbers of a nested value."""
    return [path for path, _ in numbers(value)]


def differences(results: Iterable[Result]) -> Iterator[tuple[str, tuple, float, float]]:
    """Stored numbers that a program disagrees with: file, path, stored, computed.

    Raises ValueError where the stored numbers are nested in another way.
    """
    files: dict[str, Any] = {}
    for result in results:
        if result.file not in files:
            files[result.file] = load(result.file)
        stored = at(files[result.file], result.path)
        if shape_of(stored) != shape_of(result.value):
            raise ValueError(
                f"{result.file}.json, {result.path}: expected {result.value}, got "
                f"{stored}; write numbers of the right shape, such as zeros."
            )
        new = dict(numbers(result.value))
        for path, number in numbers(stored):
            if not agree(new[path], number, result.rtol, result.atol):
                yield result.file, (*result.path, *path), number, new[path]


def agree(got: float, want: float, rtol: float, atol: float) -> bool:
    """True for numbers within the tolerance, or the same infinity."""
    return got == want or abs(got - want) <= atol + rtol * abs(want)


def rewrite(text: str, changes: dict[tuple, float]) -> str:
    """The text of a JSON file with other numbers at some paths, the layout kept."""
    paths = iter(shape_of(json.loads(text)))

    def replacement(token: re.Match) -> str:
        if token[0].startswith('"'):
            return token[0]
        path = next(paths)
        if path not in changes:
            return token[0]
        number = changes[path]
        if isinstance(number, int):
            return str(number)
        return json.dumps(float(f"{number:.{DIGITS}g}"))

    return TOKEN.sub(replacement, text)


def main(results: Iterable[Result]) -> None:
    """Prints the stored numbers that differ; with --write replaces them.

    Exits with status 1 where numbers differ and are not replaced.
    """
    parser = argparse.ArgumentParser(
        description="Compares the stored golden numbers with new ones."
    )
    parser.add_argument("--write", action="store_true", help="replace what differs")
    write = parser.parse_args().write
    results = list(results)
    changes: dict[str, dict[tuple, float]] = {}
    for file, path, stored, computed in differences(results):
        print(f"{file}.json {list(path)}: stored {stored!r}, computed {computed!r}")
        changes.setdefault(file, {})[path] = computed
    if write:
        for file, of_file in changes.items():
            target = FOLDER / f"{file}.json"
            target.write_text(rewrite(target.read_text(), of_file))
    count = sum(len(of_file) for of_file in changes.values())
    print(f"{len(results)} places computed, {count} numbers differ.")
    if count and not write:
        raise SystemExit(1)

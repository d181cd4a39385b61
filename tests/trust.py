"""Runs everything that tries to break pflcore on purpose: `make trust`.

It takes some 45 minutes on two quiet cores. The mutants (tests/mutants.py) take half an
hour of it, and differ from day to day. All other parts are tests that the suites have
too. pytest does not collect this file.

Parts may be named: `python tests/trust.py "altered data" sanitizers`.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from places import ROOT, ran


class Counts(NamedTuple):
    """The result of a run of tests.

    Attributes:
        tests: numbers of tests by outcome: "passed", "failed", "skipped", "error"
        examples: inputs that hypothesis drew
        holds: True where a test passed and none failed
    """

    tests: dict[str, int]
    examples: int
    holds: bool


class Finding(NamedTuple):
    """The sentence of a part, and True where all of it held."""

    sentence: str
    holds: bool


def run_python(*words):
    """A finished process of this Python with these arguments."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return ran(*words, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def run_tests(*words):
    """The counts of a run of pytest with these arguments."""
    # With the project's option -q, pytest's last line would have no counts.
    options = ["-o", "addopts=--import-mode=importlib", "--hypothesis-show-statistics"]
    options += ["-p", "no:cacheprovider", "--disable-warnings", "--suite", "all"]
    done = run_python("-m", "pytest", *options, *words)
    last_line = (done.stdout.splitlines() or [""])[-1]
    outcomes = re.findall(r"(\d+) (passed|failed|skipped|error)", last_line)
    tests = {outcome: int(count) for count, outcome in outcomes}
    # "60 passing, 0 failing" or "60 passing examples, ..."
    examples = sum(map(int, re.findall(r"- (\d+) passing", done.stdout)))
    holds = done.returncode == 0 and tests.get("passed", 0) > 0
    if not holds:
        print(done.stdout[-3000:], done.stderr[-3000:])
    return Counts(tests, examples, holds)


def mutants():
    """Tries sixty mutants that a library draws, as `make mutants` does."""
    done = run_python("tests/mutants.py", "--minutes", "30", "--survivors", "12")
    *lines, last_line = done.stdout.splitlines() or [done.stderr[-300:]]
    for line in lines:
        if line.startswith("survived"):
            print(f"    {line}")
    return Finding(last_line, done.returncode == 0)


def hostile_clients():
    """Tries bad uploads on every algorithm, and attacks against defences."""
    done = run_python("-m", "bench.hostile", "inputs", "attacks")
    pattern = r"^(?:bad inputs tried|attacks x defences).*"
    figures = re.findall(pattern, done.stdout, re.MULTILINE)
    sentence = "; ".join(figures) or done.stderr[-300:]
    return Finding(sentence, done.returncode == 0 and len(figures) == 2)


def tests_of(sentence, *words):
    """Runs tests of one part.

    `sentence` has places for the numbers of tests that passed, tests that were skipped,
    and examples.
    """
    counts = run_tests(*words)
    figures = {"passed": 0, "skipped": 0, "examples": counts.examples}
    return Finding(sentence.format(**figures | counts.tests), counts.holds)


LOST = "killed or altered or damaged or full or lost or ends or cut"
# Each part: a sentence with places for figures, then words for pytest.
TESTS = {
    "bad inputs": (
        "{passed} wrong arguments and unsafe readers, each answered with one sentence",
        "tests/internal/package/test_arguments.py",
        "tests/ops/test_laws.py::test_bad_input",
        "tests/cli/test_commands.py::test_bad_input_is_one_sentence_and_leaves_nothing",
        "tests/package/test_supply.py",
    ),
    "altered data": (
        "{examples} altered files and random uses of a server and of forms in {passed} "
        "tests",
        "tests/test_damage.py",
        "tests/interop/test_server_machine.py",
        "tests/interop/test_packing.py",
    ),
    "sanitizers": (
        "{passed} runs of the kernels under sanitizers and between forbidden pages, "
        "{skipped} skipped",
        "tests/internal/sanitize",
        "tests/internal/cuda_on_cpu",
    ),
    "nothing lost": (
        "{passed} kills, full disks and memories at their end: nothing lost",
        "tests/simulation/test_checkpoint.py",
        "tests/simulation/test_memory.py",
        "tests/results/test_results.py",
        "-k",
        LOST,
    ),
}
PARTS: dict[str, Callable[[], Finding]] = {
    "mutants of the code": mutants,
    "hostile clients": hostile_clients,
    **{name: partial(tests_of, *words) for name, words in TESTS.items()},
}


def main():
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"expected some of {', '.join(PARTS)}, got {', '.join(unknown)}.")
        return 2
    all_hold = True
    for name in names:
        began = time.monotonic()
        finding = PARTS[name]()
        seconds = time.monotonic() - began
        word = "holds" if finding.holds else "FAILS"
        print(f"{word}  {name}: {finding.sentence} ({seconds:.0f} s)", flush=True)
        all_hold &= finding.holds
    print("all of it holds" if all_hold else "not all of it holds")
    return int(not all_hold)


if __name__ == "__main__":
    raise SystemExit(main())

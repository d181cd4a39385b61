"""All that tries to break pflcore on purpose, and its figures: `make trust`, in some 45
minutes on two quiet cores.

Not collected by pytest. Each line is a run of tests that the suites have anyway, but
for the mutants (tests/mutants.py), half an hour of it: sixty that a library draws,
others every day. Names of lines may be given: `python tests/trust.py "altered data"
sanitizers`.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial

from places import ROOT, ran


def run(*words):
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return ran(*words, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def tested(*words):
    """How many tests passed, failed and were skipped, how many examples hypothesis
    made, and whether some passed and nothing failed."""
    # with -q the last line has no counts
    loud = ["-o", "addopts=--import-mode=importlib", "--hypothesis-show-statistics"]
    loud += ["--suite", "all"] if words[0].startswith("tests") else []
    done = run(
        "-m", "pytest", "-p", "no:cacheprovider", "--disable-warnings", *loud, *words
    )
    last = (done.stdout.splitlines() or [""])[-1]
    count = {
        kind: int(n)
        for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    }
    # "60 passing, 0 failing" or "60 passing examples, ..."
    examples = sum(int(n) for n in re.findall(r"- (\d+) passing", done.stdout))
    good = done.returncode == 0 and count.get("passed", 0) > 0
    if not good:
        print(done.stdout[-3000:], done.stderr[-3000:])
    return count, examples, good


def mutants():
    """Sixty that nobody chose: `make mutants`."""
    done = run("tests/mutants.py", "--minutes", "30", "--survivors", "12")
    *each, last = done.stdout.splitlines() or [done.stderr[-300:]]
    print(*(f"    {s}" for s in each if s.startswith("survived")), sep="\n")
    return last, done.returncode == 0


def figure(said, *words):
    """Runs of tests: `said` with how many passed, were skipped, and how many
    examples were made."""
    count, examples, good = tested(*words)
    zero = {"passed": 0, "skipped": 0, "examples": examples}
    return said.format(**zero | count), good


def hostile_clients():
    """Bad uploads on every algorithm, and attacks against defences:
    `python -m bench.hostile inputs attacks`, its lines are the figure."""
    done = run("-m", "bench.hostile", "inputs", "attacks")
    lines = re.findall(r"^(?:bad inputs tried|attacks x defences).*", done.stdout, re.M)
    return "; ".join(lines) or done.stderr[-300:], done.returncode == 0 and len(
        lines
    ) == 2


LOST = "killed or altered or damaged or full or lost or ends or cut"
RUNS = {  # what is said of them, and the tests
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
# each gives what was tried, in words with numbers, and whether all of it held
PARTS: dict[str, Callable[[], tuple[str, bool]]] = {
    "mutants of the code": mutants,
    "hostile clients": hostile_clients,
    **{name: partial(figure, *words) for name, words in RUNS.items()},
}


def main():
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [w for w in wanted if w not in PARTS]:
        print(f"expected some of {', '.join(PARTS)}, got {', '.join(unknown)}.")
        return 2
    all_good = True
    for name in wanted:
        began = time.monotonic()
        said, good = PARTS[name]()
        seconds, word = time.monotonic() - began, "holds" if good else "FAILS"
        print(f"{word}  {name}: {said} ({seconds:.0f} s)", flush=True)
        all_good &= good
    print("all of it holds" if all_good else "not all of it holds")
    return int(not all_good)


if __name__ == "__main__":
    raise SystemExit(main())

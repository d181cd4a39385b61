"""Draws mutants of the package and runs tests on them: `make mutants`.

cosmic-ray draws a place and an operator, for example `<` for `<=`. Each mutant is tried
in a copy of the tree, with the tests that reach its line, until one fails. The quick
suite's tests come first, and the quickest of them first.

The tests of a line are known from the two suites under coverage. That table is kept in
build/mutants/; `--record` makes it again. A mutant that survives is a property that no
test knows: write the test, or see that the mutant computes the same.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as xml
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from queue import Queue

from places import ROOT, ran

KEPT = ROOT / "build" / "mutants"
SUITES = ("fast", "deep")
PACKAGES = (
    "ops",
    "nn",
    "train",
    "algorithms",
    "data",
    "simulation",
    "interop",
    "lab",
)
SECONDS = 120  # limit for the tests of one mutant in a suite
TRIED = 40  # seconds of tests, as coverage counts them, tried in a suite


# mutants ---------------------------------------------------------------------

MESSAGES = (ast.Raise, ast.JoinedStr, ast.Assert, ast.AnnAssign)


def messages(source):
    """Lines of errors, warnings, checks, decorators and docstrings."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        aside = list(getattr(node, "decorator_list", []))
        if is_message(node):
            aside.append(node)
        for part in aside:
            lines |= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
        if isinstance(node, ast.If) and any(
            isinstance(n, ast.Raise) for n in node.body
        ):
            lines |= set(range(node.lineno, node.body[-1].end_lineno + 1))
    return lines


def is_message(node):
    """True for a node whose change no test should notice.

    It is an error, a warning, a check, or a constant such as a docstring.
    """
    if isinstance(node, MESSAGES) or getattr(node, "name", "") == "__post_init__":
        return True
    if isinstance(node, ast.Call):
        return "warn" in ast.unparse(node.func)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def drawn_mutants(count, seed):
    """A list of `count` mutants of the packages' code.

    Files are drawn by their size.
    """
    from cosmic_ray.ast import Visitor, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    class Places(Visitor):
        def __init__(self, operator):
            self.operator = operator
            self.lines = []

        def visit(self, node):
            self.lines += [
                start[0] for start, _ in self.operator.mutation_positions(node)
            ]
            return node

    names = [
        n for n in operator_names() if "Variable" not in n and "Decorator" not in n
    ]
    chance = random.Random(seed)
    out = []
    files = []
    for name in PACKAGES:
        files += sorted((ROOT / "pflcore" / name).rglob("*.py"))
    weight = [p.stat().st_size for p in files]
    while len(out) < count:
        (path,) = chance.choices(files, weight)
        name = chance.choice(names)
        source = path.read_text(encoding="utf-8")
        operator = get_operator(name)()
        places = Places(operator)
        aside = messages(source)
        places.walk(get_ast(source))
        fitting = [k for k, line in enumerate(places.lines) if line not in aside]
        if fitting:
            k = chance.choice(fitting)
            mutated = mutate_code(source, operator, k)
            if not changes_code(source, mutated):
                continue
            mutant = {
                "where": str(path.relative_to(ROOT)),
                "line": places.lines[k],
                "operator": name.removeprefix("core/"),
                "source": mutated,
            }
            out.append(mutant)
    return out


def changes_code(source, mutated):
    """False for a mutant of annotations alone, and for one that is no Python.

    Of the second kind is "**options" with another operator.
    """
    try:
        return code_of(source) != code_of(mutated)
    except SyntaxError:
        return False


def code_of(source):
    """The code of a file as text, without annotations of arguments and results."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(tree)


# the tests of a line --------------------------------------------------------


def record(suite):
    """Runs a suite under coverage, and writes its results to files.

    The files tell which tests reach which lines, and how many seconds each test takes.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "rc").write_text(
        f"[run]\nbranch = False\nsource = {ROOT / 'pflcore'}, "
        f"{ROOT / 'bench' / 'papers'}\ndata_file = {KEPT / suite}.coverage\n"
    )
    words = (
        f"--suite {suite} -n 2 -p no:randomly --cov --cov-context=test --cov-report="
    ).split()
    words.append(f"--cov-config={KEPT / 'rc'}")
    done = pytest(ROOT, [*words, f"--junitxml={KEPT / suite}.xml"], {})
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])


def pytest(place, words, env, seconds=None):
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", **env}
    words = ["-m", "pytest", "-p", "no:cacheprovider", *words]
    return ran(*words, cwd=place, env=env, timeout=seconds)


class Reached:
    """The tests that reach each line, the quickest first."""

    def __init__(self, suite):
        from coverage import CoverageData

        self.data = CoverageData(str(KEPT / f"{suite}.coverage"))
        self.data.read()
        self.seconds = {}
        for case in xml.parse(KEPT / f"{suite}.xml").iter("testcase"):
            self.seconds[f"{case.get('classname')}::{case.get('name')}"] = float(
                case.get("time")
            )

    def cost(self, test):
        file, _, name = test.partition("::")
        return self.seconds.get(
            f"{file.removesuffix('.py').replace('/', '.')}::{name}", 1.0
        )

    def tests(self, path, first, last):
        lines = self.data.contexts_by_lineno(str(path))
        reaching = set().union(*(lines.get(n, []) for n in range(first, last + 1)))
        reaching.discard("")
        # A line that runs at import is reached by all tests that use the module.
        if not reaching:
            reaching = set().union(*lines.values())
            reaching.discard("")
        tests = sorted({c.rpartition("|")[0] for c in reaching}, key=self.cost)
        spent = list(accumulate(map(self.cost, tests)))
        return tests[: max(1, bisect(spent, TRIED))]


# one mutant -------------------------------------------------------------------


def copied(to):
    for name in ("pflcore", "tests", "bench", "csrc", "docs", "examples", ".ci"):
        shutil.copytree(
            ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to)
    return to


def tried(mutant, place, reached):
    """The suite that kills the mutant, or "survived"."""
    path = ROOT / mutant["where"]
    here = place / mutant["where"]
    here.write_text(mutant["source"], encoding="utf-8")
    try:
        for suite in SUITES:
            tests = reached[suite].tests(path, mutant["line"], mutant["line"])
            words = f"--suite {suite} -x -q --tb=line -p no:randomly".split()
            # The names are in a file, since a command may not hold all of them.
            (place / "tried.txt").write_text("\n".join(tests), encoding="utf-8")
            try:
                done = (
                    pytest(place, [*words, "@tried.txt"], {}, SECONDS)
                    if tests
                    else None
                )
                code = done.returncode if done else 0
            except subprocess.TimeoutExpired:
                return suite  # the mutant runs far too long, or endlessly
            if code not in (0, 5):
                return suite
        return "survived"
    finally:
        here.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--count", type=int, default=60, help="number of mutants")
    option("--seed", default=time.strftime("%Y-%m-%d"))
    option("--only", default="", help="regular expression for places and operators")
    option(
        "--minutes",
        type=float,
        default=60,
        help="after them, no further mutant is tried",
    )
    option("--survivors", type=int, default=0, help="survivors that are no failure")
    option("--record", action="store_true", help="run the suites under coverage again")
    options = parser.parse_args()
    start = time.monotonic()
    mutants = drawn_mutants(options.count, options.seed)
    mutants = [
        m for m in mutants if re.search(options.only, f"{m['where']} {m['operator']}")
    ]
    for suite in SUITES:
        if options.record or not (KEPT / f"{suite}.coverage").exists():
            record(suite)
    reached = {s: Reached(s) for s in SUITES}
    places = Queue()
    count = dict.fromkeys((*SUITES, "survived", "untried"), 0)
    for i in range(2):
        shutil.rmtree(KEPT / str(i), ignore_errors=True)
        places.put(copied(KEPT / str(i)))

    def one(mutant):
        place = places.get()
        late = time.monotonic() - start > 60 * options.minutes
        verdict = "untried" if late else tried(mutant, place, reached)
        places.put(place)
        count[verdict] += 1
        print(
            f"{verdict:8} {mutant['where']}:{mutant['line']} {mutant['operator']}",
            flush=True,
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, mutants))
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in count.items())
    minutes = (time.monotonic() - start) / 60
    print(
        f"{len(mutants)} mutants (seed {options.seed}): {verdicts}, "
        f"in {minutes:.0f} minutes"
    )
    return int(count["survived"] > options.survivors)


if __name__ == "__main__":
    raise SystemExit(main())

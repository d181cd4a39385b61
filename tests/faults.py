"""Faults made on purpose, one at a time, and whether a test notices: `python tests/faults.py
[--fresh N] [--only WORD]`.

tests/faults.jsonl names each by a function and by an expression or statement in it, compared as
syntax (in C++ as words, in a file), so that neither lines nor formatting matter. `--fresh` draws
others, which nobody chose. A fault is tried in a copy of the tree with the tests that reach its
line, as the two suites under coverage have it (kept in build/trust/; `--record` makes it again),
the quick suite's first and the quickest of them first, until one fails. A *survivor* is a law that
no test knows: write the test, or say in CONTRIBUTING.md why there is none to write.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from bisect import bisect
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from queue import Queue

from places import ROOT, ran

KEPT = ROOT / "build" / "trust"
TABLE = Path(__file__).with_name("faults.jsonl")
SUITES = ("fast", "deep")
ROOMS = ("ops", "algorithms", "train", "simulation")  # of fresh faults
# the tests of a fault in C++, which coverage does not see
COMPILED = ["tests/ops", "tests/internal/ops", "tests/nn"]
# that the tests of one fault may take, and what those that are tried in a suite took under coverage
SECONDS, TRIED = 120, 40


# where a fault is -----------------------------------------------------------


parse = cache(ast.parse)


def parsed(text):
    (node,) = ast.parse(text).body
    return node.value if isinstance(node, ast.Expr) else node


def placed(fault, source):
    """Its first and last line, and the source with the fault; ValueError where the expression does
    not stand once in the function."""
    module, _, name = fault["where"].partition(":")
    if not module.startswith(("pflcore", "bench.")):
        return of_words(fault, source)
    scope, old = parse(source), parsed(fault["old"])
    for part in filter(None, name.split(".")):
        (scope,) = (
            n
            for n in ast.walk(scope)
            if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part
        )
    seek, lines = ast.unparse(old), source.encode().splitlines(keepends=True)
    nodes = (n for n in ast.walk(scope) if type(n) is type(old) and ast.unparse(n) == seek)
    node = the_one(nodes, fault)
    head = lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :]
    new = fault["new"].replace("\n", "\n" + " " * node.col_offset)
    new = f"({new})" if isinstance(node, ast.expr) else new
    changed = [*lines[: node.lineno - 1], head + new.encode() + tail, *lines[node.end_lineno :]]
    return node.lineno, node.end_lineno, b"".join(changed).decode()


def of_words(fault, source):
    """The same in C++, where white space and nothing else may differ."""
    words = re.findall(r"\w+|[^\w\s]", fault["old"])
    found = the_one(re.finditer(r"\s*".join(map(re.escape, words)), source), fault)
    return 0, 0, source[: found.start()] + fault["new"] + source[found.end() :]


def the_one(found, fault):
    found = list(found)
    if len(found) != 1:
        raise ValueError(f"{fault['where']}: {fault['old']!r} stands there {len(found)} times")
    return found[0]


def path_of(fault):
    where = fault["where"].partition(":")[0]
    if not where.startswith(("pflcore", "bench.")):
        return ROOT / where
    path = ROOT.joinpath(*where.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def known(table=TABLE):
    return [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]


def stale(faults):
    """What the table names and the code has not."""
    out = []
    for fault in faults:
        try:
            source = path_of(fault).read_text(encoding="utf-8")
            placed(fault, source)
            if fault["old"].split() == fault["new"].split():
                out.append(f"{fault['where']}: nothing is changed")
        except (ValueError, OSError) as error:
            out.append(str(error))
    return out


# faults that nobody chose ---------------------------------------------------

MESSAGES = (ast.Raise, ast.JoinedStr, ast.Assert, ast.AnnAssign)


def messages(source):
    """The lines of errors, warnings, checks, decorators and docstrings."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        aside = list(getattr(node, "decorator_list", []))
        said = isinstance(node, MESSAGES) or getattr(node, "name", "") == "__post_init__"
        said |= isinstance(node, ast.Call) and "warn" in ast.unparse(node.func)
        said |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        aside += [node] if said else []
        lines |= {line for n in aside for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
        if isinstance(node, ast.If) and any(isinstance(n, ast.Raise) for n in node.body):
            lines |= set(range(node.lineno, node.body[-1].end_lineno + 1))
    return lines


def fresh(count, seed):
    """So many faults of the mutation library, drawn over the rooms' code."""
    from cosmic_ray.ast import Visitor, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    class Places(Visitor):
        def __init__(self, operator):
            self.operator, self.lines = operator, []

        def visit(self, node):
            self.lines += [start[0] for start, _ in self.operator.mutation_positions(node)]
            return node

    names = [n for n in operator_names() if "Variable" not in n and "Decorator" not in n]
    chance, out = random.Random(seed), []
    files = [p for room in ROOMS for p in sorted((ROOT / "pflcore" / room).rglob("*.py"))]
    weight = [p.stat().st_size for p in files]
    while len(out) < count:
        (path,), name = chance.choices(files, weight), chance.choice(names)
        source = path.read_text(encoding="utf-8")
        operator = get_operator(name)()
        places, aside = Places(operator), messages(source)
        places.walk(get_ast(source))
        fitting = [k for k, line in enumerate(places.lines) if line not in aside]
        if fitting:
            k = chance.choice(fitting)
            fault = {
                "where": str(path.relative_to(ROOT)),
                "line": places.lines[k],
                "new": name.removeprefix("core/"),
            }
            out.append({**fault, "kind": "fresh", "source": mutate_code(source, operator, k)})
    return out


# the tests of a line --------------------------------------------------------


def record(suite):
    """Plays a suite under coverage: which tests reach which lines, and the seconds that they
    take."""
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "rc").write_text(
        f"[run]\nbranch = False\nsource = {ROOT / 'pflcore'}, "
        f"{ROOT / 'bench' / 'papers'}\ndata_file = {KEPT / suite}.coverage\n"
    )
    words = f"--suite {suite} -n 2 -p no:randomly --cov --cov-context=test --cov-report=".split()
    words.append(f"--cov-config={KEPT / 'rc'}")
    done = pytest(ROOT, [*words, f"--junitxml={KEPT / suite}.xml"], {})
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])


def pytest(place, words, env, seconds=None):
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", **env}
    words = ["-m", "pytest", "-p", "no:cacheprovider", *words]
    return ran(*words, cwd=place, env=env, timeout=seconds)


class Reached:
    """The tests of each line, the quickest first."""

    def __init__(self, suite):
        from coverage import CoverageData

        self.data = CoverageData(str(KEPT / f"{suite}.coverage"))
        self.data.read()
        self.seconds = {}
        for case in xml.parse(KEPT / f"{suite}.xml").iter("testcase"):
            self.seconds[f"{case.get('classname')}::{case.get('name')}"] = float(case.get("time"))

    def cost(self, test):
        file, _, name = test.partition("::")
        return self.seconds.get(f"{file.removesuffix('.py').replace('/', '.')}::{name}", 1.0)

    def tests(self, path, first, last):
        lines = self.data.contexts_by_lineno(str(path))
        some = {c for n in range(first, last + 1) for c in lines.get(n, [])} - {""}
        if not some:  # of a line that runs when the module is imported: whoever uses the module
            some = {c for contexts in lines.values() for c in contexts} - {""}
        tests = sorted({c.rpartition("|")[0] for c in some}, key=self.cost)
        spent = list(accumulate(map(self.cost, tests)))
        return tests[: max(1, bisect(spent, TRIED))]


# one fault ------------------------------------------------------------------


def copied(to):
    for name in ("pflcore", "tests", "bench", "csrc", "docs", "examples", ".ci"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to)
    return to


def compiled(place):
    env = {
        "MAX_JOBS": "2",
        **os.environ,
        "PFLCORE_EXT": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return ran(*["setup.py", "-q", "build_ext", "--inplace"], cwd=place, env=env).returncode == 0


def tried(fault, place, reached):
    """The suite that kills it, "survived", or "broken" where it cannot be tried."""
    drawn = fault["kind"] == "fresh"
    path = ROOT / fault["where"] if drawn else path_of(fault)
    python, kernels = path.suffix == ".py", fault["where"].startswith(("csrc/cpu", "csrc/chain"))
    here, source = place / path.relative_to(ROOT), path.read_text(encoding="utf-8")
    line = fault.get("line")
    first, last, text = (line, line, fault["source"]) if drawn else placed(fault, source)
    here.write_text(text, encoding="utf-8")
    env = {"PFLCORE_KERNELS": "0" if fault.get("references") else "1"}
    try:
        if kernels and not compiled(place):
            return "broken"
        for suite in SUITES:
            tests = COMPILED if kernels else ["tests/internal/cuda_on_cpu"]
            tests = reached[suite].tests(path, first, last) if python else tests
            words = f"--suite {suite if python else 'all'} -x -q --tb=line -p no:randomly".split()
            # in a file: they may be too many for a command
            (place / "tried.txt").write_text("\n".join(tests), encoding="utf-8")
            try:
                done = pytest(place, [*words, "@tried.txt"], env, SECONDS) if tests else None
                code = done.returncode if done else 0
            except subprocess.TimeoutExpired:
                return suite  # it runs for ever, or far longer than it should
            if code not in (0, 5):
                return suite
        return "survived"
    finally:
        here.write_text(source, encoding="utf-8")
        if kernels:
            os.utime(here)
            shutil.copy2(ROOT / "pflcore" / "lib_pflcore.so", place / "pflcore")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--fresh", type=int, default=0, help="so many that a library draws, not the table's")
    option("--seed", default=time.strftime("%Y-%m-%d"))
    option("--only", default="", help="a regular expression: faults in these places")
    option("--minutes", type=float, default=60, help="what is not tried by then is said")
    option("--survivors", type=int, default=0, help="so many are no failure")
    option("--record", action="store_true", help="play the suites under coverage again")
    given = parser.parse_args()
    if old := stale(known()):
        print("\n".join(old))
        return 2
    start, faults = time.monotonic(), fresh(given.fresh, given.seed) if given.fresh else known()
    faults = [f for f in faults if re.search(given.only, f"{f['where']} {f['new']}")]
    for suite in SUITES:
        if given.record or not (KEPT / f"{suite}.coverage").exists():
            record(suite)
    reached, places = {s: Reached(s) for s in SUITES}, Queue()
    count = dict.fromkeys((*SUITES, "survived", "broken", "untried"), 0)
    for i in range(2):
        shutil.rmtree(KEPT / str(i), ignore_errors=True)
        places.put(copied(KEPT / str(i)))

    def one(fault):
        place = places.get()
        late = time.monotonic() - start > 60 * given.minutes
        verdict = "untried" if late else tried(fault, place, reached)
        places.put(place)
        count[verdict] += 1
        place = f"{fault['where']}:{fault.get('line', '')}"
        print(f"{verdict:8} {place} {fault['new'][:100]!r}", flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, faults))
    said = ", ".join(f"{n} {verdict}" for verdict, n in count.items())
    minutes = (time.monotonic() - start) / 60
    print(f"{len(faults)} faults (seed {given.seed}): {said}, in {minutes:.0f} minutes")
    return int(count["survived"] + count["broken"] > given.survivors)


if __name__ == "__main__":
    raise SystemExit(main())

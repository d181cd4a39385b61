"""Tests of the CPU kernels under the address and thread sanitizers.

A plain C++ program runs the kernels. `.ci/clang` runs the same program under clang's
sanitizer of undefined behaviour.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from internal.sanitize import problems
from places import ROOT

# Two sanitizers in one program take longer than in two programs.
KINDS = "address", "thread"
COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[0]) or shutil.which("c++")
FLAGS = "-std=c++20 -O0 -g1 -w -fno-sanitize-recover=all -DPFL_SMALL_PIECES -pthread"

pytestmark = [
    pytest.mark.long("kernels are compiled for minutes"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def ran(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, **options)


def build(kind, to):
    """The program with a sanitizer, or the reason why there is none."""
    build = [
        COMPILER,
        *FLAGS.split(),
        f"-fsanitize={kind}",
        "-I",
        ROOT / "csrc",
        "-o",
        to,
    ]
    empty = to.with_suffix(".cpp")
    empty.write_text("int main() {}\n")
    if ran(*build, empty).returncode or ran(to).returncode:
        return f"the compiler has no runtime for -fsanitize={kind}"
    isas = sorted(
        p for p in (ROOT / "csrc" / "chain").glob("*.cpp") if p.stem != "chain"
    )
    done = ran(*build, Path(__file__).with_name("kernels.cpp"), *isas)
    assert done.returncode == 0, done.stderr[-4000:]
    return to


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs one of the programs on all problems.

    The programs are compiled two at a time.
    """
    to = tmp_path_factory.mktemp("kernels")
    with ThreadPoolExecutor(2) as pool:
        built = {kind: pool.submit(build, kind, to / kind) for kind in KINDS}
        problems.write(to / "problems")

    def run(kind, *words, **options):
        program = built[kind].result()
        if isinstance(program, str):
            pytest.skip(program)
        return ran(program, to / "problems", *words, timeout=600, **options)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_clean(run, kind):
    done = run(kind)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "plain" in done.stdout


@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [("address", "short", "AddressSanitizer"), ("thread", "race", "data race")],
)
def test_the_sanitizer_sees_a_fault(run, kind, fault, said):
    """The sanitizers see a row that is too short, and a race.

    The race is a result that two threads write. Without this test, the test above might
    be unable to fail.

    The program has no AVX, because gcc's thread sanitizer does not see stores of 32
    bytes. The work is cut into the same pieces on each instruction set.
    """
    done = run(kind, fault, env={**os.environ, "PFLCORE_ISA": "plain"})
    assert done.returncode != 0
    assert said in done.stderr

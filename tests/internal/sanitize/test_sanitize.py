"""The CPU kernels under the address, undefined-behaviour and thread sanitizers, driven by a plain
C++ program (tests/internal/sanitize)."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from places import ROOT

# the one that compiles longest first; two of them in one program take longer than apart
KINDS = "undefined", "address", "thread"
COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[0]) or shutil.which("c++")

pytestmark = [
    pytest.mark.deep("a compiler"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def build(kind, to, *defines):
    """The program built with a sanitizer, or why it cannot be."""
    flags = [
        "-std=c++20",
        "-O0",
        "-g1",
        "-w",
        f"-fsanitize={kind}",
        "-fno-sanitize-recover=all",
        "-pthread",
    ]
    empty = to / "empty.cpp"
    empty.write_text("int main() {}\n")
    assert COMPILER is not None
    probe = subprocess.run(
        [COMPILER, *flags, str(empty), "-o", str(to / "empty")], capture_output=True, text=True
    )
    if probe.returncode or subprocess.run([to / "empty"], capture_output=True).returncode:
        return f"the compiler has no runtime for -fsanitize={kind}"
    program = to / "kernels"
    csrc, here = ROOT / "csrc", Path(__file__).parent
    isas = sorted(p for p in (csrc / "chain").glob("*.cpp") if p.stem != "chain")
    files = [here / "kernels.cpp", *isas]
    source = [*flags, *defines, "-DPFL_SMALL_PIECES", "-I", str(csrc), *map(str, files)]
    done = subprocess.run([COMPILER, *source, "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The programs, compiled two at a time."""
    with ThreadPoolExecutor(2) as pool:
        built = {kind: pool.submit(build, kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    return {kind: b.result() for kind, b in built.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_clean(programs, kind):
    program = programs[kind]
    if isinstance(program, str):
        pytest.skip(program)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "plain" in done.stdout


@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [("address", "short", "AddressSanitizer"), ("thread", "race", "data race")],
)
def test_the_sanitizer_sees_a_fault(programs, kind, fault, said):
    """A row one element short, and a result written by two threads: or the test above could not
    fail.

    Without AVX: gcc's thread sanitizer does not see stores of 32 bytes. How work is cut into pieces
    is the same on every instruction set.
    """
    program = programs[kind]
    if isinstance(program, str):
        pytest.skip(program)
    done = subprocess.run(
        [program, fault],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PFLCORE_ISA": "plain"},
    )
    assert done.returncode != 0
    assert said in done.stderr

"""How the kernels are built: what a failed build says, and for which cards CUDA kernels are made where no card is seen."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SETUP = importlib.util.spec_from_file_location("pflcore_setup", ROOT / "setup.py")


@pytest.fixture
def setup():
    pytest.importorskip("setuptools")
    module = importlib.util.module_from_spec(SETUP)
    SETUP.loader.exec_module(module)
    return module


def script(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler to fail")
@pytest.mark.parametrize("want", ["auto", "cpu"])
def test_a_failed_build_names_its_cause(tmp_path, want):
    """Not "error compiling objects", nor a compiler that is missing: what the compiler itself says, to whoever asks later, too."""
    for module in ("setuptools", "ninja"):
        pytest.importorskip(module)
    broken = script(
        tmp_path / "c++", 'case "$*" in *--version*|*-dumpfullversion*) exec c++ "$@";; esac', "echo '<>: error: no room left' >&2; exit 1"
    )
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path / "b", "--build-lib", tmp_path / "lib"]
    environment = {
        **os.environ,
        "CXX": broken,
        "CC": broken,
        "PFLCORE_EXT": want,
        "PFLCORE_KERNELS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    last = done.stderr.strip().splitlines()[-1]
    assert "<>: error: no room left" in last, done.stderr[-2000:]
    assert (done.returncode == 0) == (want == "auto")
    if want == "auto":
        # an editable install would lend the kernels of its own folder
        alone = "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder)]; "
        ask = [sys.executable, "-c", alone + "import pflcore; print(pflcore.backend())"]
        environment["PYTHONPATH"] = str(tmp_path / "lib")
        said = subprocess.run(ask, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.startswith("references, ") and "no room left" in said


def test_the_cause_is_the_first_complaint(setup, tmp_path):
    log = tmp_path / "log"
    log.write_text("[1/2] c++ -Werror x.cpp\nx.cpp:3: error: 'y' was not declared\nx.cpp:9: error: another\nninja: build stopped\n")
    assert setup.cause(RuntimeError("Error compiling objects"), log) == "x.cpp:3: error: 'y' was not declared"
    log.write_text("")
    assert setup.cause(RuntimeError("no luck\nat all"), log) == "no luck" and setup.cause(KeyError(), log) == "KeyError"


def test_cards_that_the_compiler_knows(setup, tmp_path):
    script(tmp_path / "bin" / "nvcc", "echo compute_50; echo compute_75; echo compute_80; echo compute_90; echo compute_120")
    assert setup.card_list(str(tmp_path)) == "7.5;8.0;9.0;12.0+PTX"
    script(tmp_path / "bin" / "nvcc", "exit 1")
    assert setup.card_list(str(tmp_path)) == "8.0;9.0+PTX"

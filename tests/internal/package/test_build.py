"""Tests of the build of the kernels.

They cover the message of a failed build, and the GPUs for which a build without a GPU
makes CUDA kernels.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT, ran

from pflcore.ops import _library as library

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


def built(tmp_path, compiler, **environment):
    """A build by another compiler into tmp_path / "lib", and its environment."""
    for module in ("setuptools", "ninja"):
        pytest.importorskip(module)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "CXX": compiler,
        "CC": compiler,
        "PATH": path,
        **environment,
    }
    words = [
        "-q",
        "build",
        "--build-base",
        tmp_path / "b",
        "--build-lib",
        tmp_path / "lib",
    ]
    return ran("setup.py", *words, env=environment, timeout=300), environment


@pytest.mark.deep("a compiler")
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler to fail")
@pytest.mark.parametrize("want", ["auto", "cpu"])
def test_a_failed_build_names_its_cause(tmp_path, want):
    """The message is the compiler's own, also at later calls.

    It is neither "error compiling objects" nor a claim that the compiler is missing.
    """
    broken = script(
        tmp_path / "c++",
        'case "$*" in *--version*|*-dumpfullversion*) exec c++ "$@";; esac',
        "echo '<>: error: no room left' >&2; echo '<>: error: another' >&2; exit 1",
    )
    done, environment = built(tmp_path, broken, PFLCORE_EXT=want, PFLCORE_KERNELS="1")
    last = done.stderr.strip().splitlines()[-1]
    assert "<>: error: no room left" in last, done.stderr[-2000:]
    assert (done.returncode == 0) == (want == "auto")
    if want == "auto":
        environment["PYTHONPATH"] = str(tmp_path / "lib")
        asked = "import pflcore; print(pflcore.backend())"
        said = ran("-c", asked, cwd=tmp_path, env=environment).stdout
        assert said.startswith("references, ") and "no room left" in said


@pytest.mark.deep("a compiler")
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_kernels_without_the_module(tmp_path):
    """The kernels load where the Python module could not be built.

    This happens, for example, without Python's headers. The compiler of this test has
    only empty sources.
    """
    (tmp_path / "empty.cpp").touch()
    headless = script(
        tmp_path / "c++",
        'case "$*" in *module.cpp*) echo "<>: fatal error: Python.h: no such file" '
        ">&2; exit 1;; esac",
        'for word in "$@"; do shift; case "$word" in *.cpp) word='
        + str(tmp_path / "empty.cpp")
        + ';; esac; set -- "$@" "$word"; done',
        f'exec {shutil.which("c++")} "$@"',
    )
    done, _ = built(tmp_path, headless, PFLCORE_EXT="cpu")
    assert done.returncode == 0 and "pflcore: built CPU kernels" in done.stderr, (
        done.stderr[-2000:]
    )
    assert (
        "module of facts cannot be built here: <>: fatal error: Python.h" in done.stderr
    )
    made = (tmp_path / "lib" / "pflcore").iterdir()
    assert {p.name for p in made if p.suffix in (".so", ".failed")} == {
        "lib_pflcore.so"
    }


def test_a_wheel_without_the_module_is_for_every_python(setup, monkeypatch):
    from setuptools import Distribution

    monkeypatch.setattr(setup, "WANT", "cpu")
    for module in (True, False):
        monkeypatch.setattr(setup, "MODULE", module)
        given = setup.extension()
        made = [ext.name for ext in given["ext_modules"]]
        assert made == ["pflcore.lib_pflcore", "pflcore._C"][: 1 + module]
        package = Distribution({"name": "pflcore", "ext_modules": given["ext_modules"]})
        wheel = given["cmdclass"]["bdist_wheel"](package)
        wheel.finalize_options()
        python, abi, platform = wheel.get_tag()
        assert platform != "any"
        assert python.startswith("cp") if module else (python, abi) == ("py3", "none")


OTHER = (
    "void torch_of_another_time(); void* pflcore_built() { "
    "torch_of_another_time(); return 0; }"
)


@pytest.mark.parametrize("code", [None, OTHER, ""])
def test_a_library_that_does_not_fit_is_refused_in_one_sentence(
    code, tmp_path, monkeypatch
):
    """Three files are refused.

    One is no library, one needs functions that this torch lacks, and one is the library
    of another program.
    """
    file = tmp_path / "lib_pflcore.so"
    monkeypatch.setattr(library, "LIBRARY", file)
    monkeypatch.setenv("PFLCORE_KERNELS", "1")
    if code is None:
        file.write_bytes(b"nothing")
    else:
        source = tmp_path / "x.cpp"
        source.write_text(f'extern "C" {{ {code} }}')
        compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", file], check=True)
    kernels, why, fix = library._load()
    assert kernels is None and fix == library.REINSTALL
    lacks = {None: "", "": "pflcore_built"}.get(code, "torch_of_another_time")
    assert (
        why.startswith("the kernels do not load with this torch (") and "\n" not in why
    )
    assert str(file) in why and lacks in why


@pytest.fixture
def without_library(monkeypatch, tmp_path):
    """The folder of a pflcore without kernels, which is imported."""
    package = tmp_path / "checkout" / "pflcore"
    package.mkdir(parents=True)
    monkeypatch.setattr(library, "LIBRARY", package / "lib_pflcore.so")
    monkeypatch.setenv("PFLCORE_KERNELS", "1")
    monkeypatch.setattr(sys, "path", [str(package.parent)])
    return package.parent


@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("failed", ["", "no compiler"])
def test_a_checkout_names_the_kernels_that_it_hides(
    by_variable, failed, without_library, tmp_path, monkeypatch
):
    site = tmp_path / "site-packages"
    (site / "pflcore").mkdir(parents=True)
    (site / "pflcore" / "lib_pflcore.so").write_bytes(b"")
    sys.path.append(str(site))
    if failed:
        library.LIBRARY.with_suffix(".failed").write_text(failed)
    if by_variable:
        monkeypatch.setenv("PYTHONPATH", str(without_library))

    kernels, why, fix = library._load()

    assert kernels is None and failed in why
    assert f"the pflcore in {without_library} hides the installed one in {site}" in why
    way = f"take {without_library} out of PYTHONPATH"
    assert fix.startswith(way if by_variable else "start Python in another folder")
    assert fix.endswith(library.REINSTALL)


def test_a_checkout_that_hides_no_kernels_names_none(without_library, tmp_path):
    (tmp_path / "site-packages" / "pflcore").mkdir(parents=True)
    sys.path.append(str(tmp_path / "site-packages"))
    _, why, fix = library._load()
    assert "hides" not in why and fix == library.REINSTALL


@pytest.mark.parametrize("version", ["2.9.1+cpu", "3.0.0", "1.13"])
def test_a_torch_outside_of_the_range_gets_references(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("PFLCORE_KERNELS", "1")
    assert library._load() == (None, "the kernels need torch >= 2.10 and < 3", None)


def test_cards_that_the_compiler_knows(setup, tmp_path):
    script(
        tmp_path / "bin" / "nvcc",
        "echo compute_50; echo compute_75; echo compute_80; echo compute_90; echo "
        "compute_120",
    )
    assert setup.card_list(str(tmp_path)) == "7.5;8.0;9.0;12.0+PTX"
    script(tmp_path / "bin" / "nvcc", "exit 1")
    assert setup.card_list(str(tmp_path)) == "8.0;9.0+PTX"


@pytest.mark.parametrize("want", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("asks", [None, "card", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"])
def test_cuda_is_compiled_where_a_card_is_seen_or_it_is_asked_for(
    setup, monkeypatch, want, asks
):
    monkeypatch.setattr(setup, "WANT", want)
    monkeypatch.setattr(setup, "cuda_home", lambda *_: "/home/of/nvcc")
    monkeypatch.setattr(setup, "card_list", lambda home: "9.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asks == "card")
    monkeypatch.chdir(ROOT)
    for name in ("FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    if asks not in (None, "card"):
        monkeypatch.setenv(asks, "1")
    sources = setup.extension()["ext_modules"][0].sources
    cuda = want == "cuda" or (want == "auto" and asks is not None)
    assert any(name.endswith(".cu") for name in sources) == cuda

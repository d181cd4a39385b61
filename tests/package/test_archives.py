"""The source archive holds every kernel file, and the wheel runs.

The wheel holds the package alone.
"""

import os
import re
import shutil
import tarfile
import zipfile

import pytest
from places import ROOT, ran

import pflcore

KERNELS = {
    str(p.relative_to(ROOT))
    for p in (ROOT / "csrc").rglob("*")
    if p.suffix in {".h", ".cpp", ".cuh", ".cu"}
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of an archive and a wheel without kernels."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("csrc", "pflcore", "bench"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    code = (
        "from setuptools import build_meta as b; b.build_sdist('dist'); "
        "b.build_wheel('dist')"
    )
    env = {**os.environ, "PFLCORE_EXT": "0"}
    run = ran("-c", code, cwd=folder, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    return folder / "dist"


def test_the_citation_has_the_version_of_the_package():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {pflcore.__version__}\n" in citation


@pytest.mark.deep("a wheel is built")
def test_the_source_archive_holds_every_kernel_file(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert names >= KERNELS and "setup.py" in names


@pytest.mark.deep("a wheel is built")
def test_the_wheel_holds_no_benchmark_needs_four_packages_and_runs(built, tmp_path):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path)
    assert not [n for n in names if n.startswith(("bench", "tests", "csrc"))]
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    needs = re.findall(
        r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata.read_text(), re.M
    )
    assert {*needs} == {"torch", "numpy", "safetensors", "annotated-types"}
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PFLCORE_KERNELS": "0"}

    listing = ran("-m", "pflcore", "reproduce", "--list", cwd=tmp_path, env=env)
    assert listing.returncode == 2
    assert "in a checkout of pflcore" in listing.stderr

    command = "-m pflcore run fedavg --data digits --rounds 1 --quiet --out out"
    run = ran(*command.split(), cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "out" / "record.jsonl").is_file()

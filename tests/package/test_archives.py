"""The source archive holds every kernel file, and the wheel runs.

The wheel holds the package alone.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest
from parts.requirements import (
    REQUIRED_ALONE,
    listed_requirements,
    required_distributions,
)
from places import ROOT, ran

import pflcore

KERNELS = {
    str(p.relative_to(ROOT))
    for p in (ROOT / "csrc").rglob("*")
    if p.suffix in {".h", ".cpp", ".cuh", ".cu"}
}


def copy_sources(folder):
    """Copies into a folder what an archive, a wheel or an image is made of."""
    for name in ("csrc", "pflcore", "bench"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of an archive and a wheel without kernels."""
    folder = tmp_path_factory.mktemp("package")
    copy_sources(folder)
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
    assert "run `pflcore reproduce` there" in listing.stderr
    script = tmp_path / "command.py"
    script.write_text(
        "import pflcore, sys; from pflcore.lab.cli import main; status = main(); "
        "print(pflcore.__file__); sys.exit(status)"
    )
    beside = ran(script, "reproduce", "--list", cwd=ROOT, env=env)
    assert beside.returncode == 0, beside.stderr
    assert "feddwa-table4" in beside.stdout
    assert beside.stdout.splitlines()[-1].startswith(str(tmp_path))

    command = "-m pflcore run fedavg --data digits --rounds 1 --quiet --out out"
    run = ran(*command.split(), cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "out" / "fedavg-seed0" / "record.jsonl").is_file()


@pytest.mark.deep("a wheel is built")
def test_the_index_would_take_the_archives(built):
    """`twine check` reads the metadata and the README as an index does."""
    pytest.importorskip("twine")
    done = ran("-m", "twine", "check", "--strict", *map(str, built.iterdir()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


# Adds a folder of packages that are imported from it, and never changed.
BORROWED = (
    "import sys; sys.dont_write_bytecode = True; sys.path.append(sys.argv.pop(1))"
)
PLAYED = """
import torch, pflcore
rows = torch.randn(4, 9)
near = pflcore.feddwa_weights(pflcore.pairwise_sqdist(rows), 2)
print(tuple(pflcore.aggregate(rows, *near).shape), pflcore.__file__)
from pflcore.lab.cli import main
main(["info"])
"""


@pytest.mark.long("a wheel is built, and environments are made")
@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_an_archive_is_installed_where_nothing_else_is(built, kind, tmp_path):
    """The wheel and the source archive run with the required packages alone.

    A new environment holds what pip installs from the archive, without its
    requirements. The program imports these from this environment, and pip never sees
    them, so that it cannot change them.
    """
    (path,) = built.glob(f"*.{kind}")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if kind == "tar.gz":
        shutil.unpack_archive(path, tmp_path)
        code = "from setuptools import build_meta as b; b.build_wheel('../dist')"
        (folder,) = tmp_path.glob("pflcore-*")
        run = ran("-c", code, cwd=folder, env={**env, "PFLCORE_EXT": "0"})
        assert run.returncode == 0, run.stderr[-2000:]
        (path,) = (tmp_path / "dist").glob("*.whl")
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "venv", "venv"], check=True, **options)
    python = tmp_path / "venv" / "bin" / "python"
    words = ["-m", "pip", "install", "--no-deps", "--no-index", str(path)]
    done = subprocess.run([python, *words], check=False, **options)
    assert done.returncode == 0, done.stderr

    packages = sysconfig.get_path("purelib")
    allowed = required_distributions(listed_requirements("dependencies"))
    code = "\n".join([BORROWED, REQUIRED_ALONE, PLAYED])
    words = ["-c", code, packages, "pflcore", *allowed]
    played = subprocess.run([python, *words], check=False, **options)

    assert played.returncode == 0, played.stderr
    assert played.stdout.startswith(f"(4, 9) {tmp_path}")
    assert re.search(r"^\[cli\] +without tyro, .*tqdm.*: ", played.stdout, re.M)

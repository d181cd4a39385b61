"""Commands that pflcore advises work in the way in which it was installed."""

import importlib.util
import json
import shlex

import pytest
import torch

import pflcore
from pflcore import _install as install
from pflcore.cli import EXTRAS, main
from pflcore.ops import _library as library


class Distribution:
    """What an installer notes of a package in a folder of packages."""

    def __init__(self, site, installer="pip\n", **origin):
        self.site = site
        self.files = {"INSTALLER": installer}
        if origin:
            self.files["direct_url.json"] = json.dumps(origin)

    def read_text(self, name):
        return self.files.get(name)

    def locate_file(self, path):
        return self.site / path


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretends that pflcore was installed into a folder of packages."""
    site = tmp_path / "site-packages"
    (site / "pflcore").mkdir(parents=True)
    monkeypatch.setattr(install, "PACKAGE", site / "pflcore")

    def pretend(pip=True, **facts):
        found = {"pflcore": Distribution(site, **facts)}
        if pip:
            found["pip"] = Distribution(site)
        monkeypatch.setattr(install, "_find", found.get)

    pretend()
    return pretend


def sources(folder):
    (folder / "pflcore").mkdir(parents=True)
    (folder / "setup.py").write_text("")
    return folder


def test_a_checkout_is_installed_anew_in_place(tmp_path, monkeypatch):
    checkout = sources(tmp_path / "my checkout")
    monkeypatch.setattr(install, "PACKAGE", checkout / "pflcore")
    words = shlex.split(install.reinstall_command())
    assert words[-2:] == ["-e", str(checkout)]
    assert words[-4:-2] == ["--force-reinstall", "--no-deps"]


def test_this_checkout_is_named():
    folder = install.source_folder()
    assert folder is None or (folder / "setup.py").is_file()


@pytest.mark.parametrize("name", ["code", "my code", "ordner-ä"])
def test_a_folder_that_was_installed_is_named(name, installed, tmp_path):
    folder = sources(tmp_path / name)
    installed(url=folder.as_uri(), dir_info={})
    words = shlex.split(install.reinstall_command())
    assert words == ["pip", "install", "--force-reinstall", "--no-deps", str(folder)]


ORIGINS = {
    "an index": {},
    "a wheel": {"url": "file:///nowhere/pflcore-0.1.0.whl", "archive_info": {}},
    "a repository": {"url": "https://example.org/pflcore.git", "vcs_info": {}},
    "a folder that is gone": {"url": "file:///nowhere", "dir_info": {}},
}


@pytest.mark.parametrize("name", ORIGINS)
def test_without_a_folder_the_command_is_one_for_the_sources(name, installed):
    installed(**ORIGINS[name])
    assert install.reinstall_command() == (
        "pip install --force-reinstall --no-deps . (in the folder of pflcore's sources)"
    )


def test_another_copys_notes_do_not_count(installed, tmp_path, monkeypatch):
    folder = sources(tmp_path / "other")
    other = Distribution(tmp_path / "elsewhere", "uv", url=folder.as_uri())
    found = {"pflcore": other, "pip": other}
    monkeypatch.setattr(install, "_find", found.get)
    assert install.source_folder() is None
    assert install.install_command("tyro") == "pip install tyro"


def test_uv_is_named_where_it_installs(installed):
    installed(installer="uv")
    assert install.install_command("tyro", "tqdm") == "uv pip install tyro tqdm"
    assert install.reinstall_command().startswith("uv pip install --force-reinstall")


def test_uv_is_named_where_there_is_no_pip(installed):
    installed(pip=False)
    assert install.install_command("sklearn") == "uv pip install scikit-learn"


def test_a_package_that_is_not_installed_is_no_error():
    assert install._find("no-such-package-of-pflcore") is None


def warning(capsys):
    """The line of `pflcore info` that warns; None without it."""
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return next((line for line in lines if line.startswith("warning")), None)


@pytest.mark.skipif(library.kernels is None, reason="the kernels are not loaded")
def test_info_warns_where_torch_is_another(monkeypatch, capsys):
    built = library.kernels.pflcore_built().decode().split()[-1]
    monkeypatch.setattr(torch, "__version__", f"{built}+cpu")
    assert warning(capsys) is None

    monkeypatch.setattr(torch, "__version__", "2.99.0+cu130")

    line = warning(capsys)
    assert f"built against torch {built}, and torch 2.99.0+cu130 is here" in line
    assert line.endswith(install.reinstall_command())


def test_info_does_not_warn_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(library, "kernels", None)
    assert warning(capsys) is None
    assert pflcore.backend().kernels is False


def test_info_knows_every_extra(capsys, monkeypatch):
    tomllib = pytest.importorskip("tomllib")
    requirements = pytest.importorskip("packaging.requirements")
    with open(install.PACKAGE.parent / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    asked = {}
    for extra, lines in extras.items():
        wanted = [requirements.Requirement(line) for line in lines]
        asked[extra] = {w.name for w in wanted if applies(w)}
    advised = {}
    for extra, modules in EXTRAS.items():
        names = [install.PIP_NAMES.get(module, module) for module in modules]
        found = [requirements.Requirement(name.strip("'").split()[0]) for name in names]
        names = {w.name.replace("_", "-") for w in found}
        advised[extra] = names - {"tomllib"}  # a part of Python
    assert advised == asked

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"[hf]        without datasets: {install.installer()} datasets\n" in out
    assert all(f"[{extra}]" in out for extra in extras)


def applies(requirement):
    """True where a requirement is one of this Python."""
    return requirement.marker is None or requirement.marker.evaluate()

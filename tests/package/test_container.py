"""The Dockerfile's commands install pflcore where nothing else is."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import PurePosixPath

import pytest
from places import ROOT

import pflcore

PLAYED = ("pip", "pflcore")


def instructions():
    """The Dockerfile as pairs of an instruction and its text on one line."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line]


def commands(text):
    """Yields the words of each command of a RUN line, without its variables."""
    for part in text.split("&&"):
        words = shlex.split(re.sub(r"\$\{\w+:\+.*?\}", "", part))  # not set
        while re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        yield words


def played_commands(text):
    return [words for words in commands(text) if words[0] in PLAYED]


def texts_of(name):
    return [text for instruction, text in instructions() if instruction == name]


def test_torch_for_cpus_is_installed_before_pflcore():
    pips = [words for text in texts_of("RUN") for words in played_commands(text)]
    torch, package = pips
    assert torch[:2] == package[:2] == ["pip", "install"]
    assert {"torch", "torchvision"} <= {*torch}
    assert package[-1].startswith(".[")
    assert "PFLCORE_EXT=cpu pip" in texts_of("RUN")[1]  # fails without kernels


def test_the_image_is_slim_and_shows_info_to_a_user_that_is_not_root():
    names = [instruction for instruction, _ in instructions()]
    assert re.fullmatch(r"python:3\.\d+-slim", texts_of("FROM")[0])
    assert texts_of("USER") == ["pflcore"]
    assert "useradd --create-home pflcore" in texts_of("RUN")
    assert "RUN" not in names[names.index("USER") :]
    assert json.loads(texts_of("CMD")[0]) == ["pflcore", "info"]


def test_only_what_is_copied_is_sent_to_the_builder():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    copied = [name for text in texts_of("COPY") for name in text.split()[:-1]]

    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == {*copied}
    assert {"**/*.so", "**/__pycache__"} <= {*rules}
    assert all((ROOT / name).exists() for name in copied)


class Image:
    """A folder and an environment that stand for an image."""

    def __init__(self, folder):
        self.root = folder / "image"
        self.workdir = self.root
        self.workdir.mkdir()
        self.bin = folder / "venv" / "bin"
        dropped = ("PYTHON", "PFLCORE", "VIRTUAL_ENV")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self.env = {**kept, "PATH": path, "PFLCORE_EXT": "0"}
        words = [sys.executable, "-m", "venv", str(folder / "venv")]
        subprocess.run(words, check=True, env=self.env)
        # It finds the packages of the tests' environment, by a path and not by links:
        # pip neither removes nor overwrites what lies outside of an environment.
        (found,) = (folder / "venv").glob("lib/python*/site-packages")
        outside = sysconfig.get_path("purelib")
        (found / "outside.pth").write_text(f"{outside}\n", encoding="utf-8")

    def place(self, path):
        """The place of a path of the image."""
        if PurePosixPath(path).is_absolute():
            return self.root / path.lstrip("/")
        return self.workdir / path

    def copy(self, text):
        *names, target = text.split()
        for name in names:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
                shutil.copytree(source, self.place(target), ignore=ignored)
            else:
                shutil.copy(source, self.place(target))

    def run(self, words):
        """The finished process of a command of pip, pflcore or Python."""
        program = [str(self.bin / words[0]), *words[1:]]
        options = {"cwd": self.workdir, "env": self.env, "check": False}
        return subprocess.run(program, capture_output=True, text=True, **options)

    def torch_version(self):
        code = "import torch; print(torch.__version__, torch.version.cuda)"
        return self.run(["python", "-c", code]).stdout.split()


@pytest.mark.long("a new environment")
def test_its_pip_and_pflcore_commands_work_in_a_new_environment(tmp_path):
    """COPY lines, pip's and pflcore's commands are played in order.

    The environment is new, and a temporary folder takes the place of the image. It
    finds torch and the other packages of the tests' environment, so that no gigabytes
    are downloaded. Commands of other programs, such as apt-get and useradd, are left
    out. PFLCORE_EXT is 0 in place of the Dockerfile's cpu: other tests compile kernels.
    """
    image = Image(tmp_path)
    before = image.torch_version()
    for instruction, text in instructions():
        if instruction == "WORKDIR":
            image.workdir = image.place(text)
            image.workdir.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            image.copy(text)
        elif instruction == "RUN":
            for words in played_commands(text):
                done = image.run(words)
                assert done.returncode == 0, done.stderr[-2000:]
        elif instruction == "CMD":
            done = image.run(json.loads(text))

    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["pflcore", pflcore.__version__]
    assert str(tmp_path) in done.stdout  # the package of the new environment
    assert image.torch_version() == before  # pflcore's installation left it alone
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^docker run .* pflcore (pflcore run .*)$", page, re.M)
    done = image.run(shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert list((image.workdir / "runs" / "digits").glob("*/record.jsonl"))

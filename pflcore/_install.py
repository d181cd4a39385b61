"""Commands that install what is missing, as pflcore itself was installed.

No command needs an index that has pflcore: packages of an extra are named themselves,
and pflcore's own sources by their folder. None exchanges the torch that is there.
"""

import importlib.metadata
import json
import os
import re
import shlex
from pathlib import Path

import torch

# The package that pip installs for a module, where it is not the module's name.
PIP_NAMES = {
    "sklearn": "scikit-learn",
    "flwr": "'flwr[simulation]>=1.41,<2'",
    "material": "mkdocs-material",
    "mkdocstrings": "'mkdocstrings[python]'",
    "xdist": "pytest-xdist",
    "pytest": "'pytest<9.2'",
    "twine": "'twine<7'",
    # Without torch's version it would bring another torch.
    "torchvision": f"torchvision torch=={torch.__version__.partition('+')[0]}",
}
PACKAGE = Path(__file__).resolve().parent


def install_command(*modules: str) -> str:
    """The command that installs the packages of these modules."""
    names = [PIP_NAMES.get(name, name) for name in modules]
    return " ".join([installer(), *names])


def reinstall_command() -> str:
    """The command that builds the kernels anew, against the torch that is there.

    It names the folder of sources that pflcore came from. Where that is not known, the
    command is one for the folder of any copy of the sources.
    """
    folder = source_folder()
    command = f"{installer()} --force-reinstall --no-deps"
    if folder is None:
        return f"{command} . (in the folder of pflcore's sources)"
    if folder == PACKAGE.parent:
        command = f"{command} -e"  # the package is used where its sources are
    return f"{command} {shlex.quote(str(folder))}"


def source_folder() -> Path | None:
    """The folder of sources that pflcore was installed from, where it is still there.

    It is a checkout that is used as it is, or the folder that an installer noted.
    """
    if _has_sources(PACKAGE.parent):
        return PACKAGE.parent
    distribution = _distribution()
    if distribution is None:
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    scheme, _, path = origin.get("url", "").partition("://")
    folder = Path(_percent_decoded(path))
    return folder if scheme == "file" and _has_sources(folder) else None


def _percent_decoded(text: str) -> str:
    """A path of a URL, whose "%20" stands for a space, in plain characters."""
    plain = re.sub(
        rb"%([0-9A-Fa-f]{2})",
        lambda match: bytes.fromhex(match[1].decode()),
        text.encode(),
    )
    return os.fsdecode(plain)


def installer() -> str:
    """The start of a command that installs packages for this Python.

    An environment of uv has no pip of its own, so there the `pip` of a shell belongs to
    another Python.
    """
    distribution = _distribution()
    name = ""
    if distribution is not None:
        name = (distribution.read_text("INSTALLER") or "").strip()
    # `find_spec("pip")` would make setuptools leave distutils as it is.
    if name == "uv" or _find("pip") is None:
        return "uv pip install"
    return "pip install"


def _has_sources(folder: Path) -> bool:
    """True where a folder holds what `pip install` builds pflcore from."""
    return (folder / "setup.py").is_file() and (folder / "pflcore").is_dir()


def _distribution() -> importlib.metadata.Distribution | None:
    """Notes of an installer on this package; None for another one of the name."""
    found = _find("pflcore")
    if found is None:
        return None
    place = Path(str(found.locate_file("pflcore"))).resolve()
    return found if place == PACKAGE else None


def _find(name: str) -> importlib.metadata.Distribution | None:
    """Notes of an installer on a package; None where it is not installed."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None

"""The command line of pflcore; `pflcore --help` lists its commands.

An argument that is wrong is reported in one sentence on stderr, with exit code 2,
before anything is computed or written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import platform
import re
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pflcore.algorithms import ALGORITHMS
from pflcore.check import pip_install, require
from pflcore.lab.cli._adapt import adapt
from pflcore.lab.cli._data import data
from pflcore.lab.cli._diff import diff
from pflcore.lab.cli._failure import RunFailed, first_line
from pflcore.lab.cli._options import allow_own_modules
from pflcore.lab.cli._predict import predict
from pflcore.lab.cli._report import report
from pflcore.lab.cli._run import compare, run
from pflcore.lab.cli._tune import tune_command
from pflcore.lab.results._progress import INTERRUPTED
from pflcore.ops import __version__, backend
from pflcore.ops._library import REINSTALL, other_torch
from pflcore.simulation._signals import ENDING_SIGNALS

__all__ = ["main"]
PACKAGE = Path(__file__).resolve().parents[2]
# The modules of each extra of the package.
TOML_READER = "tomllib" if sys.version_info >= (3, 11) else "tomli"
EXTRAS = {
    "cli": ("tyro", "tqdm", "tomli_w", "pandas", "scipy", TOML_READER),
    "data": ("mlxtend", "sklearn", "scipy"),
    "hf": ("datasets",),
    "vision": ("torchvision",),
    "plot": ("matplotlib",),
    "track": ("tensorboard", "wandb", "mlflow"),
    "lora": ("peft", "transformers", "safetensors"),
    "flower": ("flwr",),
    "docs": ("material", "mkdocstrings", "nbclient", "ipykernel", "pandas"),
    "bench": (
        "flwr",
        "pfl",
        "byzfl",
        "scipy",
        "sklearn",
        "pytest",
        "pytest_benchmark",
    ),
    "test": (
        *("flwr", "pytest", "pytest_cov", "pytest_randomly", "xdist", "cosmic_ray"),
        *("hypothesis", "safetensors", "pytest_benchmark", "ruff", "mypy", "twine"),
        *("nbclient", "ipykernel", "datasets", "h5py"),
    ),
}


def info(argv: Sequence[str]) -> int:
    """Prints the versions, kernels, devices and optional packages of this machine."""
    if argv:
        require(argv[0] in ("-h", "--help"), "info", "no options", argv)
        print(inspect.getdoc(info))
        return 0
    gpu = "none that torch sees"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    threads = f"{torch.get_num_threads()} (the machine has {os.cpu_count()} cores)"
    facts: dict[str, Any] = {
        "pflcore": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "threads": threads,
        "GPU": gpu,
    }
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        facts[f"[{extra}]"] = "complete"
        if missing:
            names = ", ".join(missing)
            facts[f"[{extra}]"] = f"without {names}: {pip_install(*missing)}"
    facts["kernels"] = backend()
    other = other_torch()
    if other is not None:
        facts["warning"] = (
            f"the kernels were built against torch {other}, and torch "
            f"{torch.__version__} is here: did another package exchange it? They run "
            f"with any torch from 2.10 on, below 3; to build them for this torch: "
            f"{REINSTALL}"
        )
    for name, fact in facts.items():
        print(f"{name:<10}  {fact}")
    return 0


def _use_sources(command: str) -> None:
    """Lets the package `bench` be imported from a folder of pflcore's sources.

    The folder is the one that this pflcore is used from, else the working directory or
    one above it. The pflcore that runs stays the one that was called. Raises
    ImportError where there is no such folder, and where it is of another version.
    """
    for folder in (PACKAGE.parent, Path.cwd(), *Path.cwd().parents):
        version = _version_of_sources(folder)
        if version is not None:
            break
    else:
        raise ImportError(
            f"{command}: it is part of pflcore's sources and not of the installed "
            f"package, and {Path.cwd()} has no sources; go to a folder with those of "
            f"version {__version__} and run `pflcore {command}` there."
        )
    if version != __version__:
        raise ImportError(
            f"{command}: the sources in {folder} are pflcore {version}, and the "
            f"installed package is pflcore {__version__}; go to sources of that "
            f"version, or install these: pip install {shlex.quote(str(folder))}"
        )
    # At the end, so that nothing of the folder hides what is installed.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _version_of_sources(folder: Path) -> str | None:
    """The version of pflcore's sources in a folder; None where it has none."""
    definition = folder / "pflcore" / "ops" / "__init__.py"
    if not (folder / "bench" / "__main__.py").is_file() or not definition.is_file():
        return None
    found = re.search(
        r'^__version__ = "(.+?)"', definition.read_text(encoding="utf-8"), re.MULTILINE
    )
    return found[1] if found else None


def attack(argv: Sequence[str]) -> int:
    """Tries membership inference and model inversion; in a folder of the sources."""
    _use_sources("attack")
    from bench.papers.attack import main

    return main(argv)


def reproduce(argv: Sequence[str]) -> int:
    """Runs the experiments behind a paper's table; in a folder of the sources."""
    _use_sources("reproduce")
    from bench.papers.run import main

    return main(argv)


def bench(argv: Sequence[str]) -> int:
    """Times the kernels against the best torch call; in a folder of the sources."""
    _use_sources("bench")
    from bench import main

    return main(argv)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "run": ("run ALGORITHM [options]", run),
    "compare": ("compare A B C [options]", compare),
    "report": ("report FOLDER ... [options]", report),
    "data": ("data [NAME] [options]", data),
    "predict": ("predict FOLDER DATA --client NAME [options]", predict),
    "adapt": ("adapt FOLDER DATA [options]", adapt),
    "tune": ("tune ALGORITHM --grid lam=.1,1 [options]", tune_command),
    "diff": ("diff A B", diff),
    "reproduce": ("reproduce NAME [options]", reproduce),
    "attack": ("attack [options]", attack),
    "bench": ("bench [options]", bench),
    "info": ("info", info),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command of the command line and returns its exit code.

    The code is 0 on success, 2 for a wrong argument, 1 for a failure while the command
    runs, and 130 after Ctrl-C.

    Args:
        argv: the words after `pflcore`; None for those of this process
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot display ± gets a question mark.
            stream.reconfigure(errors="replace")
    allow_own_modules(argv)
    try:
        with _signals(), _plain_warnings():
            status = _command(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The program that reads the output has ended, and all files are written by
        # then. Python flushes its output once more at its end, into nothing.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        return _report_error(e)


def _report_error(error: Exception) -> int:
    """Prints an error as one sentence on stderr; returns the exit code."""
    if os.environ.get("PFLCORE_DEBUG"):
        traceback.print_exc()
    is_expected = isinstance(
        error, ValueError | TypeError | ImportError | OSError | MemoryError
    )
    text = first_line(error)
    if not (is_expected or isinstance(error, RunFailed)):
        text = f"{type(error).__name__}: {text}"
    if not (is_expected or isinstance(error.__cause__, OSError)):
        text += " PFLCORE_DEBUG=1 shows where."
    print(f"pflcore: {text}", file=sys.stderr)
    return 2 if is_expected else 1


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does.

    A SIGHUP that nohup has set to be ignored stays ignored.
    """

    def interrupt(*_: object) -> None:
        INTERRUPTED.set()
        raise KeyboardInterrupt

    INTERRUPTED.clear()
    earlier: dict[int, Any] = {}  # the handlers that were there before
    if threading.current_thread() is threading.main_thread():  # as Python demands
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                earlier[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        # If Python code called `main`, the process goes on.
        INTERRUPTED.clear()
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints warnings without the place in the source that they come from."""
    earlier = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"pflcore: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = earlier


def _command(argv: Sequence[str]) -> int:
    """Runs the command that is named, or prints the help.

    Returns the exit code.
    """
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
        return 0 if argv else 2
    name = argv[0]
    words = f"one of {', '.join(COMMANDS)}"
    require(name in COMMANDS, "command", words, name, COMMANDS)
    _, run_command = COMMANDS[name]
    return run_command(argv[1:])


def _print_help() -> None:
    """Prints each command with its docstring on one line."""
    width = max(len(usage) for usage, _ in COMMANDS.values())
    print("usage: pflcore COMMAND ...\n")
    for usage, command in COMMANDS.values():
        about = " ".join((command.__doc__ or "").split())
        print(f"  {usage:<{width}}  {about}")
    print(f"\nAlgorithms: {', '.join(ALGORITHMS)}.")
    print("pflcore COMMAND --help shows a command's options.")

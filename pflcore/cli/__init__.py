"""The command line: `pflcore run ALGORITHM`, `pflcore compare --algorithms A B C`,
`pflcore report FOLDER`, `pflcore info`, ...

What is wrong with an argument is said in one sentence on stderr with exit code 2,
before anything is computed or written.
"""

import contextlib
import importlib.util
import inspect
import io
import os
import platform
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
from pflcore.check import install_command, require
from pflcore.cli._run import RunFailed, compare, first_line, report, run
from pflcore.ops import __version__, backend
from pflcore.results._progress import INTERRUPTED
from pflcore.simulation._signals import ENDING_SIGNALS

__all__ = ["main"]
EXTRAS = {
    "cli": ("tyro", "tqdm"),
    "data": ("mlxtend", "sklearn", "scipy"),
    "vision": ("torchvision",),
    "plot": ("matplotlib",),
}


def info(argv: Sequence[str]) -> int:
    """Says what runs here: versions, kernels, devices, optional packages."""
    if argv:
        require(argv[0] in ("-h", "--help"), "info", "no options", argv)
        print(inspect.getdoc(info))
        return 0
    gpu = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "none that torch sees"
    )
    facts = {
        "pflcore": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "threads": f"{torch.get_num_threads()} (the machine has {os.cpu_count()} "
        "cores)",
        "GPU": gpu,
    }
    for extra, modules in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        lacking = f"without {', '.join(missing)}: {install_command(*missing)}"
        facts[f"[{extra}]"] = lacking if missing else "complete"
    for name, fact in {**facts, "kernels": backend()}.items():
        print(f"{name:<10}  {fact}")
    return 0


def _require_checkout(command: str) -> None:
    """Lets modules be imported from the checkout that pflcore stands in. ImportError,
    one sentence, where it is an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "__main__.py").exists():
        raise ImportError(
            f"{command}: this is no part of the installed package; run `python -m "
            "pflcore "
            f"{command}` in a checkout of pflcore."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def attack(argv: Sequence[str]) -> int:
    """Attacks what travels: membership inference and model inversion against an
    algorithm's uploads; needs a checkout of pflcore."""
    _require_checkout("attack")
    from bench.papers.attack import main

    return main(argv)


def reproduce(argv: Sequence[str]) -> int:
    """Runs the experiments behind a table of a paper; needs a checkout of pflcore."""
    _require_checkout("reproduce")
    from bench.papers.run import main

    return main(argv)


def bench(argv: Sequence[str]) -> int:
    """Times the kernels against the best torch call; needs a checkout of pflcore."""
    _require_checkout("bench")
    from bench import main

    return main(argv)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "run": ("run ALGORITHM [options]", run),
    "compare": ("compare --algorithms A B C [options]", compare),
    "report": ("report FOLDER ... [options]", report),
    "reproduce": ("reproduce NAME [options]", reproduce),
    "attack": ("attack [options]", attack),
    "bench": ("bench [options]", bench),
    "info": ("info", info),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 0, 2 for a wrong argument, 1 for a failure in
    the middle, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that has no sign for ± gets a question mark
            stream.reconfigure(errors="replace")
    if any(":" in word for word in argv) and os.getcwd() not in sys.path:
        # for package.module:Class, behind everything that is installed
        sys.path.append(os.getcwd())
    try:
        with _signals(), _plain_warnings():
            status = _command(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone; what was to be written is written
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        if os.environ.get("PFLCORE_DEBUG"):
            traceback.print_exc()
        expected = isinstance(
            e, ValueError | TypeError | ImportError | OSError | MemoryError
        )
        said = first_line(e)
        if not (expected or isinstance(e, RunFailed)):
            said = f"{type(e).__name__}: {said}"
        if not (expected or isinstance(e.__cause__, OSError)):
            said += " PFLCORE_DEBUG=1 shows where."
        print(f"pflcore: {said}", file=sys.stderr)
        return 2 if expected else 1


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does; nohup's wish, a SIGHUP that is
    ignored, is respected."""

    def end(*_: object) -> None:
        INTERRUPTED.set()
        raise KeyboardInterrupt

    INTERRUPTED.clear()
    kept: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                kept[number] = signal.signal(number, end)
    try:
        yield
    finally:
        INTERRUPTED.clear()  # a caller from Python goes on
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """A warning is its sentence, without the place in the source that it comes from."""
    kept = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"pflcore: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = kept


def _command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        width = max(len(usage) for usage, _ in COMMANDS.values())
        print("usage: pflcore COMMAND ...\n")
        for usage, command in COMMANDS.values():
            print(f"  {usage:<{width}}  {' '.join((command.__doc__ or '').split())}")
        print(f"\nAlgorithms: {', '.join(ALGORITHMS)}.")
        print("pflcore COMMAND --help shows a command's options.")
        return 0 if argv else 2
    known = argv[0] in COMMANDS
    require(known, "command", f"one of {', '.join(COMMANDS)}", argv[0], COMMANDS)
    return COMMANDS[argv[0]][1](argv[1:])

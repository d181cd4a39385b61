"""The command line: `pflcore run ALGORITHM`, `pflcore compare --algorithms A B C`, `pflcore report
FOLDER`, `pflcore info`, ...

What is wrong with an argument is said in one sentence on stderr with exit code 2, before anything
is computed or written.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pflcore.algorithms import ALGORITHMS
from pflcore.cli.about import info
from pflcore.cli.play import RunFailed, compare, first_line, report, run
from pflcore.results.progress import INTERRUPTED
from pflcore.simulation.interrupts import ENDING

__all__ = ["main"]


def _checkout(command: str) -> Path:
    """The checkout that pflcore stands in. ImportError, one sentence, where it is an installed
    package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "__main__.py").exists():
        raise ImportError(
            f"{command}: this is no part of the installed package; run `python -m pflcore "
            f"{command}` in a checkout of pflcore."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return root


def attack(argv: Sequence[str]) -> int:
    """Attacks what travels: membership inference and model inversion against an algorithm's
    uploads; needs a checkout of pflcore."""
    _checkout("attack")
    from bench.papers.attack import main

    return main(argv)


def reproduce(argv: Sequence[str]) -> int:
    """Runs the experiments behind a table of a paper; needs a checkout of pflcore."""
    _checkout("reproduce")
    from bench.papers.run import main

    return main(list(argv))


def bench(argv: Sequence[str]) -> int:
    """Times the kernels against the best torch call; needs a checkout of pflcore."""
    paths = os.pathsep.join(
        [str(_checkout("bench")), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return subprocess.run(
        [sys.executable, "-m", "bench", *argv], env={**os.environ, "PYTHONPATH": paths}, check=False
    ).returncode


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "run": ("run ALGORITHM [options]", run),
    "compare": ("compare --algorithms A B C [options]", compare),
    "report": ("report FOLDER ... [options]", report),
    "reproduce": ("reproduce NAME [options]", reproduce),
    "attack": ("attack [options]", attack),
    "bench": ("bench [options]", bench),
    "info": ("info [--model NAME]", info),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 0, 2 for a wrong argument, 1 for a failure in the middle,
    130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that has no sign for ± gets a question mark
            stream.reconfigure(errors="replace")
    if any(":" in word for word in argv) and os.getcwd() not in sys.path:
        # for package.module:Class, behind everything that is installed
        sys.path.append(os.getcwd())
    try:
        with _signals():
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
        expected = isinstance(e, ValueError | TypeError | ImportError | OSError | MemoryError)
        clear = expected or isinstance(e.__cause__, OSError)
        said = (
            first_line(e)
            if expected or isinstance(e, RunFailed)
            else f"{type(e).__name__}: {first_line(e)}"
        )
        print(
            f"pflcore: {said}" + ("" if clear else " PFLCORE_DEBUG=1 shows where."), file=sys.stderr
        )
        return 2 if expected else 1


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does; nohup's wish, a SIGHUP that is ignored, is
    respected."""

    def end(*_: object) -> None:
        INTERRUPTED.set()
        raise KeyboardInterrupt

    INTERRUPTED.clear()
    kept: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                kept[number] = signal.signal(number, end)
    try:
        yield
    finally:
        INTERRUPTED.clear()  # a caller from Python goes on
        for number, handler in kept.items():
            signal.signal(number, handler)


def _command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        width = max(len(usage) for usage, _ in COMMANDS.values())
        print("usage: pflcore COMMAND ...\n")
        for usage, command in COMMANDS.values():
            print(f"  {usage:<{width}}  {inspect.getdoc(command)}")
        print(
            f"\nAlgorithms: {', '.join(ALGORITHMS)}.\npflcore COMMAND --help shows a command's "
            "options."
        )
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise ValueError(f"command: expected one of {', '.join(COMMANDS)}, got {argv[0]!r}.")
    return COMMANDS[argv[0]][1](argv[1:])

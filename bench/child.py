"""Runs a module of this package in a process of its own, beside the same pflcore.

`python -m` would put the working directory first, which may be a checkout whose
pflcore is another one than that of the parent process.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the checkout


def child_words(module: str, *words: str) -> list[str]:
    """The words behind `python`, or behind torchrun, that run a module.

    Args:
        module: the module's name, such as "bench.scale"
        words: its arguments
    """
    import pflcore

    places = [str(Path(pflcore.__file__).resolve().parents[1]), str(ROOT)]
    return [str(Path(__file__).resolve()), os.pathsep.join(places), module, *words]


def main() -> None:
    """Runs the module that the words of this process name."""
    _, places, module, *words = sys.argv
    sys.path[:1] = places.split(os.pathsep)  # in the place of this file's folder
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

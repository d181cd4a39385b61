"""The lines of docs/interop.md inside PFLlib and FL-bench, and their own FedAvg.

    python -m bench.interop_lines --pfllib FOLDER --flbench FOLDER

It takes a checkout of either framework, unchanged, whose own generator has made the
MNIST clients, and whose packages are installed. It prints the test accuracy of each
round. PFLlib plays twice in one process, as its `-t 2` does: the second server has to
start anew.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.problem import parsed

ROOT = Path(__file__).parents[1]

# Both programs get the lines, a folder for runs, and "personal" or "fedavg".
PFLLIB = """
import runpy, sys
_, lines, out, method = sys.argv
sys.path.insert(0, ".")
import flcore.servers.serveravg as module, pflcore
space = {"pflcore": pflcore, "Server": module.FedAvg}
exec(lines, space)
if method == "personal":
    module.FedAvg = space["Personal"]
options = "-data MNIST -m DNN -algo FedAvg -gr 4 -t 2 -nc 20 -lbs 50 -lr 0.01 -ls 1 -dev cpu"
sys.argv = ["main.py", *options.split()]
runpy.run_path("main.py", run_name="__main__")
"""  # noqa: E501

FL_BENCH = """
import runpy, sys, types, pflcore
_, lines, out, method = sys.argv
sys.path.insert(0, ".")
from src.server.fedavg import FedAvgServer
module = sys.modules["src.server.personal"] = types.ModuleType("src.server.personal")
vars(module).update(pflcore=pflcore, FedAvgServer=FedAvgServer)
exec(lines, vars(module))
module.PersonalServer.__module__ = module.__name__
options = f"dataset.name=mnist model.name=2nn hydra.run.dir={out} optimizer.lr=0.05"
options += " common.global_epoch=4 common.local_epoch=1 common.batch_size=25"
options += " common.join_ratio=1.0 common.test.client.interval=1"
sys.argv = ["main.py", f"method={method}", *options.split()]
runpy.run_path("main.py", run_name="__main__")
"""


def lines(framework: str) -> str:
    """The framework's lines in docs/interop.md."""
    text = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    found = re.search(rf"```python\n(# {framework}: [\s\S]*?)```", text)
    assert found is not None
    return found[1]


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Args:
        pfllib: a checkout of PFLlib
        flbench: a checkout of FL-bench
    """

    pfllib: Path | None = None
    flbench: Path | None = None


def main() -> None:
    """Prints a line for each framework and method."""
    options = parsed(Options, "python -m bench.interop_lines", __doc__, None)
    pfllib = options.pfllib and options.pfllib / "system"
    for framework, program, folder, accuracy in (
        ("PFLlib", PFLLIB, pfllib, r"Averaged Test Accuracy: ([\d.]+)"),
        ("FL-bench", FL_BENCH, options.flbench, r"\"accuracy\": \"([\d.]+)%"),
    ):
        if folder is None:
            continue
        for method, name in (("fedavg", "FedAvg"), ("personal", "personalize")):
            output = output_of(framework, program, folder, method)
            percents = map(float, re.findall(accuracy, output))
            print(framework, name, *percents, flush=True)


def output_of(framework: str, program: str, folder: Path, method: str) -> str:
    """The output of a program that runs in a framework's folder.

    Raises RuntimeError where it fails.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [lines(framework), str(Path.cwd() / "runs"), method]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = f"it ended with {done.returncode}: {done.stderr[-2000:]}"
        raise RuntimeError(f"{framework}: {reason}")
    output: str = done.stdout
    return output


if __name__ == "__main__":
    main()

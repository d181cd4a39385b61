"""Deploys the example app of Flower on this machine, and checks its models.

    python examples/flower_deploy.py --rounds 2

A deployment has processes of its own for each side: a SuperLink, which passes messages
on, and a SuperNode for each client. `flwr run` then hands the app to the SuperLink.
Here all of them run on 127.0.0.1, on free ports and without encryption. On several
machines the commands are the same, with other addresses and certificates.

With the same seed, `pflcore.Simulation` gives the same models: the script ends with an
error where they differ. With `--kill`, it kills the app's server once, and starts
the run again, which goes on from the checkpoint.

At its end, also by an error, the script ends each process that it started.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import load_file

from pflcore import Evaluation, Hardware, Simulation

APP = Path(__file__).parent / "flower"
CLIENTS = 2
START_SECONDS = 60  # until the SuperLink answers
# The largest difference of a number from a simulation's: an engine that trains several
# clients at once may round differently. Ditto's models have no difference.
TOLERANCE = 1e-6
END_SECONDS = 5  # between the request to end and the killing of a process
# The line in which Flower logs the metrics of an evaluation.
ACCURACY = re.compile(r"MetricRecord: .*'accuracy': ([0-9.e+-]+)")
CONFIG = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


class Deployment:
    """A SuperLink and its SuperNodes, which end with the block.

    Args:
        folder: The folder for Flower's files and for the output of each process. Its
            name, in their environment, marks the processes of this deployment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        programs = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
        }

    def __enter__(self) -> "Deployment":
        try:
            self._start_all()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_all()

    def _start_all(self) -> None:
        """Starts the SuperLink, waits for its answer, and starts the SuperNodes."""
        link_port, *node_ports = free_ports(1 + CLIENTS)
        link = f"127.0.0.1:{link_port}"
        (self.folder / "config.toml").write_text(CONFIG.format(port=link_port))
        self._start(
            "flower-superlink",
            "--insecure",
            "--host=127.0.0.1",
            f"--port={link_port}",
            "--disable-runtime-dependency-installation",
        )
        self._wait_for(link)
        for number, port in enumerate(node_ports):
            self._start(
                "flower-supernode",
                "--insecure",
                f"--superlink={link}",
                "--host=127.0.0.1",
                f"--port={port}",
                f"--node-config=partition-id={number} num-partitions={CLIENTS}",
            )

    def _start(self, *command: str) -> None:
        """Starts a process, with its output in a file of the folder."""
        name = f"{command[0]}-{len(self.started)}.log"
        with open(self.folder / name, "wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
            )
        self.started.append(process)

    def _wait_for(self, link: str) -> None:
        """Waits until the SuperLink answers. Raises SystemExit where it does not."""
        end = time.monotonic() + START_SECONDS
        # A proxy of the environment must not see the question.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while self.started[0].poll() is None and time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, OSError):
                opener.open(f"http://{link}/health", timeout=5).close()
                return
            time.sleep(0.2)
        log = self.folder / "flower-superlink-0.log"
        raise SystemExit(f"The SuperLink does not answer:\n{log.read_text()[-2000:]}")

    def run(self, options: dict[str, object]) -> Iterator[str]:
        """The lines that a run of the app prints, as they come."""
        values = [f"{name}={_toml(value)}" for name, value in options.items()]
        command = ["flwr", "run", str(APP), "here", "--stream"]
        process = subprocess.Popen(
            [*command, "--run-config", " ".join(values)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=self.folder,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            yield from process.stdout
        process.wait()

    def kill(self, program: str) -> bool:
        """Kills the processes of this deployment with such a command line.

        True where there was one.
        """
        ids = [i for i in self._processes() if program in _command_line(i)]
        for process_id in ids:
            _send(process_id, signal.SIGKILL)
        return bool(ids)

    def _processes(self) -> list[int]:
        """The ids of the deployment's processes, also of those that others started.

        They are found by their environment. Where the system has no /proc, they are
        those that this script started; Flower's own end when these have ended.
        """
        proc = Path("/proc")
        if not proc.is_dir():
            return [process.pid for process in self.started if process.poll() is None]
        marker = f"FLWR_HOME={self.folder}\0".encode()
        ids = []
        for entry in proc.iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if marker in (entry / "environ").read_bytes() + b"\0":
                    ids.append(int(entry.name))
        return ids

    def _end_all(self) -> None:
        """Ends all processes: first by a request, then by force."""
        for process_id in self._processes():
            _send(process_id, signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        while self._processes() and time.monotonic() < end:
            time.sleep(0.1)
        empty_looks = 0
        # A process that is just being started has no environment for a moment.
        while empty_looks < 2:
            ids = self._processes()
            for process_id in ids:
                _send(process_id, signal.SIGKILL)
            empty_looks = 0 if ids else empty_looks + 1
            time.sleep(0.2)
        for process in self.started:
            process.wait()


def _send(process_id: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, number)


def _command_line(process_id: int) -> str:
    """The command line of a process; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/cmdline").read_text().replace("\0", " ")
    return ""


def _toml(value: object) -> str:
    """A value as TOML writes it, for `--run-config`."""
    return f"'{value}'" if isinstance(value, str) else str(value)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that no program listens on."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    return ports


def play(
    deployment: Deployment, options: dict[str, object], first: int, kill: bool
) -> list[str]:
    """Plays a run, prints each round's accuracy, and returns the run's output.

    Args:
        deployment: The deployment that plays the run.
        options: The options of the app.
        first: The round that the run begins with.
        kill: True kills the app's server after that round.
    """
    round = first
    lines = []
    for line in deployment.run(options):
        lines.append(line)
        accuracy = ACCURACY.search(line)
        if accuracy is None:
            continue
        print(
            f"round {round}: mean accuracy of the clients' own models "
            f"{float(accuracy[1]):.3f}",
            flush=True,
        )
        if kill and round == first:
            deployment.kill("flwr-serverapp")
            print("the app's server was killed", flush=True)
        round += 1
    return lines


def compare(folder: Path, algorithm: str, rounds: int, seed: int) -> float:
    """The largest difference of the folder's models from those of a `Simulation`."""
    sys.path.insert(0, str(APP))
    task = importlib.import_module("pfl_app.task")
    simulation = Simulation(
        task.algorithm(algorithm),
        task.model,
        task.data(CLIENTS),
        task.TRAINING,
        rounds,
        hardware=Hardware(workers=1),
        seed=seed,
        evaluation=Evaluation(every=0),
    )
    history = simulation.run()
    largest = 0.0
    for i in range(CLIENTS):
        model = load_file(folder / f"client-{i}.safetensors")
        for name, want in history.model(i).tensors().items():
            difference = (model[name] - want).abs().max()
            largest = max(largest, float(difference))
    return largest


def main() -> None:
    """Deploys the app, plays a run, and compares its models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="ditto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="kill the server once")
    parser.add_argument("--timeout", type=int, default=900, help="seconds in all")
    parser.add_argument("--folder", type=Path, help="where Flower's files stay")
    arguments = parser.parse_args()
    if arguments.kill and arguments.rounds < 2:
        parser.error("--kill needs --rounds 2 or more")
    options: dict[str, object] = {
        "algorithm": arguments.algorithm,
        "clients": CLIENTS,
        "rounds": arguments.rounds,
        "seed": arguments.seed,
    }
    if importlib.util.find_spec("flwr") is None:
        package = "flwr[simulation]>=1.42,<2"
        raise SystemExit(f"flwr: it is not installed; pip install '{package}'.")
    # Ends the block, and by it the processes, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("ended after --timeout seconds"))
    signal.alarm(arguments.timeout)
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        export = folder / "models"
        export.mkdir(parents=True)
        options["export"] = str(export)
        options["checkpoint"] = str(folder / "checkpoints")
        deployment = stack.enter_context(Deployment(folder))
        lines = play(deployment, options, first=1, kill=arguments.kill)
        if arguments.kill:
            lines = play(deployment, options, first=2, kill=False)
        models = list(export.iterdir())
        if len(models) != CLIENTS:
            raise SystemExit("The run ended without models:\n" + "".join(lines[-30:]))
        difference = compare(
            export, arguments.algorithm, arguments.rounds, arguments.seed
        )
    # A number that is NaN is no match, either.
    if not difference <= TOLERANCE:
        raise SystemExit(f"models differ from a simulation's by {difference:.1e}")
    how = f"up to {difference:.0e}" if difference else "bit by bit"
    print(f"the {CLIENTS} models are those of pflcore.Simulation, {how}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

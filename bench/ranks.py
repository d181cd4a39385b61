"""Cost of a round on one process and on two ranks of torchrun.

Each measurement runs in processes of its own, on one thread each. CPU seconds count:
on one machine the ranks take each other's cores. The digest of the last state shows
that all have the same bits.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bench.child import child_words
from bench.problem import Facts, fact
from bench.table import Table
from pflcore import Evaluation, Federation, Hardware, Simulation, Training
from pflcore.nn.models import MODELS
from pflcore.simulation._describe import content_digest
from pflcore.simulation._state import flatten_state

ALGORITHMS = ("ditto", "feddwa")
HEAD = (
    "model | algorithm | clients | ranks | CPU s a round, busiest rank | of one | "
    "MB received a round | peak RSS, MB | digest"
)


class Block(nn.Module):
    """Two convolutions with a residual addition."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, channels, H, W] of the same shape."""
        return torch.relu(x + self.body(x))


def residual_net() -> nn.Module:
    """A small residual network for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        Block(16),
        nn.AvgPool2d(2),
        Block(16),
        nn.AvgPool2d(7),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def run(quick: bool) -> tuple[list[Facts], str]:
    """Prints a line for each measurement; returns the measurements and the table."""
    table = Table(HEAD)
    clients = 20 if quick else 100
    measured = []
    for model in ("lenet5", "residual"):
        for algorithm in ALGORITHMS:
            one_process = None
            for ranks in (1, 2):
                row = measure(model, algorithm, clients, ranks)
                one_process = one_process or row["cpu"]
                measured.append(row)
                share = row["cpu"] / one_process
                table.add(
                    f"{model} | {algorithm} | {clients} | {ranks} | {row['cpu']:.3f} | "
                    f"{share:.2f} | {row['received'] / 1e6:.1f} | {row['rss']:.0f} | "
                    f"{row['digest']}"
                )
    return measured, table.text()


def measure(model: str, algorithm: str, clients: int, ranks: int) -> Facts:
    """The measurements of one run: those of the busiest rank."""
    words = child_words("bench.ranks", model, algorithm, str(clients))
    command = [sys.executable, *words]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        command = [sys.executable, *torchrun, f"--nproc-per-node={ranks}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    digests = {row["digest"] for row in rows}
    if len(digests) > 1:
        raise RuntimeError(f"the ranks hold different states: {digests}")
    busiest: Facts = max(rows, key=lambda row: float(row["cpu"]))
    return {**busiest, "model": model, "algorithm": algorithm, "ranks": ranks}


def play(model: str, algorithm: str, clients: int) -> Facts:
    """The measurements of this rank, over rounds after the first."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(clients):
        x = torch.randn(250, 1, 28, 28, generator=generator)
        y = torch.randint(0, 10, (250,), generator=generator)
        pairs.append((x, y))
    data = Federation.from_clients(pairs).split(test=0.2, seed=0)
    factory: Callable[[], nn.Module] = residual_net
    if model != "residual":
        factory = partial(MODELS[model], data.x.shape[1:], 10)
    simulation = Simulation(
        algorithm,
        factory,
        data,
        Training(lr=0.01, batch_size=20),
        rounds=5,
        evaluation=Evaluation(every=1),
        hardware=Hardware(workers=1),
    )
    seconds = []
    start = time.process_time()
    for _ in simulation.iterate():
        now = time.process_time()
        seconds.append(now - start)
        start = now
    received = simulation.config.ranks.bytes_received // len(seconds)
    state = flatten_state(simulation.state)
    peak = int(fact("self/status", "VmHWM", "0").split()[0]) / 1e3
    return {
        "cpu": min(seconds[1:]),  # the first round makes what the others use
        "received": received,
        "rss": peak,
        "digest": content_digest(state),
    }


if __name__ == "__main__":
    print(json.dumps(play(sys.argv[1], sys.argv[2], int(sys.argv[3]))), flush=True)

"""One run on one, two and three processes, which give the same bits.

python examples/ranks.py                               starts all three
torchrun --standalone --nproc-per-node=2 examples/ranks.py    starts one of them

The program is that of a single process: `Simulation` finds the other ranks by itself.
Only what is printed asks for the rank.
"""

import hashlib
import os
import subprocess
import sys
import time

import torch
from torch import nn

from pflcore import Evaluation, Federation, Hardware, Simulation, Training


def make_clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples and labels of 24 clients, drawn with a seed: all ranks draw the same."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for i in range(24):
        y = torch.randint(0, 4, (60 + 10 * i,), generator=generator)
        x = torch.randn(len(y), 1, 16, 16, generator=generator)
        clients.append((x + y[:, None, None, None] / 4, y))
    return clients


def play() -> None:
    """Plays the run on this rank. Rank 0 prints the digest of all models."""
    data = Federation.from_clients(make_clients()).split(test=0.2, seed=0)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 4)
        )

    simulation = Simulation(
        "feddwa",
        model,
        data,
        Training(lr=0.05, batch_size=20),
        rounds=5,
        participation=0.5,
        evaluation=Evaluation(every=5),
        hardware=Hardware(workers=1),
    )
    start = time.perf_counter()
    history = simulation.run()
    seconds = time.perf_counter() - start
    digest = hashlib.sha256()
    for client in range(data.n):
        for name, tensor in sorted(history.model(client).tensors().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    megabytes = simulation.config.ranks.bytes_received / 1e6
    if history.rank == 0:
        ranks = os.environ.get("WORLD_SIZE", "1")
        accuracy = float(history.series("accuracy")[1][-1].mean())
        print(
            f"{ranks} rank(s): models {digest.hexdigest()[:16]}, mean accuracy "
            f"{accuracy:.3f}, {seconds:.1f} s, {megabytes:.1f} MB from other ranks"
        )


def compare() -> None:
    """Starts the run on 1, 2 and 3 ranks; raises SystemExit where models differ."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    digests = set()
    for ranks in (1, 2, 3):
        command = [*torchrun, f"--nproc-per-node={ranks}", __file__]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(run.stdout, end="", flush=True)
        digests.add(run.stdout.partition("models ")[2].partition(",")[0])
    if len(digests) > 1:
        raise SystemExit("The models differ.")
    print("All models are equal, bit by bit.")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        play()
    else:
        compare()

"""A program that one or several ranks run: it plays cases and keeps their digests.

`ranks.py CASES FOLDER` reads a JSON list of cases. Every rank writes a file
`digests-RANK.json` into the folder, with the digests of each case.
"""

import hashlib
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from pflcore import (
    Evaluation,
    Federation,
    Hardware,
    Robustness,
    Simulation,
    Training,
    algorithm_of,
)
from pflcore.simulation import checkpoint

SIZES = (23, 9, 40, 17, 31, 12, 26)


def make_data():
    """A federation of seven clients that have 3 classes in different shares."""
    generator = torch.Generator().manual_seed(3)
    clients = []
    for i, size in enumerate(SIZES):
        y = torch.randint(0, 3, (size,), generator=generator)
        x = torch.randn(size, 6, generator=generator) + (y[:, None] + i % 2) % 3
        clients.append((x, y))
    return Federation.from_clients(clients).split(test=0.25, val=0.15, seed=0)


MODELS = {
    # a chain of layers that kernels train
    "chain": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    "plain": lambda: nn.Sequential(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 3)),
    "batch_norm": lambda: nn.Sequential(
        nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    ),
}


def draw_five(round, generator, sizes):
    """Five of the clients, as a user's rule of sampling."""
    return torch.randperm(len(sizes), generator=generator)[:5]


def draw_steps(round, client, generator):
    """From one to four steps, as a user's rule for stragglers."""
    return 1 + int(torch.randint(4, (), generator=generator))


def noise(batch, generator):
    """The batch with random numbers added, as an augmentation."""
    return batch + torch.randn(batch.shape, generator=generator)


def make_simulation(case):
    """The simulation of a case; what a case leaves out has its default here."""
    data = make_data()
    without = case.get("without_training", ())
    train = [
        rows[: len(rows) * (i not in without)]
        for i, rows in enumerate(data.index["train"])
    ]
    data = replace(data, index={**data.index, "train": train})
    for client in case.get("bad_clients", ()):
        data.x[data.index["train"][client]] *= 1e30  # its training is not finite
    return Simulation(
        algorithm_of(case["algorithm"], **case.get("options", {})),
        MODELS[case.get("model", "chain")],
        data,
        Training(lr=0.05, batch_size=8, **case.get("training", {})),
        rounds=case.get("rounds", 3),
        participation=case.get("participation", 0.7),
        sampling=case.get("sampling", "uniform"),
        seed=case.get("seed", 1),
        evaluation=Evaluation(train_loss=True),
        robustness=Robustness(clip=case.get("clip")),
        hardware=Hardware(
            engine=case.get("engine", "auto"),
            workers=1,
            clients_per_block=case.get("clients_per_block", 2),
            ranks=case.get("ranks", "auto"),
            rank_timeout=case.get("rank_timeout", 5.0),
        ),
    )


def digest_tensors(tensors):
    """The digest of tensors by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        rows = tensors[name].detach().cpu().contiguous()
        digest.update(name.encode() + rows.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def tensors_of(state):
    """All tensors of a state by name."""
    tensors = {f"server.{name}": tensor for name, tensor in state.server.items()}
    tensors |= {f"clients.{name}": tensor for name, tensor in state.clients.items()}
    return tensors | {"buffers": state.buffers, "participated": state.participated}


def digest_records(records):
    """The digest of records, their seconds aside."""
    kept = [{k: v for k, v in record.items() if k != "seconds"} for record in records]
    text = json.dumps(kept, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def play(case):
    """The digests of a run: its records, its state and two of its models."""
    simulation = make_simulation(case)
    with TemporaryDirectory() as folder:
        # Ranks other than the first write nothing there.
        history = simulation.run(checkpoint=folder)
        digests = {
            "stopped": history.stopped,
            "records": digest_records(history.rounds),
            "state": digest_tensors(tensors_of(history.state)),
        }
        for client in (0, 6):
            model = history.model(client).tensors()
            digests[f"model {client}"] = digest_tensors(model)
        if checkpoint.Checkpoint(folder).exists:
            tensors, facts = checkpoint.load(folder)
            digests["checkpoint"] = digest_tensors(tensors)
            digests["checkpoint's records"] = digest_records(facts["rounds"])
    return digests


def play_all(cases):
    """The digests of cases, by their names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {json.dumps(case, sort_keys=True): play(case) for case in cases}


if __name__ == "__main__":
    digests = play_all(json.loads(sys.argv[1]))
    # Ranks that did not find each other would have equal digests, too.
    ranks = make_simulation({"algorithm": "fedavg"}).config.ranks
    digests["ranks"] = [ranks.rank, ranks.count, ranks.bytes_received]
    path = Path(sys.argv[2], f"digests-{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(digests))

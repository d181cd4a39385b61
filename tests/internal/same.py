"""Plays runs of every kind and keeps what came out: `python tests/internal/same.py play FILE`,
before and after a change of the house; `python tests/internal/same.py compare BEFORE AFTER` says
which of them are equal bit by bit, the engine included.

`door` is the one place where names of pflcore stand, so that other names change that function and
no run. Kept of a run: its engine; of each round the cohort, who was dropped, the training loss and
what was evaluated; digests of all clients' personalized models. `--no-swap` plays without the
layers that pflcore puts in the place of a model's own, where there are any.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

import pflcore
from pflcore import (
    Adversary,
    Client,
    Federation,
    Hardware,
    Net,
    Robustness,
    Server,
    Simulation,
    Training,
)

KEPT = ("cohort", "dropped", "void", "train_loss", "moved", "eval")
ROUNDS, GENERATOR = 4, torch.Generator()


# data and models ------------------------------------------------------------
def parts(shape, sizes, classes=3, seed=0, tokens=0):
    gen = GENERATOR.manual_seed(seed)
    out = []
    for i, n in enumerate(sizes):
        centre = torch.randn(classes, *shape, generator=gen) + 0.3 * i
        y = torch.randint(0, classes, (n,), generator=gen)
        x = (
            torch.randint(0, tokens, (n, *shape), generator=gen)
            if tokens
            else centre[y] + torch.randn(n, *shape, generator=gen)
        )
        out.append((x, y))
    return out


def with_test(train, test):
    return [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]


def federation(shape, sizes=(24, 17, 40, 9, 33, 24, 12, 50), **options):
    return Federation.from_clients(
        with_test(parts(shape, sizes, **options), parts(shape, [15] * len(sizes), **options)),
        classes=3,
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(x + torch.relu(self.norm(self.a(x))))


class Text(nn.Module):
    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.words, self.rnn, self.out = (
            nn.Embedding(20, 6),
            kind(6, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.out(self.rnn(self.words(x))[0][:, -1])


def linear():
    return nn.Linear(8, 3)


def mlp():
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def normed_cnn():
    layers = (
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return nn.Sequential(*layers)


def dropping():
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), pflcore.nn.Dropout(0.3), nn.Linear(10, 3))


VECTORS, IMAGES, WORDS = {"shape": (8,)}, {"shape": (1, 8, 8)}, {"shape": (7,), "tokens": 20}
MODELS = {
    linear: VECTORS,
    mlp: VECTORS,
    Residual: VECTORS,
    dropping: VECTORS,
    cnn: IMAGES,
    normed_cnn: IMAGES,
    Text: WORDS,
}


# runs -----------------------------------------------------------------------
def door(algorithm, model, data, training, options, run):
    """The simulation of a run: `options` are the method's own, `training` and `run` are
    keywords."""
    alg = pflcore.ALGORITHMS[algorithm](**options)
    run = {"rounds": ROUNDS, "workers": 2, **run}
    groups = {"hardware": Hardware, "robustness": Robustness}
    made = {
        key: cls(**{f.name: run.pop(f.name) for f in fields(cls) if f.name in run})
        for key, cls in groups.items()
    }
    if "buffers" in run:
        run["batch_norm"] = run.pop("buffers")
    return Simulation(
        alg, model, data, Training(**{"lr": 0.1, "batch_size": 8, **training}), **made, **run
    )


def kept(history, simulation):
    rounds = [{k: r[k] for k in KEPT if k in r} for r in history.rounds]
    path = simulation.header()["path"]
    return {
        "engine": [path["engine"], path["form"]],
        "rounds": rounds,
        "models": [digest(history.model(i).tensors()) for i in range(simulation.data.n)],
    }


def digest(tensors):
    out = hashlib.sha256()
    for key in sorted(tensors):
        out.update(key.encode() + tensors[key].detach().contiguous().numpy().tobytes())
    return out.hexdigest()[:16]


def play(algorithm, model=mlp, training=(), options=(), data=None, **run):
    simulation = door(
        algorithm, model, data or federation(**MODELS[model]), dict(training), dict(options), run
    )
    return kept(simulation.run(), simulation)


def with_a_nan():
    data = parts((8,), [20] * 5)
    data[2][1][:] = 0
    data[2][0][:] *= 1e30
    return play(
        "scaffold", data=Federation.from_clients(with_test(data, parts((8,), [10] * 5)), classes=3)
    )


def adapted():
    simulation = door("ditto", mlp, federation(**VECTORS), {}, {}, {})
    history = simulation.run()
    return {"models": [digest(history.adapt(parts((8,), [20], seed=5)[0], rounds=2).tensors())]}


def resumed():
    with tempfile.TemporaryDirectory() as folder:
        first = door("waffle", Residual, federation(**VECTORS), {}, {}, {"participation": 0.5})
        plays = first.iterate()
        for _ in range(2):
            next(plays)
        first.save(folder)
        again = door("waffle", Residual, federation(**VECTORS), {}, {}, {"participation": 0.5})
        again.restore(folder)
        return kept(again.run(), again)


def on_disk():
    with tempfile.TemporaryDirectory() as folder:
        return play("ditto", rows=folder, participation=0.5)


def killed():
    """A process that ends itself in the middle, with a checkpoint each round, and another one that
    goes on."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import pflcore, "
            "same\n"
            "simulation = same.door('scaffold', same.mlp, same.federation(**same.VECTORS), {}, {}, "
            "{})\n"
            "simulation.run(lambda r, line: os._exit(9) if r == 3 else None, "
            f"pflcore.Checkpoint({folder!r}, every=1))"
        )
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, env=os.environ)
        again = door("scaffold", mlp, federation(**VECTORS), {}, {}, {}).restore(folder)
        return kept(again.run(), again)


def by_messages(algorithm):
    """Server and Client, without a simulation."""
    data, alg = parts((8,), [16, 9, 30]), pflcore.ALGORITHMS[algorithm]
    server = Server(alg(), Net(mlp, seed=3), 3, rounds=2, seed=3)
    clients = [
        Client(alg(), Net(mlp, seed=3), part, Training(lr=0.1, batch_size=8), seed=3)
        for part in data
    ]
    for _ in range(2):
        server.aggregate({i: client.train(server.download(i)) for i, client in enumerate(clients)})
    return {
        "models": [
            digest(c.model(server.download(i, "evaluation")).tensors())
            for i, c in enumerate(clients)
        ]
    }


def plan():
    """Two methods of Motley's School, or nothing where it is not."""
    if not (Path(os.environ.get("PFLCORE_DATA", "nowhere")) / "school").is_dir():
        return {"models": []}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "reproduce",
            "motley-school",
            "--rounds",
            "2",
            "--seeds",
            "1",
            "--methods",
            "Local",
            "Ditto",
            "--out",
            folder,
        ]
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "pflcore", *words],
            check=True,
            capture_output=True,
        )
        lines = [
            json.loads(line)
            for file in sorted(Path(folder).rglob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        return {"rounds": [{k: r[k] for k in KEPT if k in r} for r in lines if "round" in r]}


RUNS = {
    **{name: (lambda name=name: play(name)) for name in pflcore.ALGORITHMS},
    "chain": lambda: play("fedavg", engine="chain"),
    "chain of convolutions": lambda: play("fedavg", cnn),
    "vmap": lambda: play("fedavg", engine="vmap"),
    "loop": lambda: play("fedavg", engine="loop"),
    "float64": lambda: play("scaffold", lambda: Residual().double(), data=doubled()),
    "participation": lambda: play("scaffold", participation=0.3),
    "waffle, participation": lambda: play("waffle", cnn, participation=0.3),
    "feddwa, participation": lambda: play(
        "feddwa", options={"guidance": "steps", "ahead": 2}, participation=0.5
    ),
    "feddwa, batch norm": lambda: play("feddwa", Residual, buffers="average"),
    "ditto, batch norm": lambda: play("ditto", Residual),
    "fedbn, convolutions": lambda: play("fedbn", normed_cnn),
    "fedala, batch norm": lambda: play("fedala", normed_cnn),
    "hypcluster, batch norm": lambda: play("hypcluster", Residual),
    "sfl, words": lambda: play("sfl", Text),
    "dropout": lambda: play("apfl", dropping),
    "adamw": lambda: play("fedprox", training={"local_optimizer": "adamw", "lr": 0.01}),
    "momentum, decay, clip_grad": lambda: play(
        "fedavg", Residual, {"momentum": 0.5, "weight_decay": 0.01, "clip_grad": 1.0, "epochs": 2}
    ),
    "drop_last, one order": lambda: play(
        "fedavg", training={"drop_last": True, "reshuffle": False}
    ),
    "clip": lambda: play("scaffold", clip=0.1),
    "two hundred samples": lambda: play("fedavg", data=federation((8,), [200] * 4)),
    "per_fedavg, exact": lambda: play("per_fedavg", options={"variant": "exact"}),
    "factorized, epochs": lambda: play("factorized_waffle", cnn, {"epochs": 3}),
    "an attack": lambda: play(
        "fedavg", options={"defence": "trimmed_mean"}, adversary=Adversary("noise", [1])
    ),
    "krum": lambda: play(
        "ditto", options={"defence": "multi_krum"}, adversary=Adversary("sign_flip", [2])
    ),
    "a NaN client": with_a_nan,
    "adapt": adapted,
    "rows on disk": on_disk,
    "resumed": resumed,
    "killed": killed,
    **{
        f"messages of {name}": (lambda name=name: by_messages(name))
        for name in ("fedavg", "scaffold", "ditto", "feddwa")
    },
    "a plan": plan,
}


def doubled():
    data = federation(**VECTORS)
    return Federation(data.x.double(), data.y, data.index, data.classes)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("play", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--no-swap", action="store_true")
    given = parser.parse_args()
    if given.what == "play":
        if given.no_swap:
            pflcore.train.net.swap_layers = lambda module: None
            pflcore.train.path.swappable = lambda module: False
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        out = {}
        for name, run in RUNS.items():
            out[name] = json.loads(json.dumps(run(), default=float))
            print(name, *out[name].get("engine", []), flush=True)
        given.files[0].write_text(json.dumps(out))
        return
    before, after = (json.loads(file.read_text()) for file in given.files)
    differ = [name for name in before if before[name] != after.get(name)]
    for name in differ:
        a, b = before[name], after.get(name) or {}
        keys = [k for k in a if a[k] != b.get(k)]
        losses = [
            [r["eval"]["loss"] for r in run.get("rounds", []) if r.get("eval")] for run in (a, b)
        ]
        gap = max(
            (abs(x - y) for p, q in zip(*losses, strict=False) for x, y in zip(p, q, strict=False)),
            default=float("nan"),
        )
        print(
            f"{name}: other {', '.join(keys)}; engine {a.get('engine')} and {b.get('engine')}; "
            f"losses differ by up to {gap:.3g}"
        )
    print(f"{len(before) - len(differ)} of {len(before)} runs are equal bit by bit")
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()

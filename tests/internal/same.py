"""Compares the results of runs before and after a code change.

`python tests/internal/same.py play FILE` plays the runs and writes their results.
`play FILE --grid` plays every method with each engine, number type and option of GRID,
in half an hour; `--methods fedavg ditto` plays these alone. A run that is refused has
the kind of its error as its result.
`python tests/internal/same.py compare BEFORE AFTER` prints the runs whose results are
not equal bit by bit. The engine counts as a result.

`make_run` is the only function that uses names of pflcore's options. If such a name
changes, only this function changes, and no run.

The results of a run are its engine, the digests of all clients' personalized models,
and parts of its record. Of each round they have the cohort, the dropped clients, the
training loss and the evaluation. Interrupted runs and rows on disk are not covered
here; other tests compare them with plain runs.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
import warnings
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from parts.path import Rnn
from parts.user import simulation
from places import golden, ran
from small import images, layers

from pflcore import ALGORITHMS, Adversary, Client, Net, Server, Training

# Keys in the records of other versions, and their present names.
RENAMED = {"moved": "relative_update_norm"}
KEPT = ("cohort", "dropped", "void", "train_loss", "relative_update_norm", "eval")
SIZES = (24, 17, 40, 9, 33, 24, 12, 50)
# Shapes of samples, by the model's first layer.
SHAPES = {"Conv2d": (1, 8, 8), "GRU": (7, 6)}
APART = ("fedavg", "scaffold", "ditto", "feddwa")
MLP = "Linear 6 10, ReLU, Linear 10 4"


# runs -----------------------------------------------------------------------
def make_run(algorithm, model=MLP, sizes=SIZES, data=None, dtype="float32", **options):
    """The simulation of a run.

    The options are those of the method, of the training and of the run.
    """
    dtype = getattr(torch, dtype)
    first = model.partition(" ")[0]
    data = data or images(sizes, SHAPES.get(first, (6,)))
    data = replace(data, x=data.x.to(dtype))
    method, how = (
        {f.name: options.pop(f.name) for f in fields(cls) if f.name in options}
        for cls in (ALGORITHMS[algorithm], Training)
    )
    if "adversary" in options:
        options["adversary"] = Adversary(*options["adversary"])
    options = {"model": built(model).to(dtype), "rounds": 4, "workers": 2, **options}
    options["training"] = Training(**{"lr": 0.1, "batch_size": 8, **how})
    return simulation(ALGORITHMS[algorithm](**method), data, **options)


def built(model):
    torch.manual_seed(0)
    return Rnn(nn.GRU) if model == "GRU" else layers(model)


def play(algorithm, **options):
    run = make_run(algorithm, **options)
    history = run.run()
    engine = run.config.engine
    return {
        "engine": [engine.autograd, engine.kind],
        "rounds": kept(history.rounds),
        "models": [digest(history.model(i)) for i in range(run.data.n)],
    }


def kept(rounds):
    return [{k: r[k] for k in KEPT if k in r} for r in rounds]


def digest(model):
    out = hashlib.sha256()
    tensors = model.tensors()
    for key in sorted(tensors):
        out.update(key.encode() + tensors[key].detach().contiguous().numpy().tobytes())
    return out.hexdigest()[:16]


def with_a_nan():
    data = images((20,) * 5)
    data.x[data.index["train"][2]] *= 1e30
    return play("scaffold", data=data)


def adapted():
    history = make_run("ditto").run()
    return {
        "models": [digest(history.adapt(images((20,), seed=5).client(0), rounds=2))]
    }


def by_messages(algorithm):
    """Digests of the models that Server and Client train without a simulation."""
    method = ALGORITHMS[algorithm]
    net = Net(lambda: layers(MLP), seed=3)
    data = images()
    training = Training(lr=0.1, batch_size=8)
    server = Server(method(), net, 3, rounds=2, seed=3)
    clients = [
        Client(method(), net, data.client(i), training, seed=3) for i in range(3)
    ]
    for _ in range(2):
        server.aggregate(
            {i: c.train(server.download(i)) for i, c in enumerate(clients)}
        )
    served = [server.download(i, "evaluation") for i in range(3)]
    return {
        "models": [digest(c.model(s)) for c, s in zip(clients, served, strict=True)]
    }


def plan():
    """The rounds of two methods on Motley's School data.

    There are none where the data are missing.
    """
    if not (Path(os.environ.get("PFLCORE_DATA", "nowhere")) / "school").is_dir():
        return {"models": []}
    plan = "motley-school --rounds 2 --seeds 1 --methods Local Ditto"
    with tempfile.TemporaryDirectory() as folder:
        words = f"-W ignore -m pflcore reproduce {plan} --out {folder}"
        ran(*words.split(), check=True)
        files = sorted(Path(folder).rglob("*.jsonl"))
        lines = [
            json.loads(line) for file in files for line in file.read_text().splitlines()
        ]
    return {"rounds": kept(r for r in lines if "round" in r)}


RUNS = {
    **{name: partial(play, name) for name in ALGORITHMS},
    **{
        name: partial(play, one, **options)
        for name, (one, options) in golden("same").items()
    },
    "a NaN client": with_a_nan,
    "adapt": adapted,
    **{f"messages of {name}": partial(by_messages, name) for name in APART},
    "a plan": plan,
}


# every method with every option ---------------------------------------------
def lacking(client):
    """The federation of GRID_SIZES in which a client has test samples alone."""
    data = images(GRID_SIZES)
    train = list(data.index["train"])
    train[client] = train[client][:0]
    return replace(data, index={**data.index, "train": train})


GRID_SIZES = (24, 17, 9, 33, 12)
NORMED = "Linear 6 5, BatchNorm1d 5, ReLU, Linear 5 4"
GRID = {
    "batch norm": {"model": NORMED},
    "dropout": {"model": "Linear 6 10, ReLU, Dropout 0.3, Linear 10 4"},
    "momentum": {"momentum": 0.5, "weight_decay": 0.01, "epochs": 2},
    "adamw": {"local_optimizer": "adamw", "lr": 0.01},
    "clip_grad": {"clip_grad": 0.5},
    "clip": {"clip": 0.1},
    "poisson": {"sampling": "poisson", "participation": 0.5},
    "absent clients": {"participation": 0.5},
    "first without training": {"data": partial(lacking, 0)},
    "last without training": {"data": partial(lacking, 4)},
}


def play_or_refuse(algorithm, **options):
    make_data = options.pop("data", partial(images, GRID_SIZES))
    try:
        return play(algorithm, data=make_data(), **options)
    except Exception as error:
        return {"refused": type(error).__name__}


def grid(methods):
    """The runs of GRID by name."""
    runs = {}
    for name, engine, dtype, option in itertools.product(
        methods, ("auto", "loop", "vmap"), ("float32", "float64"), GRID
    ):
        options = {"engine": engine, "dtype": dtype, "rounds": 3, **GRID[option]}
        run = partial(play_or_refuse, name, **options)
        runs[f"{name}, {engine}, {dtype}, {option}"] = run
    return runs


# comparison -----------------------------------------------------------------
def read(file):
    """The runs of a file.

    Old names of a record's keys are replaced by the present ones.
    """

    def renamed(pairs):
        return {RENAMED.get(key, key): value for key, value in pairs}

    return json.loads(file.read_text(), object_pairs_hook=renamed)


def losses(run):
    seen = [r["eval"]["loss"] for r in run.get("rounds", []) if r.get("eval")]
    return torch.tensor(seen, dtype=torch.float64)


def compare(before, after):
    """True where runs differ; prints the number of equal runs.

    For each other run it prints the results that differ and the largest difference of
    the losses.
    """
    differ = [name for name in before if before[name] != after.get(name)]
    for name in differ:
        a = before[name]
        b = after.get(name, {})
        keys = [k for k in a if a[k] != b.get(k)]
        losses_a = losses(a)
        losses_b = losses(b)
        gap = "unknown"
        if losses_a.shape == losses_b.shape and len(losses_a):
            gap = float((losses_a - losses_b).abs().max())
        print(
            f"{name}: other {', '.join(keys)} ({b.get('engine')}); losses differ by up "
            f"to {gap}"
        )
    print(f"{len(before) - len(differ)} of {len(before)} runs are equal bit by bit")
    return bool(differ)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("play", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--methods", nargs="+", default=list(ALGORITHMS))
    given = parser.parse_args()
    if given.what == "compare":
        raise SystemExit(compare(*map(read, given.files)))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = {}
    runs = grid(given.methods) if given.grid else RUNS
    for name, run in runs.items():
        out[name] = json.loads(json.dumps(run(), default=float))
        print(name, *out[name].get("engine", []), flush=True)
    given.files[0].write_text(json.dumps(out))


if __name__ == "__main__":
    main()

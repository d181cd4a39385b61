"""What of a run stands in its checkpoint, and how a run takes it up again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import State
from pflcore.ops import __version__
from pflcore.results.record import plain
from pflcore.simulation import checkpoint, rows
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.history import Record
from pflcore.simulation.round import begin, per_client
from pflcore.train import Training
from pflcore.train.losses import loss_name
from pflcore.train.random import STREAM

if TYPE_CHECKING:
    from pflcore.simulation.loop import Simulation


def played(run: Simulation) -> list[Record]:
    """The records of the rounds up to the state as it is now."""
    rounds = run._past or (run._earlier + run.history.rounds if run.history else [])
    return [r for r in rounds if r["round"] <= run._state.round]  # the state may have been put back


def save(run: Simulation, keeper: Checkpoint) -> None:
    """Writes the checkpoint of the run as it is now. OSError where that cannot be."""
    state, net = run._state, run.setting.net
    seen = state.own.known.nonzero()[:, 0] if isinstance(state.own, rows.OnDisk) else None
    own = dict(state.own) if seen is None else {k: v[seen] for k, v in state.own.items()}
    trees = {"g": state.g, "own": own, "state": {"buffers": state.buffers, "joined": state.joined}}
    trees["seen"] = {} if seen is None else {"ids": seen}
    trees["net"] = {"w0": net.w0, "b0": net.b0}
    tensors = {f"{tree}.{k}": v for tree, d in trees.items() for k, v in d.items()}
    note = keeper.note() if keeper.note else None
    records = played(run) if note is None else []
    tensors |= {f"report.{r['round']}.{k}": v for r in records for k, v in r["report"].items() if isinstance(v, Tensor)}
    facts = {
        "run": _what(run),
        "round": state.round,
        "void": state.void,
        "outlier": run._outlier,
        "on_device": [k for k, v in tensors.items() if v.device.type != "cpu"],
        "note": note,
        "rounds": [{**r, "report": {k: None if isinstance(v, Tensor) else v for k, v in r["report"].items()}} for r in records],
    }
    checkpoint.save(keeper.folder, tensors, facts)


def take(run: Simulation, folder: str | Path, tensors: dict[str, Tensor], facts: Record) -> None:
    """Takes up what `checkpoint.load(folder)` gave. ValueError in one sentence where it is another run's."""
    here, aside = _what(run), {"machine": None, "made_with": None}
    differs = checkpoint.difference(facts["run"] | aside, here | aside)
    if differs:
        raise ValueError(f"checkpoint: {folder} holds that of another run: {differs}; give what it was made with, or another folder.")
    other = checkpoint.difference(facts["run"]["made_with"], here["made_with"])
    if other:
        warnings.warn(f"checkpoint: {other}; numbers may differ in their last digits from an unbroken run's.", stacklevel=3)
    tensors = {k: v.to(run.device) if k in facts["on_device"] else v for k, v in tensors.items()}
    trees: dict[str, dict[str, Tensor]] = {"g": {}, "own": {}, "state": {}, "seen": {}, "net": {}, "report": {}}
    for name, v in tensors.items():
        tree, _, key = name.partition(".")
        trees[tree][key] = v
    net = run.setting.net.to(run.setting.net.w0.device)  # one of its own
    net.w0, net.b0 = (v.to(net.w0.device) for v in (trees["net"]["w0"], trees["net"]["b0"]))
    run.setting = run.setting._replace(net=net)
    g, own, n = trees["g"], trees["own"], run.data.n
    if run.folder is not None or trees["seen"]:  # rows of those who were seen, into the file or the memory of this run
        fresh = begin(run._algorithm, net, n, run.folder).own
        seen = trees["seen"].get("ids", torch.arange(n))
        rows.see(fresh, seen)
        for k, v in own.items():
            fresh[k][seen] = v
        on_disk = per_client(g, n) if run.folder else set()
        g, own = {k: rows.cloned(v, run.folder if k in on_disk else None) for k, v in g.items()}, fresh
    run._state = State(g, own, **trees["state"], round=facts["round"], void=facts["void"])
    run._outlier = facts["outlier"] and tuple(facts["outlier"])
    for key, value in trees["report"].items():
        round, _, name = key.partition(".")
        next(r for r in facts["rounds"] if r["round"] == int(round))["report"][name] = value
    run._past, run._earlier, run._came_from = facts["rounds"], [], Path(folder)


def options(folder: str | Path, what: Record | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a simulation is made with to go on with the run that `what` describes: `given` (which stands above it), and the rest of it."""
    if what is None:
        raise ValueError(f"checkpoint: {folder} is that of a command between two runs, and holds no state; go on with its --resume.")
    made = dict(given)
    if "algorithm" not in made:
        if what["algorithm"] not in ALGORITHMS:
            raise ValueError(f"algorithm: the checkpoint is of {what['algorithm']}, which is not pflcore's own; give it: algorithm=...")
        made["algorithm"] = ALGORITHMS[what["algorithm"]](**_rebuilt("algorithm", what["options"]))
    if "training" not in made:
        made["training"] = Training(**_rebuilt("training", what["training"]))
    stored = {**what["conditions"], **what["machine"]}
    return {k: _rebuilt(k, {k: v})[k] for k, v in stored.items() if k not in made} | made


def _what(run: Simulation) -> Record:
    """What the run is; `machine` and `made_with` may be other when it goes on."""
    net, machine = run.setting.net, ("device", "engine", "workers", "rows", "loss")
    aside = ("algorithm", "model", "data", "training", "warm_start", *machine)
    if run._content is None:
        run._content = checkpoint.of_data(run.data)
    return checkpoint.facts_of(  # type: ignore[no-any-return]
        {
            "algorithm": run.name,
            "options": asdict(run._algorithm),
            "training": asdict(run.training),
            "conditions": {f.name: getattr(run, f.name) for f in fields(run) if f.name not in aside}
            | ({} if run.adversary is None else {"adversary": plain(run.adversary)})
            | ({"eval_clients": run._asked} if run._drawn else {}),
            "federation": run._content,
            "criterion": loss_name(net.criterion),
            "model": checkpoint.of_net(net),
            "stream": STREAM,
            "machine": {k: getattr(run, k) for k in machine} | {"rows": str(run.rows)},
            "made_with": {"pflcore": __version__, "torch": torch.__version__, "device": run.device, "path": run.path[:2]},
        }
    )


def _rebuilt(name: str, values: Record) -> Record:
    """Values that were kept as JSON, lists as tuples. ValueError where one was a function."""
    for key, value in values.items():
        if '{"function":' in json.dumps(value):
            raise ValueError(f"{name}: the checkpoint's {key} has a function in it, which no file holds; give it: {name}=...")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

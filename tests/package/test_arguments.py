"""Every public callable answers a wrong argument of each kind with one sentence of pflcore's own,
which names the argument."""

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from small import images, make_setting, tiny_model

import pflcore
from pflcore import (
    Adversary,
    Algorithm,
    Evaluation,
    Federation,
    Hardware,
    Net,
    Robustness,
    Simulation,
    Training,
    interop,
    metrics,
    ops,
)
from pflcore.algorithms import FedAvg
from pflcore.data import Partition, Source, federation_of, load, options_of, padded, partition
from pflcore.interop import distributed, lowrank
from pflcore.nn import Dropout, FactorizedConv2d, FactorizedLinear, factorize
from pflcore.nn.models import model_for
from pflcore.ops import stream
from pflcore.results.record import Record, Run, group, read
from pflcore.results.table import table
from pflcore.simulation import checkpoint as checkpoints
from pflcore.simulation.round import Setup, State, begin, sample
from pflcore.testing import Case, check

NAN = float("nan")
WORDS = ["a", "b"]
ROWS, INTS = torch.arange(12.0).reshape(4, 3), torch.arange(12).reshape(4, 3)
SQUARE = ops.pairwise_sqdist(ROWS)
LABELS, SCORES = torch.tensor([0, 1, 1, 0]), torch.eye(4)[:, :2]
DATA, NET = images(), Net(tiny_model())
ALG = FedAvg()
START, SETTING = begin(ALG, NET, DATA.n), make_setting(NET, DATA, Training(), workers=1)
SETUP = Setup(ALG, SETTING)
DICTS = [tiny_model()().state_dict() for _ in range(4)]
PACKED = pflcore.pack(DICTS)
LORA = [
    {"q.lora_A.weight": torch.randn(2, 5), "q.lora_B.weight": torch.randn(4, 2)} for _ in range(3)
]
LORA_ROWS, LAYOUT = lowrank.pack(LORA, [{"q.lora_A.weight": 1.0}] * 3)
FACTORS = {"a": [torch.randn(2, 5) for _ in range(3)], "b": [torch.randn(4, 2) for _ in range(3)]}
CORES, BASIS = lowrank.project(**FACTORS)
PROTOCOL = pflcore.cross_silo(DATA)

# kinds of arguments, and what is wrong for them; None is left out where it is an argument's default
TENSOR: list[Any] = ["text", None, WORDS, 3]
FLOATS: list[Any] = [*TENSOR, INTS, ROWS.to(torch.complex64), ROWS.to_sparse()]
MATRIX: list[Any] = [*FLOATS, ROWS[0], ROWS[None]]
INDEX: list[Any] = [
    *TENSOR,
    ROWS,
    torch.full((4, 2), -1),
    torch.full((4, 2), 99),
    torch.zeros(3, dtype=torch.long),
]
COUNT: list[Any] = ["3", None, WORDS, -1, 2.5, NAN, True]
POSITIVE: list[Any] = [*COUNT, 0]
NUMBER: list[Any] = ["text", None, WORDS, ROWS]
RATE: list[Any] = [*NUMBER, -1.0, NAN]
LIMIT: list[Any] = [*RATE, 0.0]
SHARE: list[Any] = [*LIMIT, 1.5]
NAME: list[Any] = ["unknown", None, WORDS, 3, NAN]
NAMES: list[Any] = [3, NAN, ROWS]
IDS: list[Any] = ["text", WORDS, NAN, [-1], [99], [0, 0], [[0]], []]
MODEL: list[Any] = ["text", None, WORDS, 3]
THING: list[Any] = ["text", None, WORDS, 3, NAN]
FUNCTION: list[Any] = ["text", WORDS, 3]
PLACE: list[Any] = [None, 3, WORDS, NAN]
VECTOR: list[Any] = ["text", None, WORDS, 3, ROWS]
PAIRS: list[Any] = [*TENSOR, torch.zeros(3)]
BOOL: list[Any] = []

LAYER: dict[str, list[Any]] = {"factors": POSITIVE, "init": NAME, "alpha": LIMIT}

Good = Mapping[str, Any]
Wrong = Mapping[str, list[Any]]
PREDICTION = ({"scores": SCORES, "y": LABELS}, {"scores": PAIRS, "y": PAIRS})
VALUES = ({"scores": torch.rand(4), "y": torch.rand(4)}, {"scores": PAIRS, "y": PAIRS})
MIX: tuple[Good, Wrong] = (
    {"updates": ROWS, "weight": torch.ones(4, 4)},
    {
        "weight": [*MATRIX, torch.ones(4, 7)],
        "index": INDEX,
        "base": [*FLOATS, ROWS[0, :2]],
        "lr": NUMBER,
    },
)
SEED: list[Any] = ["3", None, WORDS, 2.5, NAN, 2**70]
HARDWARE: list[Any] = ["text", None, WORDS, 3, Hardware(device="cuda:99"), Hardware(device="mps")]
EVALUATIONS = [
    *(Evaluation(split=name) for name in ("unknown", "val")),
    *(Evaluation(clients=ids) for ids in ([99], [0, 0], [])),
    *(Evaluation(metrics=m) for m in (["unknown"],)),
]
RUN: tuple[Good, Wrong] = (
    {"algorithm": "fedavg", "model": tiny_model(), "data": DATA, "rounds": 1},
    {
        "algorithm": NAME,
        "model": MODEL,
        "data": THING,
        "training": ["text", WORDS, 3],
        "rounds": POSITIVE,
        "participation": SHARE,
        "clients": [*IDS, 3],
        "seed": SEED,
        "batch_norm": NAME,
        "warm_start": [*THING, State({}, {}, torch.zeros(3, 0), torch.zeros(3, dtype=torch.bool))],
        "loss": ["text", WORDS, 3],
        "hardware": HARDWARE,
        "evaluation": [*THING, *EVALUATIONS],
        "robustness": [
            *THING,
            *(Robustness(adversary=Adversary("noise", ids)) for ids in ([99], range(3))),
        ],
    },
)
TABLE: dict[Callable[..., Any], tuple[Good, Wrong]] = {
    Evaluation: (
        {},
        {
            "every": COUNT,
            "split": [None, WORDS, 3, NAN],
            "clients": ["text", NAN, WORDS, [-1], [2.5], -1, 0],
            "metrics": ["text", 3, [3], {"mine": 3}],
        },
    ),
    Hardware: (
        {},
        {
            "engine": NAME,
            "device": [None, WORDS, 3, NAN],
            "workers": POSITIVE,
            "rows": [3, WORDS, NAN],
        },
    ),
    Robustness: ({}, {"clip": LIMIT, "adversary": ["text", WORDS, 3, NAN]}),
    Adversary: (
        {"attack": "noise", "clients": [1]},
        {"attack": NAME, "clients": ["text", 3, WORDS, [-1], [2.5]], "strength": LIMIT},
    ),
    # ops
    ops.pairwise_sqdist: (
        {"a": ROWS},
        {"a": MATRIX, "b": [*MATRIX, ROWS[:, :2], ROWS.double()], "index": [*TENSOR, ROWS]},
    ),
    ops.aggregate: (MIX[0], {"updates": MATRIX, **MIX[1], "out": [*FLOATS, ROWS[:2]]}),
    ops.feddwa_weights: ({"sqdist": SQUARE, "k": 2}, {"sqdist": MATRIX, "k": POSITIVE}),
    ops.waffle_weights: (
        {"dist": SQUARE[0], "target": 0, "omega": 0.5},
        {
            "dist": FLOATS,
            "target": ["text", None, WORDS, -1, 9, 2.5],
            "omega": [*RATE],
            "psi": RATE,
            "tie": NAME,
        },
    ),
    ops.rank1_linear: (
        {"x": ROWS, "w_a": torch.rand(2, 5), "lam": torch.rand(5), "w_b": torch.rand(5, 3)},
        {
            "x": FLOATS,
            "w_a": MATRIX,
            "lam": [*FLOATS, torch.rand(4)],
            "w_b": [*MATRIX, torch.rand(5, 2)],
        },
    ),
    ops.sgd_step_: (
        {"w": ROWS.clone(), "grad": ROWS, "lr": 0.1},
        {
            "w": MATRIX,
            "grad": [*MATRIX, ROWS[:2]],
            "lr": NUMBER,
            "shift": [*FLOATS, ROWS[:, :2]],
            "mask": [*FLOATS, ROWS[0, :2]],
            "mu": NUMBER[:3],
            "momentum": NUMBER,
            "weight_decay": NUMBER,
            "buffer": [*FLOATS, ROWS[:2]],
        },
    ),
    ops.nearest: (
        {"guide": ROWS, "rows": ROWS, "k": 2},
        {
            "guide": [*MATRIX, ROWS[:, :2]],
            "rows": MATRIX,
            "k": POSITIVE,
            "method": NAME,
            "pivots": COUNT,
            "progress": FUNCTION,
        },
    ),
    stream.Files: ({"paths": ["some.safetensors"]}, {"paths": [3, None, []], "keys": [3, NAN]}),
    stream.aggregate: (MIX[0], {"updates": TENSOR, **MIX[1], "progress": FUNCTION}),
    stream.pairwise_sqdist: (
        {"a": ROWS},
        {"a": MATRIX, "b": [*MATRIX, ROWS[:, :2]], "progress": FUNCTION},
    ),
    # one's own code
    interop.pack: (
        {"uploads": DICTS},
        {
            "uploads": [*THING, [], [{}], [None], [{"a": "text"}]],
            "include": [*NAMES, "unknown"],
            "exclude": NAMES,
            "buffers": NAME,
        },
    ),
    interop.unpack: (
        {"rows": PACKED.rows, "form": PACKED.form},
        {"rows": MATRIX, "form": THING, "weight": MATRIX},
    ),
    interop.personalize: (
        {"uploads": DICTS},
        {
            "uploads": [*THING, []],
            "method": NAME,
            "guidance": THING,
            "previous": THING,
            "include": NAMES,
            "exclude": NAMES,
            "buffers": NAME,
        },
    ),
    distributed.pairwise_sqdist: (
        {"a": ROWS},
        {"a": MATRIX, "b": [*MATRIX, ROWS[:, :2], ROWS.double()], "group": ["text", 3, WORDS]},
    ),
    distributed.aggregate: (MIX[0], {"updates": MATRIX, **MIX[1]}),
    distributed.to_columns: (
        {"rows": ROWS},
        {"rows": MATRIX, "group": ["text", 3, WORDS], "width": COUNT},
    ),
    distributed.to_rows: (
        {"columns": ROWS},
        {"columns": MATRIX, "group": ["text", 3, WORDS], "count": COUNT},
    ),
    interop.Krum: ({}, {"f": COUNT, "m": POSITIVE}),
    interop.Clusters: ({}, {"k": POSITIVE, "linkage": NAME}),
    interop.Client: (
        {"algorithm": "fedavg", "model": tiny_model(), "data": (torch.rand(4, 6), LABELS)},
        {
            "algorithm": NAME,
            "model": MODEL,
            "data": THING,
            "training": ["text", WORDS, 3],
            "seed": SEED,
            "hardware": HARDWARE,
            "batch_norm": NAME,
            "loss": FUNCTION,
        },
    ),
    interop.Server: (
        {"algorithm": "fedavg", "template": tiny_model(), "num_clients": 3},
        {
            "algorithm": NAME,
            "template": MODEL,
            "num_clients": POSITIVE,
            "rounds": POSITIVE,
            "seed": SEED,
            "batch_norm": NAME,
            "clip": LIMIT,
        },
    ),
    lowrank.pack: (
        {"states": LORA, "scale": [{"q.lora_A.weight": 1.0}] * 3},
        {"states": [*THING, []], "scale": ["text", None, 3, WORDS, [1.0], [NAN] * 3]},
    ),
    lowrank.distances: (
        {"states": LORA, "scale": [{"q.lora_A.weight": 1.0}] * 3},
        {"states": [*THING, []], "scale": ["text", None, 3, WORDS, [1.0], [NAN] * 3]},
    ),
    lowrank.mix: (
        {
            "states": LORA,
            "scale": [{"q.lora_A.weight": 1.0}] * 3,
            "weight": torch.ones(3, 1),
            "index": torch.zeros(3, 1, dtype=torch.long),
        },
        {
            "states": [*THING, []],
            "scale": ["text", None, 3, WORDS, [1.0]],
            "weight": MATRIX,
            "index": INDEX,
        },
    ),
    lowrank.project: (
        FACTORS,
        {
            "a": [*THING, [], [ROWS[0]]],
            "b": [*THING, [], [ROWS[0]]],
            "scale": ["text", 3, WORDS, [1.0], [NAN] * 3],
        },
    ),
    lowrank.sqdist: (
        FACTORS,
        {
            "a": [*THING, [], [ROWS[0]]],
            "b": [*THING, [], [ROWS[0]]],
            "scale": ["text", 3, WORDS, [1.0], [NAN] * 3],
        },
    ),
    lowrank.lift: (
        {"row": CORES[0], "basis": BASIS, "rank": 1},
        {
            "row": [*FLOATS, torch.rand(1)],
            "basis": THING,
            "rank": POSITIVE,
            "scale": [*NUMBER, 0.0, NAN],
        },
    ),
    lowrank.unpack: (
        {"rows": LORA_ROWS, "layout": LAYOUT},
        {"rows": [*MATRIX, ROWS], "layout": THING},
    ),
    lowrank.scales: ({"model": tiny_model()()}, {"model": MODEL, "adapter": [None, 3]}),
    lowrank.fedsa_lora: ({"states": LORA}, {"states": [*THING, []]}),
    lowrank.ffa_lora: ({"states": LORA}, {"states": [*THING, []]}),
    # runs
    Simulation: RUN,
    pflcore.for_everyone: (
        {**RUN[0], "algorithm": "waffle"},
        {k: v for k, v in RUN[1].items() if k != "data"}
        | {"data": THING, "on_round": FUNCTION, "checkpoint": ["text", 3]},
    ),
    Training: (
        {},
        {
            "lr": RATE,
            "batch_size": COUNT,
            "epochs": COUNT,
            "momentum": RATE,
            "weight_decay": RATE,
            "schedule": FUNCTION,
            "local_optimizer": NAME,
            "betas": ["text", None, 3, WORDS, (0.9, NAN), (0.9, 2.0)],
            "eps": RATE,
            "clip_grad": LIMIT,
        },
    ),
    FedAvg: ({}, {"server_lr": RATE, "weighting": NAME}),
    Net: (
        {"build": tiny_model()},
        {
            "build": MODEL,
            "criterion": NAME,
            "head": ["unknown", 3, WORDS],
            "seed": ["3", None, WORDS, 2.5],
        },
    ),
    pflcore.step: (
        {"setup": SETUP, "state": START, "ids": torch.arange(3)},
        {"setup": THING, "state": THING, "ids": [*IDS, None]},
    ),
    begin: ({"alg": ALG, "net": NET, "n": 3}, {"alg": THING, "net": THING, "n": POSITIVE}),
    sample: (
        {"setup": SETUP, "round": 1},
        {"setup": THING, "round": POSITIVE, "participation": [*RATE, 1.5], "among": TENSOR},
    ),
    pflcore.evaluate: (
        {"setup": SETUP, "state": START},
        {
            "setup": THING,
            "state": THING,
            "split": NAME,
            "clients": IDS,
            "metrics": ["text", 3, {"mine": 3}],
        },
    ),
    pflcore.tune: (
        {
            "protocol": PROTOCOL,
            "net": NET,
            "algorithm": "fedavg",
            "training": Training(),
            "grid": {"training.lr": [0.1]},
            "rounds": 1,
        },
        {
            "protocol": THING,
            "net": MODEL,
            "algorithm": NAME,
            "training": THING,
            "grid": [*THING, {"unknown": [1]}, {"training.lr": 3}, {"training.lr": []}],
            "rounds": COUNT,
            "states": THING,
            "participation": SHARE,
            "seed": ["text", None, WORDS, 2.5, NAN],
            "hardware": HARDWARE,
            "folder": [3, WORDS],
            "metric": ["unknown", WORDS, 3, NAN],
            "say": FUNCTION,
        },
    ),
    pflcore.EarlyStopping: ({}, {"patience": POSITIVE, "key": [None, 3, WORDS], "min_delta": RATE}),
    pflcore.TensorBoard: ({"folder": "nowhere"}, {"folder": PLACE}),
    checkpoints.Checkpoint: (
        {"folder": "nowhere"},
        {"folder": PLACE, "every": COUNT, "minutes": RATE, "note": FUNCTION},
    ),
    checkpoints.load: ({"folder": "nowhere"}, {"folder": [*PLACE, "nowhere"]}),
    checkpoints.lock: ({"folder": "nowhere"}, {"folder": PLACE}),
    checkpoints.save: (
        {"folder": "nowhere", "tensors": {}, "facts": {}},
        {"folder": PLACE, "tensors": [*THING, {"a": 3}], "facts": THING},
    ),
    Record: ({"path": "nowhere"}, {"path": PLACE, "mark": ["text", 3]}),
    group: ({"lines": []}, {"lines": [3, None]}),
    read: ({"path": "nowhere"}, {"path": [*PLACE, "nowhere"]}),
    table: (
        {"runs": [Run({"algorithm": "fedavg"})]},
        {"runs": THING, "last": POSITIVE, "baseline": [3]},
    ),
    check: (
        {"algorithm": "fedavg"},
        {
            "algorithm": NAME,
            "model": FUNCTION,
            "data": ["text", 3],
            "skip": ["text", 3, ["unknown"]],
        },
    ),
    Case: ({"given": ALG}, {"given": THING, "model": FUNCTION, "federation": ["text", 3]}),
    # data
    Federation: (
        {"x": DATA.x, "y": DATA.y, "index": DATA.index},
        {
            "x": TENSOR,
            "y": [*TENSOR, DATA.y[:3]],
            "index": [
                *THING,
                {},
                {"train": 3},
                {"train": [ROWS]},
                {"train": [torch.tensor([999])]},
            ],
            "classes": ["3", WORDS, -1, 0, NAN, True],
            "relabel": [*TENSOR, torch.zeros(2, 2)],
        },
    ),
    Federation.from_arrays: (
        {"clients": [(ROWS, LABELS)]},
        {"clients": [*THING, [], [ROWS], [(ROWS, LABELS[:2])], [("a", "b")]]},
    ),
    Federation.from_datasets: (
        {"clients": [torch.utils.data.TensorDataset(ROWS, LABELS)]},
        {"clients": [*THING, [], [3]], "test_fraction": [*RATE, 1.5]},
    ),
    pflcore.cross_silo: (
        {"data": DATA},
        {
            "data": THING,
            "fractions": ["text", 3, WORDS, {"train": NAN}, {"train": -1.0}, {"train": "a"}],
            "seed": ["3", None, WORDS, 2.5],
        },
    ),
    pflcore.cross_device: (
        {"data": DATA},
        {"data": THING, "train": RATE, "val": RATE, "test": RATE, "seed": ["3", None, WORDS, 2.5]},
    ),
    federation_of: (
        {"data": "digits", "partition": "iid", "n": 3},
        {
            "data": NAME,
            "partition": ["unknown", 3, WORDS],
            "n": POSITIVE,
            "seed": ["3", None, WORDS, 2.5, -1],
            "shift_seed": ["3", None, WORDS, 2.5],
            "root": [3, WORDS],
            "train_samples": POSITIVE,
            "test_samples": POSITIVE,
        },
    ),
    padded: (
        {"sequences": [[1, 2], [3]]},
        {"sequences": ["text", None, 3, NAN, WORDS, [3], []], "length": POSITIVE},
    ),
    load: ({"name": "digits"}, {"name": NAME, "root": [3, WORDS]}),
    options_of: ({"name": "iid"}, {"name": NAME}),
    partition: (
        {"name": "iid", "labels": LABELS, "n": 2},
        {"name": NAME, "labels": ["text", None, WORDS, 3, ROWS], "n": POSITIVE},
    ),
    model_for: (
        {"name": "mlp", "shape": (1, 8, 8), "classes": 3},
        {
            "name": NAME,
            "shape": ["text", None, WORDS, NAN, (0, 3), (-1,)],
            "classes": ["3", WORDS, -1, 0, 2.5, NAN],
        },
    ),
    Dropout: ({}, {"p": [*RATE, 1.5]}),
    FactorizedLinear: (
        {"in_features": 4, "out_features": 3, "factors": 2},
        {"in_features": POSITIVE, "out_features": POSITIVE, **LAYER},
    ),
    FactorizedConv2d: (
        {"in_channels": 1, "out_channels": 3, "kernel_size": 2, "factors": 2},
        {"in_channels": POSITIVE, "out_channels": POSITIVE, "kernel_size": POSITIVE, **LAYER},
    ),
    factorize: (
        {"module": torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))},
        {
            "module": MODEL,
            "ranks": ["text", None, WORDS, 2.5, 0, -1, [1, 2, 3]],
            "init": NAME,
            "alpha": LIMIT,
            "head": ["unknown", 3],
        },
    ),
    # metrics
    metrics.auc: PREDICTION,
    metrics.f1: PREDICTION,
    metrics.balanced_accuracy: PREDICTION,
    metrics.right: PREDICTION,
    metrics.mae: VALUES,
    metrics.rmse: VALUES,
    metrics.r2: VALUES,
    metrics.best: ({"curve": [1.0]}, {"curve": VECTOR}),
    metrics.final: ({"curve": [1.0]}, {"curve": VECTOR}),
    metrics.last_mean: ({"curve": [1.0]}, {"curve": VECTOR, "rounds": VECTOR, "k": POSITIVE}),
    metrics.bytes_to_reach: (
        {"curve": [1.0], "sent": [1], "goal": 1.0},
        {"curve": VECTOR, "sent": VECTOR, "goal": NUMBER},
    ),
    metrics.count: ({"values": [1.0]}, {"values": VECTOR}),
    metrics.mean: ({"values": [1.0]}, {"values": VECTOR}),
    metrics.std: ({"values": [1.0]}, {"values": VECTOR}),
    metrics.paper_cell: ({"shares": [1.0]}, {"shares": VECTOR}),
    metrics.percentile: ({"values": [1.0]}, {"values": VECTOR, "q": [*RATE, 101]}),
    metrics.worst_decile: ({"values": [1.0]}, {"values": VECTOR, "share": SHARE}),
    metrics.weighted_mean: (
        {"values": [1.0], "weight": [1.0]},
        {"values": VECTOR, "weight": [*VECTOR, [1.0, 2.0], [-1.0]]},
    ),
    metrics.hurt: ({"after": [1.0], "before": [1.0]}, {"after": VECTOR, "before": VECTOR}),
    metrics.largest_share: ({"cluster": [1]}, {"cluster": VECTOR}),
}
NOT_MADE_BY_USERS = [
    "Backend",
    "apply",
    "Clients",
    "Cohort",
    "Fit",
    "Mix",
    "Objective",
    "Rows",
    "Setup",
    "Shape",
    "Traits",
    "Form",
    "History",
    "Layout",
    "Basis",
    "Nearest",
    "Packed",
    "Personalized",
    "Pool",
    "State",
    "TopK",
    "ClientGroups",
    "Outcome",
]
CHECKED_WHERE_USED = {Partition: "Federation.from_partition", Source: "federation_of", Run: "read"}
FOREIGN = re.compile(
    r"Traceback|object is not|unsupported operand|not supported between|has no "
    r"attribute|object of type|NoneType' ",
    re.I,
)
# where a sentence says more than the argument's name: which client's data, which table of names,
# what a loss is to a Net
ALIAS = {
    **{
        name: rf"{name}|client \d"
        for name in ("uploads", "guidance", "previous", "states", "data", "clients")
    },
    "method": "method|algorithm",
    "loss": "loss|criterion",
    "hardware": "hardware|device",
    "evaluation": r"evaluation|metrics|split",
    "robustness": "robustness|adversary",
    "metric": "metrics?",
    "name": "name|data|partition|model",
}
CASES = [(f, name) for f, (_, wrong) in TABLE.items() for name in wrong]


def title(f):
    return f"{f.__module__.removeprefix('pflcore.')}.{f.__qualname__}"


def default(f, name):
    parameters = inspect.signature(f).parameters
    if name not in parameters:  # one of the simulation's, passed on
        parameters = inspect.signature(Simulation).parameters
    return parameters[name].default


def fault(f, name, value):
    """What is wrong with the answer to one wrong argument."""
    try:
        made = f(**{**TABLE[f][0], name: value})
        if inspect.isgeneratorfunction(inspect.unwrap(f)):
            with made:
                pass
    except (ValueError, TypeError) as error:
        text, place = str(error), Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if ROOT / "pflcore" not in place.parents or FOREIGN.search(text):
            return f"not our words: {text}"
        if not re.search(rf"\b({ALIAS.get(name, name)})\b", text):
            return f"does not name it: {text}"
        if "\n" in text or re.search(r"[.!?] [A-Z]", text):
            return f"not one sentence: {text}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken without a word"


@pytest.mark.parametrize(("f", "name"), CASES, ids=[f"{title(f)}-{name}" for f, name in CASES])
def test_a_wrong_argument_is_named_in_one_sentence(f, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = {}
    for value in TABLE[f][1][name]:
        if value is None and default(f, name) is None:
            continue
        said = fault(f, name, value)
        if said:
            faults[repr(value)[:60]] = said
    assert not faults


def test_every_public_callable_is_in_the_table():
    known = [*TABLE, *CHECKED_WHERE_USED]
    missing, module = [], ""
    for section, name in re.findall(
        r"^(?:## `(pflcore[\w.]*)`|- `(\w+)`)",
        (ROOT / "docs" / "api.md").read_text(encoding="utf-8"),
        re.M,
    ):
        module = section or module
        # Flower's own tests do this, where Flower is; what reaches a reference has been checked;
        # the command line has its own
        if module in (
            "pflcore.interop.flower",
            "pflcore.ops.reference",
            "pflcore.cli",
            "pflcore.check",
        ):
            continue
        thing = getattr(importlib.import_module(module), name) if name else None
        if (
            callable(thing)
            and thing not in known
            and name not in NOT_MADE_BY_USERS
            and not is_exempt(thing)
        ):
            missing.append(f"{module}.{name}")
    assert missing == []


def is_exempt(thing):
    """Without arguments to get wrong, or no more than a name of a type; algorithms' own options are
    tested with them."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return True
    if inspect.isclass(thing):
        return issubclass(thing, Exception | Algorithm) or getattr(thing, "_is_protocol", False)
    return not inspect.signature(thing).parameters

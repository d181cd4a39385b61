"""How much memory a run needs at its peak, beside data and activations: measured on a stand-in, so
that it is right for any algorithm.

The state's size is known. What a round and an evaluation need beside it grows with the cohort and
with the federation; both slopes are found by playing two rounds of the algorithm itself with a
model of some thousand parameters, while every tensor that lives is counted.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pflcore.algorithms.protocol import Algorithm, Tensors
from pflcore.data.federation import Federation
from pflcore.metrics import human
from pflcore.simulation.evaluate import evaluate
from pflcore.simulation.round import Setup, begin, fresh, step
from pflcore.train import Engine, Net, Setting, Training, memory
from pflcore.train.chain import find_chain
from pflcore.train.workers import Workers, one_thread

# bytes of two rows for each client below which nothing is measured: the interpreter alone needs ten
# times that
SMALL = 1 << 24
# rows: the model as given, as started from, as bound in a thread, a kernel's own, what an allocator
# keeps of freed ones
COPIES = 20
PREPARED = 6.0  # rows for each client of the cohort, as measured with FactorizedWaffle
HIDDEN = 1  # row for each client of the cohort that is made inside of an op, where it is not seen
SPLITS = ("train", "val", "test")


def peak_bytes(setup: Setup, participation: float) -> int:
    """An estimate of a run's peak memory beside data and activations."""
    run, alg = setup.setting, setup.algorithm
    net, engine, n, training = run.net, run.engine, run.data.n, run.training
    cohort = max(1, int(participation * n + 0.5))
    row = net.size * net.w0.element_size()
    own, server, shared = row_bytes(setup)
    kept = 0
    if engine.chain is not None:
        kept = run.workers.count * engine.chain.bytes_kept(
            training.batch_size, net.w0.element_size()
        )
    state = kept + shared + n * net.b0.nbytes + (0 if setup.folder else own + server)
    if 2 * n * row < SMALL:
        return state + 2 * cohort * row + 4 * cohort * own // n
    head = net.head_slice if net.head_name is not None else slice(0, 0)
    whole = 2 * (head.stop - head.start) > net.size  # is most of the model its head?
    momentum = 0.5 if training.momentum else 0.0
    stand_in = replace(training, lr=0.01, batch_size=2, epochs=1, momentum=momentum, schedule=None)
    chained = engine.chain is not None
    fixed, each, everyone = rows_beside_state(alg, stand_in, engine.name, chained, whole)
    at_once = max(0, min(run.workers.count, cohort) - 1) if engine.name == "loop" else 0
    proof = 20 * row  # copies for the comparison of engines, before the first round
    rows = COPIES + fixed + (HIDDEN + each) * cohort + everyone * n + 3 * at_once
    return state + max(int(row * rows), proof)


def row_bytes(setup: Setup) -> tuple[int, int, int]:
    """Bytes of all clients' own rows, of the server's rows for each, and of what else it holds."""
    alg, net, n = setup.algorithm, setup.setting.net, setup.setting.data.n
    server = alg.init(**alg.initial(net), n=n)
    mine = {k for k, v in server.items() if k in alg.traits.per_client and v.dim() > 1}
    own = n * nbytes(fresh(alg, net, server, n))
    each = nbytes({k: v for k, v in server.items() if k in mine})
    return own, each, nbytes(server) - each


def folder_for(
    setup: Setup, choice: str | Path, participation: float, from_start: bool
) -> Path | None:
    """The folder for the clients' rows, or None: they stay in memory. RunTooLarge, one sentence,
    where the disk has less than may be written."""
    run = setup.setting
    own, server, _ = row_bytes(setup)
    device = run.data.device.type
    if choice == "memory" or not (own + server and from_start) or device != "cpu":
        return None
    most = memory.capacity(device)
    if choice == "auto" and (most is None or peak_bytes(setup, participation) <= most // 2):
        return None
    folder = Path(tempfile.gettempdir() if choice == "auto" else choice)
    if not folder.is_dir():
        raise ValueError(
            f"rows: expected 'auto', 'memory' or a folder, got {str(choice)!r}, which is none of "
            "them."
        )
    n = run.data.n
    ever = min(n, int(participation * n + 1) * run.rounds)
    need, free = own * ever // n + server, shutil.disk_usage(folder).free
    if need > free:
        raise memory.RunTooLarge(
            f"rows: the clients' rows may take {human(need)} on disk, and {folder} has "
            f"{human(free)} free; name a folder with more room (rows), or let fewer clients take "
            "part."
        )
    return folder


def nbytes(tensors: Tensors) -> int:
    return sum(v.nbytes for v in tensors.values())


@functools.lru_cache(maxsize=256)
def rows_beside_state(
    alg: Algorithm, training: Training, engine: str, chained: bool, whole: bool
) -> tuple[float, float, float]:
    """Rows [P] that live at the peak beside the state: so many in any case, per client of the
    cohort, per client of the federation."""
    if type(alg).prepare is not Algorithm.prepare:  # it trains a model that the stand-in is not
        return 0.0, PREPARED, 0.0
    try:
        with warnings.catch_warnings():  # what a method says of the stand-in
            warnings.simplefilter("ignore")
            sizes = ((2, 4), (2, 8), (6, 8))
            low, wide, both = (measured(alg, training, engine, chained, whole, *c) for c in sizes)
    except Exception as error:  # an algorithm that asks more of its data than a stand-in has
        said = str(error).splitlines()[0] if str(error) else ""
        why = f"{type(error).__name__}: {said}".strip(": ")
        warnings.warn(
            f"memory: {type(alg).__name__} cannot be tried on a stand-in ({why}); 6 models for "
            "each client are assumed.",
            stacklevel=2,
        )
        return 0.0, 6.0, 0.0
    everyone, each = max(0.0, (wide - low) / 4), max(0.0, (both - wide) / 4)
    return max(0.0, both - 6 * each - 8 * everyone), each, everyone


def measured(
    alg: Algorithm, training: Training, engine: str, chained: bool, whole: bool, cohort: int, n: int
) -> float:
    """Rows at the peak of a round and an evaluation of a stand-in."""
    body = getattr(alg, "private", "") == "body"
    own = {"target": 0, "private": "body" if body else "head"}  # names of the stand-in's own
    alg = replace(alg, **{f.name: own[f.name] for f in fields(alg) if f.name in own})
    sizes, bias = ((60, 200), False) if whole else ((30, 400, 2), True)
    net = Net(lambda: nn.Sequential(*(nn.Linear(a, b, bias) for a, b in pairwise(sizes))))
    gen, count = torch.Generator().manual_seed(0), 4 * n
    index = {s: list((torch.arange(count) + i * count).split(4)) for i, s in enumerate(SPLITS)}
    x = torch.randn(3 * count, sizes[0], generator=gen)
    data = Federation(x, torch.randint(0, 2, (3 * count,), generator=gen), index, 2)
    chain = find_chain(net, data) if chained else None
    form = Engine(engine, None if isinstance(chain, str) else chain)
    setup = Setup(alg, Setting(net, data, training, form, Inline(1), 0, 3))
    ids = torch.arange(cohort)
    state, _ = step(setup, begin(alg, net, n), ids)  # at first some have nothing to send yet
    with Live() as live:
        state, _ = step(setup, state, ids)
        evaluate(setup, state)
    return float(live.peak) / (net.size * net.w0.element_size())


class Inline(Workers):
    """Works in the calling thread, where allocations and torch's counter of operations are seen;
    one thread inside, as a worker has it."""

    def map(self, f: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with one_thread():
            return [f(i) for i in items]


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that live, of those that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note((args, kwargs), counts=False)
        out = func(*args, **(kwargs or {}))
        self.note(out, counts=True)
        self.seen = {k: v for k, v in self.seen.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.seen.values()))
        return out

    def note(self, tree: Any, counts: bool) -> None:
        for t in tree_leaves(tree):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                ref = StorageWeakRef(storage)
                if ref.cdata not in self.seen or self.seen[ref.cdata][0].expired():
                    self.seen[ref.cdata] = ref, storage.nbytes() if counts else 0

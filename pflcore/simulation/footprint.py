"""How much memory a run needs at its peak, beside data and activations: measured on a stand-in, so that it is right for any algorithm.

The state's size is known. What a round and an evaluation need beside it grows with the cohort and with the federation; both slopes are
found by playing two rounds of the algorithm itself with a model of some thousand parameters, while every tensor that lives is counted.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pflcore.algorithms.base import FedAvg, Tensors
from pflcore.data.federation import Federation
from pflcore.simulation.round import begin, evaluate, step
from pflcore.train import Net, Training
from pflcore.train.bridge import Engine, Path, Setting
from pflcore.train.chain import Chain, find_chain
from pflcore.train.workers import one_thread

SMALL = 1 << 24  # bytes of two rows for each client below which nothing is measured: the interpreter alone needs ten times that
COPIES = 20  # rows: the model as given, as started from, as bound in a thread, a kernel's own, what an allocator keeps of freed ones
PREPARED = 6.0  # rows for each client of the cohort, as measured with FactorizedWaffle
HIDDEN = 1  # row for each client of the cohort that is made inside of an op, where it is not seen
SPLITS = ("train", "val", "test")


def peak_bytes(algorithm: FedAvg, net: Net, n: int, participation: float, training: Training, path: Path, engine: Engine) -> int:
    """An estimate of a run's peak memory beside data and activations."""
    cohort = max(1, int(participation * n + 0.5))
    row = net.size * net.w0.element_size()
    g, own = algorithm.init(net, n)
    chain = engine.chain
    kept = 0 if chain is None else engine.workers * chain.bytes_kept(training.batch_size, net.w0.element_size())
    state = kept + nbytes(g) + n * (nbytes(own) + net.b0.numel() * net.b0.element_size())
    if 2 * n * row < SMALL:
        return state + 2 * cohort * row + 4 * cohort * nbytes(own)
    head = net.head_slice if net.head_name is not None else slice(0, 0)
    whole = 2 * (head.stop - head.start) > net.size  # is most of the model its head?
    momentum = replace(training, lr=0.01, batch_size=2, epochs=1, momentum=0.5 if training.momentum else 0.0, schedule=None)
    fixed, each, everyone = rows_beside_state(algorithm, momentum, path.engine, path.form == "chain", whole)
    at_once = max(0, min(engine.workers, cohort) - 1) if path.engine == "loop" else 0  # clients in work beside the one that was measured
    proof = 20 * row  # copies for the comparison of the faster forms, before the first round
    return state + max(int(row * (COPIES + fixed + (HIDDEN + each) * cohort + everyone * n + 3 * at_once)), proof)


def nbytes(tensors: Tensors) -> int:
    return sum(v.numel() * v.element_size() for v in tensors.values())


@functools.lru_cache(maxsize=256)
def rows_beside_state(algorithm: FedAvg, training: Training, engine: str, chained: bool, whole: bool) -> tuple[float, float, float]:
    """Rows [P] that live at the peak beside the state: so many in any case, per client of the cohort, per client of the federation."""
    if type(algorithm).prepare is not FedAvg.prepare:  # it trains a model that the stand-in is not
        return 0.0, PREPARED, 0.0
    try:
        with warnings.catch_warnings():  # what a method says of the stand-in
            warnings.simplefilter("ignore")
            low, wide, both = (measured(algorithm, training, engine, chained, whole, *c) for c in ((2, 4), (2, 8), (6, 8)))
    except Exception as error:  # an algorithm that asks more of its data than a stand-in has
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip(": ")
        warnings.warn(
            f"memory: {type(algorithm).__name__} cannot be tried on a stand-in ({why}); 6 models for each client are assumed.", stacklevel=2
        )
        return 0.0, 6.0, 0.0
    everyone, each = max(0.0, (wide - low) / 4), max(0.0, (both - wide) / 4)
    return max(0.0, both - 6 * each - 8 * everyone), each, everyone


def measured(algorithm: FedAvg, training: Training, engine: str, chained: bool, whole: bool, cohort: int, n: int) -> float:
    own = {"target": 0, "private": "body" if getattr(algorithm, "private", "") == "body" else "head"}  # names of the stand-in's own
    algorithm = replace(algorithm, **{f.name: own[f.name] for f in fields(algorithm) if f.name in own})  # type: ignore[arg-type]
    sizes, bias = ((60, 200), False) if whole else ((30, 400, 2), True)
    net = Net(lambda: nn.Sequential(*(nn.Linear(a, b, bias) for a, b in pairwise(sizes))))
    gen = torch.Generator().manual_seed(0)
    count = 4 * n
    index = {s: list((torch.arange(count) + i * count).split(4)) for i, s in enumerate(SPLITS)}
    x, y = torch.randn(3 * count, sizes[0], generator=gen), torch.randint(0, 2, (3 * count,), generator=gen)
    data = Federation(x, y, index, 2)
    chain = find_chain(net, data) if chained else None
    setting = Setting(net, data, training, Inline(engine, 1, chain if isinstance(chain, Chain) else None), 0, 3)
    state = begin(algorithm, net, n)
    ids = torch.arange(cohort)
    state, _ = step(algorithm, state, setting, ids)  # in the first round some have nothing to send yet
    with Live() as live:
        state, _ = step(algorithm, state, setting, ids)
        evaluate(algorithm, state, setting)
    return float(live.peak) / (net.size * net.w0.element_size())


class Inline(Engine):
    """Works in the calling thread, where allocations and torch's counter of operations are seen; one thread inside, as a worker has it."""

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

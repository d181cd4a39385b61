"""A client's costs of a round: traffic and floating point operations.

`step()` counts the traffic, and torch counts the operations. These are FedDWA's
Tables 4 and 5 (Liu et al. 2023), for any algorithm and model.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pflcore import Algorithm, Federation, Net, Training, step
from pflcore.check import PositiveInt, checked
from pflcore.data._protocols import with_validation
from pflcore.lab.results.table import markdown_table
from pflcore.simulation.round import RunConfig, initial_state
from pflcore.train._context import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._workers import Workers, single_threaded

MIB = 2**20

Shape = Sequence[int]


def _sqdist_operations(a: Shape, b: Shape | None = None, *_: Any, **__: Any) -> int:
    """Operations of distances between rows of these shapes."""
    rows = a[0] if b is None else b[0]
    return 3 * a[0] * rows * a[1]


def _aggregate_operations(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Operations of mixtures of rows, by the shapes of rows and weights."""
    return 2 * weight[0] * weight[1] * x[1]


def _rank1_operations(
    x: Shape, a: Shape, lam: Shape, b: Shape, *_: Any, **__: Any
) -> int:
    """Operations of a layer of rank-1 factors, by the shapes of input and factors."""
    return 2 * math.prod(x[:-1]) * lam[-1] * (a[-2] + b[-1])


def _rank1_backward_operations(
    _: Shape,
    x: Shape,
    a: Shape,
    lam: Shape,
    b: Shape,
    need_x: bool,
    *more: Any,
    **__: Any,
) -> int:
    """Operations of its gradients: two forward passes, and the gradient of x."""
    of_x = 2 * math.prod(x[:-1]) * lam[-1] * b[-1] if need_x else 0
    return 2 * _rank1_operations(x, a, lam, b) + of_x


# How torch's counter counts pflcore's ops, by the shapes of their arguments.
OWN_OPS = {
    torch.ops.pflcore.pairwise_sqdist: _sqdist_operations,
    torch.ops.pflcore.aggregate: _aggregate_operations,
    torch.ops.pflcore.rank1_linear: _rank1_operations,
    torch.ops.pflcore.rank1_linear_backward: _rank1_backward_operations,
}


# The name of an op, and the shapes of its tensors.
Call = tuple[str, tuple[tuple[int, ...], ...]]


class Inline(Workers):
    """A worker in the calling thread, where torch's counter sees it.

    It uses one thread, as every worker does.
    """

    def map(self, f: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with single_threaded():
            return [f(i) for i in items]


class Cost(NamedTuple):
    """The costs of a round for a client that takes part.

    A multiplication and an addition count as two operations.

    Attributes:
        models_down: models received, in units of the model's parameters
        models_up: models sent
        bytes: bytes of both ways
        client: floating point operations of its training on `samples` samples
        server: floating point operations of the server, for all clients together
        server_models: numbers that the server keeps, in models
        client_models: numbers that a client keeps, in models
        parameters: numbers of a model
        calls: how often the server calls each of pflcore's ops, by the op's name and
            the shapes of its tensors
    """

    models_down: float
    models_up: float
    bytes: float
    client: float
    server: float
    server_models: float = 0.0
    client_models: float = 0.0
    parameters: int = 0
    calls: Mapping[Call, int] = {}


class CallCounter(TorchDispatchMode):
    """Counts the calls of pflcore's ops, by name and shapes."""

    def __init__(self, calls: Counter[Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        space, _, name = func.name().partition("::")
        if space == "pflcore":
            values = [*args, *(kwargs or {}).values()]
            shapes = [tuple(v.shape) for v in values if isinstance(v, Tensor)]
            self.calls[name.partition(".")[0], tuple(shapes)] += 1
        return func(*args, **(kwargs or {}))


@checked
def cost(
    algorithm: Algorithm,
    net: Net,
    shape: Sequence[int],
    classes: PositiveInt,
    *,
    n: PositiveInt = 20,
    samples: PositiveInt = 2500,
    batch_size: PositiveInt = 20,
) -> Cost:
    """The costs of a round with all `n` clients and one epoch.

    It is the second round, since FedFomo and L2C have nothing to send in the first. It
    is played on random inputs of `shape`, one batch for each client, and a quarter of a
    batch for validation where the algorithm needs that. Operations are linear in the
    samples, so they are scaled to `samples` for each client. Evaluation is not counted.
    """
    each = batch_size
    everybody = torch.arange(n)
    needs_val = algorithm.traits.needs_val
    if needs_val:
        each += -(-batch_size // 4)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n * each, *shape, generator=gen)
    y = torch.randint(0, classes, (n * each,), generator=gen)
    index = {"train": list(torch.arange(n * each).split(each))}
    data = Federation(x, y, index, classes)
    if needs_val:
        data = with_validation(data)
    training = Training(1e-3, batch_size)
    context = TrainContext(net, data, training, Engine("loop"), Inline(1), 0, 2)
    state = initial_state(algorithm, net, n)
    state, _ = step(RunConfig.of(algorithm, context), state, everybody)
    # Operations are counted hook by hook: MOCHA's W W^T is not a client's work, and the
    # check that uploads are finite belongs to no method.
    heard = copy.copy(algorithm)
    spent = dict.fromkeys(("train", "send", "update"), 0.0)
    calls = Counter[Call]()

    def counted(name: str, *args: Any) -> Any:
        flops = FlopCounterMode(display=False, custom_mapping=OWN_OPS)
        by_server = nullcontext() if name == "train" else CallCounter(calls)
        with flops as counter, by_server:
            out = getattr(algorithm, name)(*args)
        spent[name] += counter.get_total_flops()
        return out

    for name in spent:
        object.__setattr__(heard, name, partial(counted, name))  # It is frozen.
    state, done = step(RunConfig.of(heard, context), state, everybody)
    model_bytes = net.size * net.w0.element_size()
    down = done.bytes_down / n
    up = done.bytes_up / n
    return Cost(
        models_down=down / model_bytes,
        models_up=up / model_bytes,
        bytes=down + up,
        client=spent["train"] / n * samples / each,
        server=spent["send"] + spent["update"],
        server_models=_count_numbers(state.server) / net.size,
        client_models=_count_numbers(state.clients) / n / net.size,
        parameters=net.size,
        calls=calls,
    )


def _count_numbers(tensors: Mapping[str, Tensor]) -> int:
    """The number of floating point numbers in tensors."""
    return sum(t.numel() for t in tensors.values() if t.is_floating_point())


def table(costs: dict[str, Cost], samples: int) -> str:
    """The costs as Markdown.

    They are traffic in models and MiB, and operations of a client.
    """
    first = next(iter(costs.values()))
    rows = [
        [
            "method",
            "models down",
            "models up",
            "MiB",
            f"FLOPs for {samples:,} samples",
            "of the first",
            "server FLOPs",
        ]
    ]
    for name, cost in costs.items():
        cells = [
            name,
            f"{cost.models_down:.2f}",
            f"{cost.models_up:.2f}",
            f"{cost.bytes / MIB:.2f}",
            f"{cost.client:.2e}",
            f"{cost.client / first.client:.2f}",
            f"{cost.server:.1e}",
        ]
        rows.append(cells)
    return "\n".join([*markdown_table(rows), ""])

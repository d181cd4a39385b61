"""What a round costs a client: traffic as `step()` counts it, and floating point
operations as torch counts them.

FedDWA's Tables 4 and 5 (Liu et al. 2023), for any algorithm and model.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.table import markdown
from pflcore import Algorithm, Federation, Net, Training, step
from pflcore.check import PositiveInt, checked
from pflcore.data._protocols import with_validation
from pflcore.simulation.round import RunConfig, initial_state
from pflcore.train._context import TrainContext
from pflcore.train._engines import Engine
from pflcore.train._workers import Workers, single_threaded

MIB = 2**20
# how pflcore's ops are counted, by the shapes of what they are given
OWN_OPS = {
    torch.ops.pflcore.pairwise_sqdist: lambda a, b=None, *_, **__: (
        3 * a[0] * (b or a)[0] * a[1]
    ),
    torch.ops.pflcore.aggregate: lambda x, weight, *_, **__: (
        2 * weight[0] * weight[1] * x[1]
    ),
}


class Inline(Workers):
    """Works in the calling thread, where torch's counter of operations sees it; one
    thread inside, as a worker has it."""

    def map(self, f: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with single_threaded():
            return [f(i) for i in items]


class Cost(NamedTuple):
    """Per client that takes part and round."""

    models_down: float  # models received, in units of the model's parameters
    models_up: float
    bytes: float  # both ways
    # floating point operations of its training on `samples` samples, a multiply and an
    # add counted as two
    client: float
    server: float  # of the distances and mixes, all clients' together


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
    """The costs of a round with all `n` clients, one epoch each, after a first round
    (in which FedFomo and L2C have nothing to send).

    Played on random inputs of `shape`, one batch for each client (and a quarter of it
    for validation where the algorithm asks for that); operations are linear in the
    samples, so they are scaled to `samples` each. Evaluation is not counted.
    """
    each, everybody, held = batch_size, torch.arange(n), algorithm.traits.needs_val
    if held:
        each += -(-batch_size // 4)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n * each, *shape, generator=gen)
    y = torch.randint(0, classes, (n * each,), generator=gen)
    data = Federation(
        x, y, {"train": list(torch.arange(n * each).split(each))}, classes
    )
    data = with_validation(data) if held else data
    s = TrainContext(
        net, data, Training(1e-3, batch_size), Engine("loop"), Inline(1), 0, 2
    )
    state, _ = step(
        RunConfig(algorithm, s), initial_state(algorithm, net, n), everybody
    )
    # by its hooks: MOCHA's W W^T is no client's work, a look whether uploads are finite
    # no method's
    heard, spent = copy.copy(algorithm), dict.fromkeys(("train", "send", "update"), 0.0)

    def counted(name: str, *args: Any) -> Any:
        with FlopCounterMode(display=False, custom_mapping=OWN_OPS) as counter:
            out = getattr(algorithm, name)(*args)
        spent[name] += counter.get_total_flops()
        return out

    for name in spent:
        object.__setattr__(heard, name, partial(counted, name))  # it is frozen
    _, done = step(RunConfig(heard, s), state, everybody)
    row, (down, up) = (
        net.size * net.w0.element_size(),
        (done.bytes_down / n, done.bytes_up / n),
    )
    client = spent["train"] / n * samples / each
    return Cost(
        down / row, up / row, down + up, client, spent["send"] + spent["update"]
    )


def table(costs: dict[str, Cost], samples: int) -> str:
    """Markdown: traffic in models and MiB, operations per client and round."""
    first = next(iter(costs.values()))
    head = (
        f"method | models down | models up | MiB | FLOPs for {samples:,} samples | of "
        "the first | server FLOPs"
    )
    rows = (
        f"{name} | {c.models_down:.2f} | {c.models_up:.2f} | {c.bytes / MIB:.2f} | "
        f"{c.client:.2e} | {c.client / first.client:.2f} | {c.server:.1e}"
        for name, c in costs.items()
    )
    return "\n".join([*markdown([head, *rows]), ""])

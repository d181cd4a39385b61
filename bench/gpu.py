"""Times the CUDA kernels beside the best torch call and beside what the card can do, measured in
the same run.

The limits: bytes that must move, over the bandwidth of a copy of 2 GiB; float32 instructions, over
the rate of a large float32 matrix product (no TF32). A kernel's limit is the larger of the two
times. Times are medians over CUDA events. Run `python -m bench.gpu`; `--quick` for small sizes
only, `--json FILE` to keep the measurements.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import table
from bench.problem import Problem, parsed
from pflcore import Evaluation, Hardware, Simulation, Training, ops
from pflcore.data import Federation
from pflcore.nn.models import cnn

CARD = torch.device("cuda")
SIZES = ((20, 61_706), (10, 10**6), (100, 10**6), (10, 10**7), (100, 10**7))
FIELDS = ("op", "size", "provider", "ms", "limit_ms", "of_limit", "slower", "note")
Call = Callable[[], Any]


def timed(call: Callable[[], Any], budget: float) -> tuple[list[float], Any]:
    """Seconds of each call on the card, after two that warm it, within about `budget` seconds."""

    def finished() -> None:
        call()
        torch.cuda.synchronize()

    finished()
    repeats = int(max(5, min(50, budget / max(table.clock(finished)[0], 1e-5))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], None


def limits() -> dict[str, float]:
    """What this card does, measured now: bytes that a copy reads and writes, and float32 additions
    and multiplications in the instructions of `Problem.mix`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    size = min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    a = torch.empty(size // 4, device=CARD)
    b = torch.empty_like(a)
    moved = 2 * size / min(timed(lambda: b.copy_(a), 0.5)[0])
    m = torch.randn(8192, 8192, device=CARD)
    instructions = 8192.0**3 / min(timed(lambda: m @ m, 0.5)[0])
    return {"read": moved, "write": moved, "fma": 2 * instructions, "sub_fma": 1.5 * instructions}


def fits(*elements: int) -> bool:
    return sum(elements) * 5.2 < torch.cuda.mem_get_info()[0]


def problem(
    op: str, size: dict[str, Any], moved: float, work: float, ours: Call, **others: Call
) -> Problem:
    """`moved` bytes and `work` additions and multiplications; without either it has no limit."""
    calls = {"pflcore": ours, **others}
    mix = "sub_fma" if "sqdist" in op else "fma"
    return Problem(
        op, size, calls, lambda got: None, int(moved), 0, float(work or bool(moved)), mix
    )


def distances(a: Tensor, size: dict[str, Any]) -> Iterator[Problem]:
    (n, p), op = a.shape, "pairwise_sqdist"
    half, work = a.bfloat16(), 1.5 * n * (n - 1) * p
    product: dict[str, Call] = {"a @ a.T (no distances yet)": lambda: a @ a.T}
    yield problem(op, size, 4 * n * p, work, lambda: ops.pairwise_sqdist(a), **product)
    yield problem(f"{op} bfloat16", size, 2 * n * p, work, lambda: ops.pairwise_sqdist(half))
    if n >= 100 and fits(n * p, n * p):
        b, exact = a + 1, partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
        two, direct = partial(ops.pairwise_sqdist, a, b), partial(exact, a, b)
        yield problem(
            f"{op} of two", size, 8 * n * p, 3 * n * n * p, two, **{"exact cdist": direct}
        )


def mixes(a: Tensor, size: dict[str, Any]) -> Iterator[Problem]:
    (n, p), out, full = a.shape, torch.empty_like(a), torch.rand(2 * [len(a)], device=CARD)
    one, top = full[:1].clone(), ops.feddwa_weights(full, 5)
    dense = torch.zeros_like(full).scatter_(1, top.index, top.weight.float())
    mix, mm, move = partial(ops.aggregate, out=out), partial(torch.mm, out=out), 8 * n * p
    few, whole = (lambda: mm(dense, a)), (lambda: mm(full, a))
    first = {"w @ a": lambda: one @ a}
    yield problem("aggregate, one row", size, move / 2, 0, lambda: ops.aggregate(a, one), **first)
    yield problem("aggregate, top 5", size, move, 0, lambda: mix(a, *top), mm=few)
    yield problem("aggregate, N rows", size, move, 2 * n * n * p, lambda: mix(a, full), mm=whole)


def steps(a: Tensor, size: dict[str, Any]) -> Iterator[Problem]:
    g, c, step = torch.randn_like(a), torch.randn_like(a), partial(ops.sgd_step_, lr=1e-9)
    plain, moved = partial(a.add_, alpha=-1e-9), 4 * a.numel()
    yield problem("sgd_step_", size, 3 * moved, 0, lambda: step(a, g), add_=lambda: plain(g))
    yield problem(
        "sgd_step_, shift and prox",
        size,
        4 * moved,
        0,
        lambda: step(a, g, shift=c, mu=0.1, anchor=c),
        eager=lambda: a.sub_(1e-9 * (g + c + 0.1 * (a - c))),
    )


def weights() -> Iterator[Problem]:
    d = torch.rand(100, 100, device=CARD, dtype=torch.float64)
    near, target = partial(d.topk, 5, largest=False), torch.arange(100, device=CARD)
    size = {"M=N": 100, "K": 5}
    yield problem("feddwa_weights", size, 0, 0, lambda: ops.feddwa_weights(d, 5), topk=near)
    yield problem("waffle_weights", {"N": 100}, 0, 0, lambda: ops.waffle_weights(d, target, 0.7))


def rank1() -> Iterator[Problem]:
    """30 % of the factors are active."""
    for n, b, i, f, o in ((20, 32, 800, 120, 500), (100, 32, 1600, 200, 384)):
        x = torch.randn(n, b, i, device=CARD)
        w_a, w_b = torch.randn(o, f, device=CARD), torch.randn(f, i, device=CARD)
        lam = torch.randn(n, f, device=CARD) * (torch.rand(n, f, device=CARD) < 0.3)
        size = {"N": n, "B": b, "I": i, "F": f, "O": o}

        def ours(x: Tensor, w_a: Tensor, w_b: Tensor, lam: Tensor = lam) -> Tensor:
            return ops.rank1_linear(x, w_a, lam, w_b)

        def whole(x: Tensor, w_a: Tensor, w_b: Tensor, lam: Tensor = lam) -> Tensor:
            return ((x @ w_b.T) * lam[:, None]) @ w_a.T

        def forward(layer: Callable[..., Tensor], given: Any = (x, w_a, w_b)) -> Tensor:
            return layer(*given)

        def backward(layer: Callable[..., Tensor], given: Any = (x, w_a, w_b)) -> None:
            layer(*(t.detach().requires_grad_() for t in given)).sum().backward()  # type: ignore

        moved, work = 4 * n * b * (i + o), 0.6 * n * b * f * (i + o)
        for more, call, limited in (("", forward, 1), (" and backward", backward, 0)):
            dense: dict[str, Call] = {"two matmuls, all factors": partial(call, whole)}
            both = {**size, "backward": int(call is backward)}
            op, ours_, bound = f"rank1_linear{more}", partial(call, ours), limited * moved
            yield problem(op, both, bound, limited * work, ours_, **dense)


def server_step(s: int, p: int) -> Iterator[Problem]:
    w, out = torch.randn(s, p, device=CARD), torch.empty(s, p, device=CARD)
    g = w + 1e-3 * torch.randn(s, p, device=CARD)

    def server() -> Tensor:
        return ops.aggregate(w, *ops.feddwa_weights(ops.pairwise_sqdist(g, w), 5), out=out)

    yield problem("FedDWA server step", {"S": s, "P": p, "goal in ms": 15}, 0, 0, server)


def whole_round(n: int = 100, count: int = 600) -> Iterator[Problem]:
    """One round of 100 clients of LeNet-5's size, 600 samples each, B = 32: the vmap engine, and
    one client after another on the same card."""
    pool = torch.randn(n * count, 1, 28, 28), torch.randint(0, 10, (n * count,))
    index = list(torch.arange(n * count).split(count))
    data = Federation(*pool, {"train": index}, 10).to(CARD)
    build = partial(cnn, (1, 28, 28), 10, channels=(6, 16), hidden=(120, 84), padding=(2, 0))
    simulation = Simulation(
        "fedavg",
        build,
        data,
        Training(0.01, 32),
        rounds=10**6,
        hardware=Hardware("vmap", device=str(CARD)),
        evaluation=Evaluation(every=0, split="train"),
    )
    rounds = simulation.iterate()

    def one_by_one() -> None:
        for i in range(n):
            model = build().to(CARD)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for batch in data.index["train"][i].split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()  # type: ignore
                optimizer.step()

    after: dict[str, Call] = {"one after another": one_by_one}
    size = {"N": n, "n": count, "B": 32, "backward": 1}
    yield problem("LeNet-5 round", size, 0, 0, lambda: next(rounds), **after)


def problems(quick: bool) -> Iterator[Problem]:
    for n, p in SIZES[: 3 if quick else None]:
        for part in (distances, mixes, steps) if fits(n * p, n * p, n * p) else ():
            yield from part(torch.randn(n, p, device=CARD), {"N": n, "P": p})
    yield from itertools.chain(weights(), rank1())
    s, p = SIZES[2 if quick else -1]
    if fits(s * p, s * p, s * p):
        yield from server_step(s, p)
    if not quick:
        yield from whole_round()


@dataclass(frozen=True)
class Options:
    quick: bool = False  # small sizes only
    json: Path | None = None  # write the measurements to this file


def main() -> None:
    asked = parsed(Options, "python -m bench.gpu", __doc__, None)
    if not torch.cuda.is_available():
        sys.exit(f"bench.gpu: torch {torch.__version__} sees no GPU here; nothing was measured.")
    if not ops.backend().cuda:
        sys.exit(
            f"bench.gpu: the CUDA kernels are not built ({ops.backend()}); see .ci/cuda_build. "
            "Nothing was measured."
        )
    torch.manual_seed(0)
    machine = replace(table.Machine.measure(1), cpu=torch.cuda.get_device_name(), limits=limits())
    printed = table.Rows(*FIELDS, about=machine.lines())
    for case in problems(asked.quick):
        for row in table.measure(case, machine.limits, 0.5, float("inf"), {}, timed):
            printed.row(row)
        torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps(machine.with_rows(printed.rows), indent=1))


if __name__ == "__main__":
    main()

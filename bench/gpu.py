"""Times the CUDA kernels beside the best torch call and beside what the card can do, measured in
the same run.

The limits: bytes that must move, over the bandwidth of a copy of 2 GiB; float32 instructions, over
the rate of a large float32 matrix product (no TF32). A kernel's limit is the larger of the two
times. Times are medians over CUDA events. Run `python -m bench.gpu`; `--quick` for small sizes
only, `--json FILE` to keep the measurements.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pflcore
from pflcore import ops
from pflcore.simulation.round import Setup

GIB = 1 << 30


def milliseconds(call: Callable[[], Any], budget: float = 0.5) -> float:
    """The median time of a call on the device, after a warm-up, within about `budget` seconds."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    repeats = int(max(5, min(50, budget / max(time.perf_counter() - began, 1e-5))))
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)  # type: ignore[no-any-return]


@dataclass
class Card:
    """What this card does, measured now."""

    name: str
    bytes_per_ms: float  # read and written by a copy
    instructions_per_ms: float  # float32: a fused multiply-add is one

    @staticmethod
    def measure() -> "Card":
        torch.backends.cuda.matmul.allow_tf32 = False
        size = min(2 * GIB, torch.cuda.mem_get_info()[0] // 8)
        a = torch.empty(size // 4, device="cuda")
        b = torch.empty_like(a)
        copied = 2 * size / milliseconds(functools.partial(b.copy_, a))
        m = torch.randn(8192, 8192, device="cuda")
        return Card(torch.cuda.get_device_name(), copied, 8192.0**3 / milliseconds(lambda: m @ m))

    def limit(self, moved: float, instructions: float = 0.0) -> float:
        return max(moved / self.bytes_per_ms, instructions / self.instructions_per_ms)


@dataclass
class Row:
    what: str
    sizes: str
    ms: float
    limit_ms: float | None
    torch_ms: float | None
    torch_call: str

    def cells(self) -> list[str]:
        share = "" if self.limit_ms is None else f"{self.limit_ms / self.ms:.2f}"
        other = (
            ""
            if self.torch_ms is None
            else f"{self.torch_ms:.3f} ({self.torch_ms / self.ms:.1f}x) {self.torch_call}"
        )
        return [
            self.what,
            self.sizes,
            f"{self.ms:.3f}",
            "" if self.limit_ms is None else f"{self.limit_ms:.3f}",
            share,
            other,
        ]


def fits(*shapes: tuple[int, int], size: int = 4) -> bool:
    return sum(m * p for m, p in shapes) * size * 1.3 < torch.cuda.mem_get_info()[0]


def timed(
    what: str,
    sizes: str,
    limit: float | None,
    call: Callable[..., Any],
    args: Sequence[Any],
    other: Callable[..., Any] | None = None,
    name: str = "",
) -> Row:
    """Time `call(*args)`, and the best torch call `other(*args)`, called `name`, beside it."""
    row = Row(what, sizes, milliseconds(lambda: call(*args)), limit, None, name)
    if other is not None:
        best = other
        try:
            row.torch_ms = milliseconds(lambda: best(*args))
        except torch.OutOfMemoryError:
            row.torch_call = f"{name}: out of memory"
    torch.cuda.empty_cache()
    print("| " + " | ".join(row.cells()) + " |", flush=True)
    return row


def bench_distances(card: Card, a: Tensor, sizes: str) -> list[Row]:
    n, p = a.shape
    pairs, same = n * (n - 1) / 2, ops.pairwise_sqdist
    rows = [
        timed(
            "pairwise_sqdist",
            sizes,
            card.limit(4.0 * n * p, 2 * pairs * p),
            same,
            [a],
            lambda a: a @ a.T,
            "a @ a.T (no distances yet)",
        ),
        timed(
            "pairwise_sqdist bfloat16",
            sizes,
            card.limit(2.0 * n * p, 2 * pairs * p),
            same,
            [a.bfloat16()],
        ),
    ]
    if n >= 100 and fits((n, p), (n, p)):
        limit = card.limit(8.0 * n * p, 2.0 * n * n * p)
        exact = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
        rows.append(
            timed("pairwise_sqdist of two", sizes, limit, same, [a, a + 1], exact, "cdist, exact")
        )
    return rows


def bench_aggregate(card: Card, a: Tensor, sizes: str) -> list[Row]:
    n, p = a.shape
    out, top = torch.empty_like(a), ops.feddwa_weights(torch.rand(n, n, device="cuda"), 5)
    one, full = torch.rand(1, n, device="cuda"), torch.rand(n, n, device="cuda")
    dense = torch.zeros(n, n, device="cuda").scatter_(1, top.index, top.weight.float())
    both = card.limit(8.0 * n * p)
    return [
        timed(
            "aggregate, one row",
            sizes,
            card.limit(4.0 * (n + 1) * p),
            ops.aggregate,
            [a, one],
            lambda a, w: w @ a,
            "w @ a",
        ),
        timed(
            "aggregate, top 5",
            sizes,
            both,
            lambda a, d: ops.aggregate(a, *top, out=out),
            [a, dense],
            lambda a, d: torch.mm(d, a, out=out),
            "mm",
        ),
        timed(
            "aggregate, N rows",
            sizes,
            card.limit(8.0 * n * p, 1.0 * n * n * p),
            lambda a, w: ops.aggregate(a, w, out=out),
            [a, full],
            lambda a, w: torch.mm(w, a, out=out),
            "mm",
        ),
    ]


def bench_sgd(card: Card, a: Tensor, sizes: str) -> list[Row]:
    s, q = a.shape
    g, c = torch.randn_like(a), torch.randn_like(a)
    return [
        timed(
            "sgd_step_",
            sizes,
            card.limit(12.0 * s * q),
            lambda w, g: ops.sgd_step_(w, g, 1e-9),
            [a, g],
            lambda w, g: w.add_(g, alpha=-1e-9),
            "add_",
        ),
        timed(
            "sgd_step_, shift and prox",
            sizes,
            card.limit(16.0 * s * q),
            lambda w, g: ops.sgd_step_(w, g, 1e-9, shift=c, mu=0.1, anchor=c),
            [a, g],
            lambda w, g: w.sub_(1e-9 * (g + c + 0.1 * (w - c))),
            "eager",
        ),
    ]


def bench_weights() -> list[Row]:
    d, target = (
        torch.rand(100, 100, device="cuda", dtype=torch.float64),
        torch.arange(100, device="cuda"),
    )
    return [
        timed(
            "feddwa_weights",
            "M=N=100 K=5",
            None,
            lambda d: ops.feddwa_weights(d, 5),
            [d],
            lambda d: d.topk(5, largest=False),
            "topk",
        ),
        timed(
            "waffle_weights",
            "100 rows, N=100",
            None,
            lambda d: ops.waffle_weights(d, target, 0.7),
            [d],
        ),
    ]


def whole(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    """rank1_linear by two matrix products, all factors."""
    return ((x @ w_b.T) * lam[:, None]) @ w_a.T


def with_backward(
    function: Callable[..., Tensor], x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor
) -> None:
    x, w_a, w_b = (t.detach().requires_grad_() for t in (x, w_a, w_b))
    function(x, w_a, lam, w_b).sum().backward()


def bench_rank1(card: Card) -> list[Row]:
    rows: list[Row] = []
    for n, b, i, f, o in ((20, 32, 800, 120, 500), (100, 32, 1600, 200, 384)):
        x, w_a, w_b = (
            torch.randn(n, b, i, device="cuda"),
            torch.randn(o, f, device="cuda"),
            torch.randn(f, i, device="cuda"),
        )
        inputs = [
            x,
            w_a,
            torch.randn(n, f, device="cuda") * (torch.rand(n, f, device="cuda") < 0.3),
            w_b,
        ]
        sizes = f"N={n} B={b} {i}->{f}->{o}, 30% active"
        limit = card.limit(4.0 * n * b * (i + o), 0.3 * n * b * f * (i + o))
        rows.append(
            timed(
                "rank1_linear",
                sizes,
                limit,
                ops.rank1_linear,
                inputs,
                whole,
                "two matmuls, all factors",
            )
        )
        ours, theirs = (
            functools.partial(with_backward, ops.rank1_linear),
            functools.partial(with_backward, whole),
        )
        rows.append(
            timed(
                "rank1_linear and backward",
                sizes,
                None,
                ours,
                inputs,
                theirs,
                "autograd, all factors",
            )
        )
    return rows


def bench_ops(card: Card, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for n, p in (
        (20, 61_706),
        (10, 1_000_000),
        (100, 1_000_000),
        (10, 10_000_000),
        (100, 10_000_000),
    ):
        if (quick and p > 1_000_000) or not fits((n, p), (n, p), (n, p)):
            continue
        a, sizes = torch.randn(n, p, device="cuda"), f"N={n} P={p:,}"
        rows += (
            bench_distances(card, a, sizes)
            + bench_aggregate(card, a, sizes)
            + bench_sgd(card, a, sizes)
        )
        del a
    return rows + bench_weights() + bench_rank1(card)


def bench_server_step(quick: bool) -> list[Row]:
    s, p = (100, 1_000_000) if quick else (100, 10_000_000)
    if not fits((s, p), (s, p), (s, p)):
        return []
    w, out = torch.randn(s, p, device="cuda"), torch.empty(s, p, device="cuda")
    g = w + 1e-3 * torch.randn(s, p, device="cuda")

    def server(g: Tensor, w: Tensor) -> Tensor:
        return ops.aggregate(w, *ops.feddwa_weights(ops.pairwise_sqdist(g, w), 5), out=out)

    return [timed("FedDWA server step", f"S={s} P={p:,} K=5 (goal: 15 ms)", None, server, [g, w])]


def bench_round() -> list[Row]:
    """One LeNet-5 round of 100 clients, 600 samples each, B = 32: the vmap engine, and one client
    after another on the same card."""
    from pflcore.algorithms import ALGORITHMS
    from pflcore.data.federation import Federation
    from pflcore.simulation.round import begin, step
    from pflcore.train import Engine, Setting, Workers
    from pflcore.train.net import Net
    from pflcore.train.training import Training

    class LeNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.c2 = torch.nn.Conv2d(1, 6, 5, padding=2), torch.nn.Conv2d(6, 16, 5)
            self.head = torch.nn.Sequential(
                torch.nn.Linear(400, 120),
                torch.nn.ReLU(),
                torch.nn.Linear(120, 84),
                torch.nn.ReLU(),
                torch.nn.Linear(84, 10),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.c1(x)), 2)
            return self.head(F.max_pool2d(F.relu(self.c2(x)), 2).flatten(1))  # type: ignore[no-any-return]

    n, size = 100, 600
    pool = torch.randn(n * size, 1, 28, 28), torch.randint(0, 10, (n * size,))
    index = list(torch.arange(n * size).split(size))
    data = Federation(*pool, {"train": index, "test": index}, 10).to("cuda")
    net = Net(LeNet()).to("cuda")
    setting = Setting(net, data, Training(lr=0.01, batch_size=32), Engine("vmap"), Workers(), 0, 3)
    algorithm = ALGORITHMS["fedavg"]()
    state = begin(algorithm, net, n)

    def round_() -> None:
        step(Setup(algorithm, setting), state, torch.arange(n))

    models = [LeNet().cuda() for _ in range(n)]

    def one_by_one() -> None:
        for i, model in enumerate(models[:10]):  # a tenth of the clients: it takes long enough
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for batch in data.index["train"][i].split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
                optimizer.step()

    row = Row(
        "LeNet-5 round, 100 clients",
        "600 samples each, B=32",
        milliseconds(round_),
        None,
        None,
        "one after another (goal: 20x)",
    )
    row.torch_ms = 10 * milliseconds(one_by_one)
    print("| " + " | ".join(row.cells()) + " |", flush=True)
    return [row]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="small sizes only")
    options.add_argument("--json", help="write the measurements to this file")
    asked = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"bench.gpu: torch {torch.__version__} sees no GPU here; nothing was measured.")
    if not ops.backend().cuda:
        sys.exit(
            f"bench.gpu: the CUDA kernels are not built ({ops.backend()}); see .ci/cuda_build. "
            "Nothing was measured."
        )
    torch.manual_seed(0)
    card = Card.measure()
    print(
        f"{card.name}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, pflcore {pflcore.__version__}"
    )
    print(
        f"Measured limits: copy {card.bytes_per_ms / 1e9:.2f} TB/s, float32 "
        f"{card.instructions_per_ms / 1e9:.1f} T instructions/s\n"
    )
    print(
        "| what | sizes | ms | limit, ms | share of the limit | torch, ms (times ours) |\n| --- | "
        "--- | --- | --- | --- | --- |"
    )
    rows = bench_ops(card, asked.quick) + bench_server_step(asked.quick)
    if not asked.quick:
        rows += bench_round()
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(
                {
                    "card": asdict(card),
                    "torch": torch.__version__,
                    "rows": [asdict(r) for r in rows],
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()

"""`make demo`: the four systems in minutes, and one page to look at,
runs/demo/index.html.

Every part is a run on real data, a table and a picture. The page holds the pictures
itself, the commands to go on with, and a sentence on what to look at.
`python examples/demo.py 10` plays at most ten rounds of each run, to see the page
sooner.
"""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from pflcore import (
    Evaluation,
    Federation,
    History,
    Simulation,
    Training,
    backend,
    cross_silo,
    metrics,
    pairwise_sqdist,
)
from pflcore.algorithms import Ditto, FactorizedWaffle, FedAvg, FedDWA, HypCluster
from pflcore.data import federation_of
from pflcore.nn.models import model_for

PAGE = Path("runs/demo/index.html")
SHAPE = (1, 28, 28)
STYLE = """body { font: 16px/1.5 sans-serif; max-width: 50em }
body { margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse }
td, th { padding: .2em .8em; border-bottom: 1px solid #ccc }
td + td, th + th { text-align: right }
svg { max-width: 100%; height: auto }
code { background: #f3f3f3; padding: .1em .3em }"""


# Okabe and Ito's, distinct for the colour-blind too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
Series = Mapping[str, tuple[Sequence[int], Sequence[float]]]


class Part(NamedTuple):
    """A part of the page."""

    name: str
    title: str
    look: str  # what to look at
    table: Sequence[Sequence[str]]  # its first row is the head
    figure: Figure
    command: str  # to go on with


def played(
    methods: Mapping[str, Any],
    model: Any,
    data: Federation,
    training: Training,
    rounds: int,
    **more: Any,
) -> dict[str, History]:
    """A run of each method, by its name in the table."""
    runs, rounds = {}, min([rounds, *map(int, sys.argv[1:])])
    for name, alg in methods.items():
        print(f"  {name}", flush=True)
        runs[name] = Simulation(alg, model, data, training, rounds, **more).run()
    return runs


def here(name: str) -> bool:
    """Is this data set in the folder that PFLCORE_DATA names?"""
    return (Path(os.environ.get("PFLCORE_DATA", "data")) / name).exists()


def figure_of(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels beside each other."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = [*figure.subplots(1, panels, squeeze=False).flat]
    for panel in axes:
        panel.set_prop_cycle(color=COLOURS)
    return figure, axes


def label_axes(axes: Axes, x: str, y: str) -> None:
    """What the axes are, and a grid."""
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def curves(axes: Axes, series: Series, unit: str) -> None:
    """Lines over the rounds, by their names."""
    for name, (x, y) in series.items():
        axes.plot(x, y, label=name, marker="o" if len(x) == 1 else None)
    axes.legend(fontsize=8, frameon=False)
    label_axes(axes, "round", unit)


def means(runs: Mapping[str, History], of: Any) -> Series:
    """What `of` makes of the accuracies [T, N], in percent, for each run."""
    series = {name: run.series() for name, run in runs.items()}
    return {
        name: (rounds, (100 * of(v)).tolist()) for name, (rounds, v) in series.items()
    }


def rows(
    head: Sequence[str], numbers: Mapping[str, Iterable[float]], form: str = ".1f"
) -> list[list[str]]:
    """A table."""
    return [
        [*head],
        *([name, *(format(v, form) for v in line)] for name, line in numbers.items()),
    ]


def waffle() -> Part:
    """One target, and methods that train for it or for all."""
    names = ("local", "fedavg", "scaffold", "weight_erosion", "waffle", "apfl")
    data = federation_of("mnist5k", "C")
    model = partial(model_for, "lenet5", SHAPE, 10)
    runs = played({n: n for n in names}, model, data, Training(), 50)
    target = means(runs, lambda v: v[:, 0].unfold(0, 5, 1).mean(1))
    target = {name: (rounds[4:], values) for name, (rounds, values) in target.items()}
    figure, (axes,) = figure_of()
    curves(axes, target, "client 0, percent, mean of five rounds")
    return Part(
        "waffle",
        "WAFFLE: one client among ten whose data differ",
        "Client 0 has 400 training images, and neighbours share some of its classes. "
        "WAFFLE starts "
        "with the average of all and ends with what helps client 0.",
        rows(
            ("algorithm", "client 0, last five rounds, %", "best five rounds, %"),
            {n: (y[-1], max(y)) for n, (_, y) in target.items()},
        ),
        figure,
        "pflcore compare --algorithms waffle fedavg local --partition 'A*' --rounds "
        "100",
    )


def feddwa() -> Part:
    """Groups of clients that find each other."""
    fashion = here("fashion_mnist")
    few: dict[str, Any] = (
        {"train_samples": 3000, "test_samples": 3000} if fashion else {}
    )
    data = federation_of(
        "fashion_mnist" if fashion else "mnist5k", "practical1", 20, **few
    )
    methods = {
        "Local": "local",
        "FedAvg": "fedavg",
        "FedDWA": FedDWA(k=5),
    }
    model = partial(model_for, "lenet5", SHAPE, 10)
    runs = played(methods, model, data, Training(lr=0.05, batch_size=20), 30)
    figure, (left, right) = figure_of(2)
    curves(
        left,
        means(runs, lambda v: v.mean(1)),
        "test accuracy, mean of clients, percent",
    )
    report = runs["FedDWA"].rounds[-1]["report"]
    weight = torch.zeros(data.n, data.n)
    weight.scatter_(1, torch.tensor(report["index"]), torch.tensor(report["weight"]))
    # small weights show
    shown = right.imshow(weight, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    figure.colorbar(shown, ax=right, label="weight in the last round")
    ticks = range(0, data.n, 5)
    right.set(xlabel="whose model", ylabel="for client", xticks=ticks, yticks=ticks)
    last = {name: run.series()[1][-1] for name, run in runs.items()}
    return Part(
        "feddwa",
        "FedDWA: a model for each of 20 clients",
        "Clients 0 to 4, 5 to 9, ... share their main classes, which nobody told the "
        "server: the "
        "weights of the last round (right) show the groups that it found.",
        rows(
            ("algorithm", "mean, %", "worst client, %"),
            {n: (100 * float(v.mean()), 100 * float(v.min())) for n, v in last.items()},
        ),
        figure,
        "pflcore compare --algorithms local fedavg feddwa --data fashion_mnist "
        "--partition practical1 --n 20",
    )


def cars() -> Federation:
    """Cars of 13 model years, a natural split that comes with mlxtend: miles per
    gallon / 50 from seven standardized facts."""
    from mlxtend.data import autompg_data

    # its last column, the name, is no number
    facts, y = (torch.as_tensor(v, dtype=torch.float32) for v in autompg_data())
    x = facts[:, :7]
    year = x[:, 5]
    x = (x - x.mean(0)) / x.std(0)
    years = [year == value for value in sorted({*year.tolist()})]
    return Federation.from_clients(
        [(x[mine], y[mine] / 50) for mine in years], name="cars"
    )


def motley() -> Part:
    """What personalization gives each client, and whom it hurts."""
    school = here("school")
    data = cross_silo(federation_of("school") if school else cars(), seed=100).data
    clusters = HypCluster(k=3, warmup_rounds=100, optimizer="ema", server_lr=10)
    ditto = Ditto(lam=1, personal_lr=0.01, optimizer="ema", server_lr=10)
    methods: dict[float, dict[str, Any]] = {  # with their rates
        0.01: {"Local": "local", "HypCluster": clusters},
        0.001: {"Ditto": ditto},
    }
    model = partial(model_for, "linear", data.shape, None, zero=True)
    losses: dict[str, torch.Tensor] = {}
    more: dict[str, Any] = {
        "evaluation": Evaluation(every=501),
        "loss": "half_squared",
    }
    for lr, some in methods.items():
        training = Training(lr, batch_size=32, drop_last=True)
        runs = played(some, model, data, training, 501, **more)
        losses |= {name: run.series("loss")[1][-1] for name, run in runs.items()}
    figure, (axes,) = figure_of()
    order = losses["Local"].argsort()
    for k, (name, loss) in enumerate(losses.items()):
        axes.plot(loss[order], "." if k else "-", color=COLOURS[k], label=name)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    label_axes(axes, "client, by its error alone", "test error")
    what = "139 schools" if school else "cars of 13 model years"
    paper = {
        "method": "paper",
        "Local": ".0121",
        "HypCluster": ".0112",
        "Ditto": ".0114",
    }
    table = [["method", "mean error", "worst tenth", "hurt, % of clients"]]
    for name, loss in losses.items():
        tenth = -metrics.worst_decile(-loss)
        hurt = metrics.hurt(loss, losses["Local"], higher_is_better=False)
        table.append([name, f"{float(loss.mean()):.4f}", f"{tenth:.4f}", f"{hurt:.0f}"])
    if school:
        table = [[*row, paper[row[0]]] for row in table]
    return Part(
        "motley",
        f"Motley: linear regression on {what}",
        "A better mean is not better for all: points above the line are clients that "
        "would have "
        "done better alone.",
        table,
        figure,
        "pflcore reproduce motley-school",
    )


def factorized() -> Part:
    """A majority, and a minority with classes of its own."""
    data = federation_of("mnist5k", "multimodal", 30, minority_clients=5)
    methods = {
        "FedAvg": FedAvg(weighting="uniform"),
        "WAFFLe": FactorizedWaffle(ranks=(80,)),
    }
    model = partial(model_for, "mlp", SHAPE, 10, bias=False)
    training = Training(lr=0.04, batch_size=10, epochs=5)
    runs = played(methods, model, data, training, 60, evaluation=Evaluation(every=3))
    groups = {"majority": slice(0, 25), "minority": slice(25, 30)}
    series = {
        f"{n}, {g}": line
        for g, own in groups.items()
        for n, line in means(runs, lambda v, own=own: v[:, own].mean(1)).items()
    }
    figure, (axes,) = figure_of()
    curves(axes, series, "test accuracy, percent")
    return Part(
        "factorized",
        "WAFFLe by weight factorization: the minority",
        "25 clients share five digits, 5 clients the other five. One model for all "
        "forgets the "
        "few; a dictionary of rank-1 factors, of which each client chooses its own, "
        "does not.",
        rows(
            ("method", "majority, %", "minority, %"),
            {n: [series[f"{n}, {g}"][1][-1] for g in groups] for n in runs},
        ),
        figure,
        "pflcore reproduce factorized-table1",
    )


def distances() -> Part:
    """Exact distances beside the expanded square."""
    far = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    error: dict[str, list[float]] = {"pflcore": [], "torch.cdist": []}
    start = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    for gap in far:
        models = start + gap * torch.randn(
            50, 100_000, generator=torch.Generator().manual_seed(1)
        )
        wide = models.double()
        want = torch.stack([(wide - one).square().sum(1) for one in wide])
        off = ~torch.eye(50, dtype=torch.bool)
        for name, got in {
            "pflcore": pairwise_sqdist(models),
            "torch.cdist": torch.cdist(models, models).double().square(),
        }.items():
            error[name].append(float(((got - want).abs() / want)[off].max()))
    figure, (axes,) = figure_of()
    for k, (name, values) in enumerate(error.items()):
        axes.loglog(far, values, "o-", color=COLOURS[k], label=name)
    axes.legend(fontsize=8, frameon=False)
    axes.axhline(1, color="#999999", linestyle=":")
    label_axes(
        axes,
        "how far the clients' models are apart, per weight",
        "largest relative error",
    )
    return Part(
        "distances",
        "Exact distances",
        "The closer the models of the clients, the more of their distance the expanded "
        "square "
        "loses; above the dotted line nothing is left of it.",
        rows(
            ("distances by", *(f"{gap:.0e} apart" for gap in far.tolist())),
            error,
            ".0e",
        ),
        figure,
        "pflcore bench --op sqdist",
    )


def fragment(part: Part) -> str:
    """The part in HTML."""
    path = PAGE.with_name(f"{part.name}.svg")
    part.figure.savefig(path)
    part.figure.savefig(path.with_suffix(".png"), dpi=200)
    svg = path.read_text(encoding="utf-8")
    head, *body = part.table
    table = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    for line in body:
        table += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
    return (
        f"<h2>{html.escape(part.title)}</h2><p>{html.escape(part.look)}</p>"
        f"{svg[svg.index('<svg') :]}<table><tr>{table}</table>"
        f"<p>Go on with <code>{html.escape(part.command)}</code></p>"
    )


def main() -> None:
    """Plays the parts and writes the page."""
    began, parts = time.monotonic(), []
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    for part in (waffle, feddwa, motley, factorized, distances):
        print(f"{part.__name__}: {part.__doc__}", flush=True)
        parts.append(fragment(part()))
    took = f"{time.monotonic() - began:.0f} s, {backend()}"
    PAGE.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>pflcore</title>'
        f"<style>{STYLE}</style><h1>pflcore: what its four systems do</h1>"
        f"{''.join(parts)}<p>{html.escape(took)}</p></html>\n",
        encoding="utf-8",
    )
    print(f"{took}\nOpen {PAGE.resolve().as_uri()} in a browser.")


if __name__ == "__main__":
    main()

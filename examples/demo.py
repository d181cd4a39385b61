"""Shows four federated-learning systems on one page, runs/demo/index.html.

`make demo` starts it and takes some minutes. `python examples/demo.py 10` plays at most
ten rounds of each run, so that the page is ready sooner; at least five are needed.

The first part of the page shows how data are dealt to clients. Each of the next four
parts is a comparison on real data, with a table and a figure. The last part compares
two ways to compute distances. Each part has a sentence that explains the figure, and a
command to go on with. The page holds its figures itself.

Symbols: N clients, T evaluated rounds.
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
from matplotlib.ticker import MaxNLocator

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
from pflcore.lab.data import federation_of
from pflcore.nn.models import model_for

PAGE = Path("runs/demo/index.html")
MIN_ROUNDS = 5  # of a run: the first comparison shows means of five rounds
SHAPE = (1, 28, 28)
STYLE = """body { font: 16px/1.5 sans-serif; max-width: 50em }
body { margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse }
td, th { padding: .2em .8em; border-bottom: 1px solid #ccc }
td + td, th + th { text-align: right }
svg { max-width: 100%; height: auto }
figure { margin: 1em 0 }
figcaption { color: #444; font-size: .9em }
.table { overflow-x: auto }
code { background: #f3f3f3; padding: .1em .3em }"""


# The palette of Okabe and Ito, which colour-blind people can distinguish, too. Markers
# tell lines apart in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
# From the name of a line to its rounds and values.
Series = Mapping[str, tuple[Sequence[int], Sequence[float]]]


class Part(NamedTuple):
    """A part of the page.

    Attributes:
        name: name of the part's files
        title: heading
        data: the data and their sizes, one sentence
        look: sentences that explain the figure
        alt: what the figure shows, for readers who do not see it
        table: rows of cells; the first row is the head
        figure: the figure
        command: a command for a larger run
    """

    name: str
    title: str
    data: str
    look: str
    alt: str
    table: Sequence[Sequence[str]]
    figure: Figure
    command: str

    @property
    def caption(self) -> str:
        """The line below the figure: what it shows, and of which data."""
        return f"{self.alt} {self.data}"


def played(
    methods: Mapping[str, Any],
    model: Any,
    data: Federation,
    training: Training,
    rounds: int,
    **more: Any,
) -> dict[str, History]:
    """The history of each run, by the method's name.

    An argument of the command line limits the rounds.
    """
    runs = {}
    rounds = min([rounds, *map(int, sys.argv[1:])])
    for name, alg in methods.items():
        print(f"  {name}", flush=True)
        runs[name] = Simulation(alg, model, data, training, rounds, **more).run()
    return runs


def here(name: str) -> bool:
    """True where the data set is in the folder that PFLCORE_DATA names."""
    folder = Path(os.environ.get("PFLCORE_DATA", "data"))
    return (folder / name).exists()


def figure_of(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with a row of panels, and the panels."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = [*figure.subplots(1, panels, squeeze=False).flat]
    for panel in axes:
        panel.set_prop_cycle(color=COLOURS)
    return figure, axes


def label_axes(axes: Axes, x: str, y: str) -> None:
    """Labels the axes and adds a grid."""
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def curves(
    axes: Axes, series: Series, unit: str, looks: Mapping[str, Any] | None = None
) -> None:
    """Draws a line over the rounds for each series.

    The names stand beside the lines, in the order in which these end.

    Args:
        axes: The panel.
        series: The lines, by name.
        unit: The label of the values.
        looks: The options of matplotlib's `plot` for each line; None for a colour and a
            marker for each.
    """
    ends = []
    for k, (name, (x, y)) in enumerate(series.items()):
        look: Mapping[str, Any]
        look = {"color": COLOURS[k % 6], "marker": MARKERS[k % 6], "markersize": 4}
        if looks is not None:
            look = looks[name]
        (line,) = axes.plot(x, y, markevery=max(1, len(x) // 8), **look)
        ends.append((y[-1], name, line))
    ends.sort(key=lambda end: -end[0])
    axes.legend(
        [line for _, _, line in ends],
        [name for _, name, _ in ends],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=8,
        frameon=False,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(axes, "round", unit)


def sizes(name: str, data: Federation) -> str:
    """A sentence on a federation: its data, clients and samples."""
    counts = {split: int(data.size(split).sum()) for split in data.splits}
    samples = ", ".join(f"{count:,} {split} samples" for split, count in counts.items())
    return f"Data: {name}, {data.n} clients, {samples}."


def means(runs: Mapping[str, History], mean: Any) -> Series:
    """Mean accuracies of each run in percent.

    The function `mean` takes accuracies [T, N] and returns one number for each round.
    """
    series = {}
    for name, run in runs.items():
        rounds, accuracy = run.series()
        series[name] = (rounds, (100 * mean(accuracy)).tolist())
    return series


def rows(
    head: Sequence[str], numbers: Mapping[str, Iterable[float]], form: str = ".1f"
) -> list[list[str]]:
    """A table of formatted numbers, with a row for each name."""
    table = [[*head]]
    for name, line in numbers.items():
        table.append([name, *(format(number, form) for number in line)])
    return table


def waffle() -> Part:
    """Compares methods that train for one client with methods for all clients."""
    names = ("local", "fedavg", "scaffold", "weight_erosion", "waffle", "apfl")
    data = federation_of("mnist5k", "C")
    model = partial(model_for, "lenet5", SHAPE, 10)
    runs = played({n: n for n in names}, model, data, Training(), 50)
    # The accuracy of client 0 as the mean of the last five rounds, from round 5 on.
    target = means(runs, lambda v: v[:, 0].unfold(0, 5, 1).mean(1))
    target = {name: (rounds[4:], values) for name, (rounds, values) in target.items()}
    figure, (axes,) = figure_of()
    curves(axes, target, "test accuracy of client 0, %\n(mean of five rounds)")
    return Part(
        "waffle",
        "WAFFLE: one client among ten whose data differ",
        sizes("mnist5k (5,000 images of MNIST), partition C", data),
        "Client 0 has 400 training images. Its neighbours share some of its classes. "
        "WAFFLE starts with the average of all clients. It ends with the clients that "
        "help client 0.",
        "Lines: the test accuracy of client 0 by round, for six methods.",
        rows(
            ("algorithm", "client 0, last five rounds, %", "best five rounds, %"),
            {n: (y[-1], max(y)) for n, (_, y) in target.items()},
        ),
        figure,
        "pflcore compare --algorithms waffle fedavg local "
        "--partition 'A*' --rounds 100",
    )


def images_of(partition: str, **options: Any) -> Federation:
    """20 clients with images of Fashion-MNIST, or of MNIST where it is not here."""
    source = "mnist5k"
    if here("fashion_mnist"):
        source = "fashion_mnist"
        options |= {"train_samples": 3000, "test_samples": 3000}
    return federation_of(source, partition, 20, **options)


def partitions() -> Part:
    """Shows which client has which samples, by the rule that deals them."""
    grouped = images_of("practical1")
    cuts = {
        "iid": images_of("iid"),
        "dirichlet, alpha 0.3": images_of("dirichlet", alpha=0.3),
        "practical1, which is shown": grouped,
        "pathological": images_of("pathological"),
    }
    numbers = {}
    for name, data in cuts.items():
        classes = (data.counts() > 0).sum(1).double().mean()
        numbers[name] = (float(classes), data.label_skew())
    return Part(
        "partitions",
        "Which client has which samples",
        sizes(grouped.name, grouped),
        "Each column is a client, each row a class, and the area of a dot is the "
        "number of samples. Here five clients each share their main classes. Label "
        "skew is 0 where all clients have the same shares of the classes, and near 1 "
        "where no two clients have a class in common.",
        "Dots: the number of samples of each class that each client has.",
        rows(
            ("partition", "classes per client", "label skew"),
            numbers,
            ".2f",
        ),
        grouped.plot(),
        "pflcore data fashion_mnist --partition practical1 --n 20 --out cut.png",
    )


def feddwa() -> Part:
    """Shows that FedDWA finds groups of similar clients."""
    data = images_of("practical1")
    methods = {"Local": "local", "FedAvg": "fedavg", "FedDWA": FedDWA(k=5)}
    model = partial(model_for, "lenet5", SHAPE, 10)
    runs = played(methods, model, data, Training(lr=0.05, batch_size=20), 30)
    figure, (left, right) = figure_of(2)
    curves(left, means(runs, lambda v: v.mean(1)), "test accuracy, mean of clients, %")
    report = runs["FedDWA"].rounds[-1]["report"]
    weight = torch.zeros(data.n, data.n)
    weight.scatter_(1, torch.tensor(report["index"]), torch.tensor(report["weight"]))
    # The square root of the weights makes small weights visible.
    image = right.imshow(weight, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    figure.colorbar(image, ax=right, label="weight in the last round")
    ticks = range(0, data.n, 5)
    right.set(xlabel="whose model", ylabel="mixed for client")
    right.set(xticks=ticks, yticks=ticks)
    last = {name: run.series()[1][-1] for name, run in runs.items()}
    return Part(
        "feddwa",
        "FedDWA: a model for each of 20 clients",
        sizes(f"{data.name} (four groups of clients)", data),
        "Clients 0 to 4 share their main classes, and so do clients 5 to 9, 10 to 14 "
        "and 15 to 19. The server does not know these groups. The weights of the last "
        "round (right) show that it found them.",
        "Left, lines: the mean test accuracy by round, for three methods. Right, a "
        "heat map: the weight of each client's model in each client's mixture.",
        rows(
            ("algorithm", "mean, %", "worst client, %"),
            {n: (100 * float(v.mean()), 100 * float(v.min())) for n, v in last.items()},
        ),
        figure,
        "pflcore compare --algorithms local fedavg feddwa --data fashion_mnist "
        "--partition practical1 --n 20",
    )


def cars() -> Federation:
    """Cars as samples; a client is one of 13 model years.

    The data come with mlxtend. The inputs are seven standardized features, and the
    label is miles per gallon, divided by 50.
    """
    from mlxtend.data import autompg_data

    features, y = (torch.as_tensor(v, dtype=torch.float32) for v in autompg_data())
    x = features[:, :7]  # the last column is the name, as a code
    year = x[:, 5]
    x = (x - x.mean(0)) / x.std(0)
    clients = []
    for value in sorted({*year.tolist()}):
        of_year = year == value
        clients.append((x[of_year], y[of_year] / 50))
    return Federation.from_clients(clients, name="cars")


def motley() -> Part:
    """Shows which clients gain from personalization and which clients lose."""
    school = here("school")
    data = cross_silo(federation_of("school") if school else cars(), seed=100).data
    clusters = HypCluster(k=3, warmup_rounds=100, optimizer="ema", server_lr=10)
    ditto = Ditto(lam=1, personal_lr=0.01, optimizer="ema", server_lr=10)
    # From the learning rate to the methods that train with it.
    methods: dict[float, dict[str, Any]] = {
        0.01: {"Local": "local", "HypCluster": clusters},
        0.001: {"Ditto": ditto},
    }
    model = partial(model_for, "linear", data.shape, None, zero=True)
    losses: dict[str, torch.Tensor] = {}
    more: dict[str, Any] = {
        "evaluation": Evaluation(every=501),
        "loss": "half_squared",
    }
    for lr, same_rate in methods.items():
        training = Training(lr, batch_size=32, drop_last=True)
        runs = played(same_rate, model, data, training, 501, **more)
        losses |= {name: run.series("loss")[1][-1] for name, run in runs.items()}
    figure, (axes,) = figure_of()
    others = [name for name in losses if name != "Local"]
    for name, colour, marker in zip(others, COLOURS[1:], MARKERS, strict=False):
        gap = (losses[name] - losses["Local"]).sort().values
        worse = 100 * float((gap > 0).double().mean())
        label = f"{name}: {worse:.0f} % of clients above 0"
        axes.plot(gap, marker, color=colour, markersize=4, label=label)
    axes.axhline(0, color="#444444", linewidth=0.8)
    axes.legend(fontsize=8, frameon=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(
        axes,
        "clients, each method's own order",
        "test error less that of the\nclient's local model",
    )
    clients = "139 schools" if school else "cars of 13 model years"
    # The mean errors that the paper reports for the schools.
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
        f"Motley: linear regression on {clients}",
        sizes(data.name, data),
        "A better mean is not better for all clients. Points above the line are "
        "clients whose local model has a smaller error.",
        "Points: for two methods, the test error of each client less that of its "
        "local model, from the client that gains most to the one that loses most.",
        table,
        figure,
        "pflcore reproduce motley-school",
    )


def factorized() -> Part:
    """Compares a majority and a minority of clients with other classes."""
    data = federation_of("mnist5k", "multimodal", 30, minority_clients=5)
    methods = {
        "FedAvg": FedAvg(weighting="uniform"),
        "WAFFLe": FactorizedWaffle(ranks=(80,)),
    }
    model = partial(model_for, "mlp", SHAPE, 10, bias=False)
    training = Training(lr=0.04, batch_size=10, epochs=5)
    runs = played(methods, model, data, training, 60, evaluation=Evaluation(every=3))
    majority = means(runs, lambda v: v[:, :25].mean(1))
    minority = means(runs, lambda v: v[:, 25:].mean(1))
    series = {f"{name}, majority": line for name, line in majority.items()}
    series |= {f"{name}, minority": line for name, line in minority.items()}
    # The colour is the method, and the dashes are the group.
    looks: dict[str, Any] = {}
    for name in series:
        method, _, group = name.partition(", ")
        looks[name] = {
            "color": COLOURS[list(methods).index(method)],
            "linestyle": "-" if group == "majority" else "--",
            "marker": "o" if group == "majority" else "s",
            "markersize": 4,
        }
    figure, (axes,) = figure_of()
    curves(axes, series, "test accuracy, %", looks)
    return Part(
        "factorized",
        "WAFFLe by weight factorization: the minority",
        sizes("mnist5k (5,000 images of MNIST), partition multimodal", data),
        "25 clients have images of five digits, and 5 clients of the other five. One "
        "model for all is bad for the minority. WAFFLe has a dictionary of rank-1 "
        "factors, from which each client chooses.",
        "Lines: the mean test accuracy of the majority and of the minority by round, "
        "for two methods.",
        rows(
            ("method", "majority, %", "minority, %"),
            {n: [majority[n][1][-1], minority[n][1][-1]] for n in runs},
        ),
        figure,
        "pflcore reproduce factorized-table1",
    )


def distances() -> Part:
    """Compares exact distances with distances by the expanded square."""
    gaps = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    error: dict[str, list[float]] = {"pflcore": [], "torch.cdist": []}
    start = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    for gap in gaps:
        gen = torch.Generator().manual_seed(1)
        models = start + gap * torch.randn(50, 100_000, generator=gen)
        wide = models.double()
        want = torch.stack([(wide - row).square().sum(1) for row in wide])
        off_diagonal = ~torch.eye(50, dtype=torch.bool)
        squares = {
            "pflcore": pairwise_sqdist(models),
            "torch.cdist": torch.cdist(models, models).double().square(),
        }
        for name, got in squares.items():
            relative = (got - want).abs() / want
            error[name].append(float(relative[off_diagonal].max()))
    figure, (axes,) = figure_of()
    for k, (name, values) in enumerate(error.items()):
        axes.loglog(gaps, values, MARKERS[k] + "-", color=COLOURS[k], label=name)
    axes.legend(fontsize=8, frameon=False)
    axes.axhline(1, color="#999999", linestyle=":")
    label_axes(
        axes,
        "difference between the clients' models, per weight",
        "largest relative error",
    )
    return Part(
        "distances",
        "Exact distances",
        "Data: 50 random models of 100,000 weights of size 1, for each difference.",
        "The closer the clients' models are to each other, the less accurate is their "
        "distance by the expanded square. Above the dotted line no digit is right.",
        "Lines: the largest relative error of a squared distance against the "
        "difference between the models, by pflcore and by torch.cdist.",
        rows(
            ("distances by", *(f"{gap:.0e} apart" for gap in gaps.tolist())),
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
    svg = svg[svg.index("<svg") :]
    label = html.escape(part.alt)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    head, *body = part.table
    table = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    for line in body:
        table += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
    return (
        f"<h2>{html.escape(part.title)}</h2><p>{html.escape(part.look)}</p>"
        f"<figure>{svg}"
        f"<figcaption>{html.escape(part.caption)}</figcaption></figure>"
        f'<div class="table"><table><tr>{table}</table></div>'
        f"<p>Go on with <code>{html.escape(part.command)}</code></p>"
    )


def main() -> None:
    """Plays all parts and writes the page."""
    for word in sys.argv[1:]:
        if not word.isdecimal() or int(word) < MIN_ROUNDS:
            words = f"a number of rounds, at least {MIN_ROUNDS}"
            sys.exit(f"demo: expected {words}, got {word}; the default is all rounds.")
    began = time.monotonic()
    parts = []
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    for part in (partitions, waffle, feddwa, motley, factorized, distances):
        print(f"{part.__name__}: {part.__doc__}", flush=True)
        parts.append(fragment(part()))
    took = f"{time.monotonic() - began:.0f} s, {backend()}"
    PAGE.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>pflcore: what its four systems do</title>"
        f"<style>{STYLE}</style><h1>pflcore: what its four systems do</h1>"
        f"{''.join(parts)}<p>{html.escape(took)}</p></html>\n",
        encoding="utf-8",
    )
    print(f"{took}\nOpen {PAGE.resolve().as_uri()} in a browser.")


if __name__ == "__main__":
    main()

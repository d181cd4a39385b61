"""Pictures of runs, and what every picture is drawn with. matplotlib is imported here,
when a picture is asked for, and never touches a caller's own figures (no pyplot)."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore import metrics
from pflcore.check import import_optional
from pflcore.results._files import atomic_write
from pflcore.results.record import Run, Runs, label_runs, min_num_clients
from pflcore.results.table import split_name

# Okabe and Ito's, distinct for the colour-blind too
LINE_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D31",
)
PICTURE_NAMES = ("weights", "curves", "clients")  # of the files that `draw` makes
MAX_NAMES = 8
LONG_NAME_LETTERS = 32  # in a picture: beyond them names take a place of their own
LEGEND_BELOW_OPTIONS = {"loc": "outside lower left", "fontsize": 8, "frameon": False}
MAX_WEIGHT_CLIENTS = 1000  # clients of a picture of mixing weights


def figure_of(
    width: float, height: float, panels: int = 1, rows: int = 1
) -> tuple[Any, list[Any]]:
    """A figure with so many panels beside each other, in so many rows."""
    figures = import_optional("matplotlib.figure")
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    axes = [*figure.subplots(rows, panels, squeeze=False).flat]
    for axis in axes:
        styles = [style for style in ("-", "--", ":") for _ in LINE_COLOURS]
        axis.set_prop_cycle(color=LINE_COLOURS * 3, linestyle=styles)
    return figure, axes


def save(figure: Any, path: str | Path) -> Path:
    """The picture as PNG, and beside it as SVG."""
    path = Path(path)
    for file in (path, path.with_suffix(".svg")):
        with atomic_write(file) as part:
            figure.savefig(part, dpi=200, format=file.suffix[1:])
    return path


def tidy(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set(xlabel=x, ylabel=y)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)


def lines(
    axis: Any, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], **how: Any
) -> None:
    """Lines (x, y) by their names."""
    for name, (x, y) in series.items():
        marker = "o" if len(x) == 1 else None
        axis.plot(x, y, **{"label": name, "marker": marker, **how})
    axis.legend(fontsize=8, frameon=False)


def _scale(run: Run) -> tuple[float, str]:
    """Factor and name of what the axes show."""
    if run.main_metric == "accuracy":
        return 100.0, f"{split_name(run)} accuracy, %"
    return 1.0, f"{split_name(run)} loss"


def curves(runs: Runs, path: str | Path) -> Path:
    """Accuracy by round, a line per algorithm: mean over clients, and the target's own
    where there is one; a band is ± std over seeds."""
    groups = label_runs(runs)
    scale, unit = _scale(runs[0])
    targets: list[int | None] = [
        None,
        *sorted({r.target for r in runs if r.target is not None}),
    ]
    below = len(groups) > MAX_NAMES or max(map(len, groups)) > LONG_NAME_LETTERS
    tall = 4.2 + 0.2 * len(groups) * below
    figure, axes = figure_of(5.6 * len(targets), tall, len(targets))
    for axis, client in zip(axes, targets, strict=True):
        series = {}
        for name, members in groups.items():
            seeds = [
                dict(zip(*r.curve(client, runs[0].main_metric), strict=True))
                for r in members
            ]
            rounds = sorted({r for s in seeds for r in s})
            at = [[scale * s[r] for s in seeds if r in s] for r in rounds]
            mean, std = (
                np.array([f(v) for v in at]) for f in (metrics.mean, metrics.std)
            )
            series[name] = rounds, mean.tolist()
            with np.errstate(invalid="ignore"):  # an infinite loss has no band
                axis.fill_between(
                    rounds, mean - std, mean + std, alpha=0.18, linewidth=0
                )
        lines(axis, series)
        who = "mean over clients" if client is None else f"client {client}, the target"
        tidy(axis, who, "round", unit)
    if below:  # names in a picture's middle would hide its lines
        for axis in axes:
            axis.get_legend().remove()
        figure.legend(*axes[0].get_legend_handles_labels(), **LEGEND_BELOW_OPTIONS)
    return save(figure, path)


class HeatMap(NamedTuple):
    """A heat map: its title, values [M, N], the numbers of its columns, and what the
    axes are."""

    title: str
    values: Tensor
    columns: Sequence[int]
    x: str = "gives (client)"
    y: str = "receives (model)"


def heat_maps(
    panels: Sequence[HeatMap], path: str | Path, wide: int = 100
) -> Path | None:
    """Heat maps, so many beside each other; None where there is none."""
    if not panels:
        return None
    wide = min(wide, len(panels))
    tall = -(-len(panels) // wide)
    figure, axes = figure_of(5.2 * wide, 4.0 * tall, wide, tall)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (title, values, columns, x, y) in zip(axes, panels, strict=False):
        extent = columns[0] - 0.5, columns[-1] + 0.5, len(values) - 0.5, -0.5
        image = axis.imshow(
            values.numpy(), cmap="Blues", vmin=0, aspect="auto", extent=extent
        )
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=x, ylabel=y)
        figure.colorbar(image, ax=axis, label="weight")
    return save(figure, path)


def weights_by_round(run: Run) -> tuple[list[int], Tensor]:
    """Weights of the run's only model by round, `[T, N]`."""
    rounds, rows = run.weights()
    mine = [
        (r, w) for r, w in zip(rounds, rows, strict=True) if len(w) == len(rows[-1])
    ]
    return [r for r, _ in mine], torch.stack([w for _, w in mine])


def weights(runs: Runs, path: str | Path) -> Path | None:
    """Mixing weights, a heat map for each algorithm that reports them: of one model by
    clients and rounds (WAFFLE, Fig. 3), of several who mixes with whom in the last
    round."""
    panels = []
    for name, (run, *_) in label_runs(runs).items():
        # a matrix for each round may not fit into memory
        for r, last in zip(*run.weights(run.rounds_with_weights()[-1:]), strict=True):
            if last.ndim == 2:
                panels.append(HeatMap(f"{name}, round {r}", last, range(last.shape[1])))
                continue
            rounds, w = weights_by_round(run)
            of = "" if run.target is None else f", target {run.target}"
            panels.append(HeatMap(name + of, w.T, rounds, "round", "client"))
    return heat_maps(panels, path)


def clients(runs: Runs, path: str | Path) -> Path:
    """The clients' values at the last evaluation, a box per algorithm (seeds
    together)."""
    groups = label_runs(runs)
    scale, unit = _scale(runs[0])
    values = [
        torch.cat([scale * r.last_values(runs[0].main_metric) for r in m])
        for m in groups.values()
    ]
    boxes = [v[v.isfinite()].tolist() for v in values]
    long = max(map(len, groups)) > LONG_NAME_LETTERS
    names = [
        textwrap.fill(name, 24, break_long_words=False) if long else name
        for name in groups
    ]
    how = {"fontsize": 7} if long else {"rotation": 20}
    lines_of_names = max(name.count("\n") for name in names)
    figure, (axis,) = figure_of(
        1.6 + (1.6 if long else 1.1) * len(groups), 4 + lines_of_names / 8
    )
    axis.boxplot(boxes, widths=0.5)
    axis.set_xticks(range(1, len(groups) + 1), names, **how)
    tidy(axis, "clients at the last evaluation", "", unit)
    return save(figure, path)


def _count_clients(run: Run) -> int:
    """The number of clients, by the header or, where that is lost, by the weights."""
    n = run.header.get("n")
    return (
        max(min_num_clients(r.get("report") or {}) for r in run.rounds)
        if n is None
        else n
    )


def draw(runs: Runs, folder: str | Path) -> list[Path]:
    """Every picture that the runs have something for, into `folder`; returns the files.
    Mixing weights are drawn of at most 1,000 clients."""
    folder = Path(folder)
    few = [
        r
        for r in runs
        if r.rounds_with_weights() and _count_clients(r) <= MAX_WEIGHT_CLIENTS
    ]
    evaluated = [r for r in runs if r.evaluations]
    made = [weights(few, folder / "weights.png")]
    if evaluated:
        made.append(curves(evaluated, folder / "curves.png"))
        made.append(clients(evaluated, folder / "clients.png"))
    return [p for p in made if p]

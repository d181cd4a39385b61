"""Pictures of runs, and the functions that draw pictures of all kinds.

matplotlib is imported when the first picture is drawn. pyplot is not used, so a
caller's own figures do not change.

Symbols: N clients; M models; T rounds.
"""

from __future__ import annotations

import math
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
from pflcore.results._labels import label_runs
from pflcore.results.record import Run, Runs, min_num_clients
from pflcore.results.table import split_name

# The colours of Okabe and Ito, which colour-blind people can distinguish, too.
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
PICTURE_NAMES = ("weights", "curves", "clients")  # names of the files that `draw` makes
# With more or longer names a legend inside a panel would hide the lines.
MAX_NAMES = 8
LONG_NAME_LETTERS = 32
LEGEND_BELOW_OPTIONS = {"loc": "outside lower left", "fontsize": 8, "frameon": False}
MAX_WEIGHT_CLIENTS = 1000  # clients in a picture of mixing weights


def figure_of(
    width: float, height: float, panels: int = 1, rows: int = 1
) -> tuple[Any, list[Any]]:
    """A figure, and the axes of its panels, row by row.

    Args:
        width: The width in inches.
        height: The height in inches.
        panels: The number of panels in a row.
        rows: The number of rows.
    """
    figures = import_optional("matplotlib.figure")
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    axes = [*figure.subplots(rows, panels, squeeze=False).flat]
    # All colours with solid lines, then all with dashed and all with dotted ones.
    styles = []
    for style in ("-", "--", ":"):
        styles += [style] * len(LINE_COLOURS)
    for axis in axes:
        axis.set_prop_cycle(color=LINE_COLOURS * 3, linestyle=styles)
    return figure, axes


def save(figure: Any, path: str | Path) -> Path:
    """Saves a figure as PNG and SVG; returns the PNG's path."""
    path = Path(path)
    for file in (path, path.with_suffix(".svg")):
        with atomic_write(file) as part:
            figure.savefig(part, dpi=200, format=file.suffix[1:])
    return path


def tidy(axis: Any, title: str, x: str, y: str) -> None:
    """Gives a panel its title, its labels and a light grid."""
    axis.set_title(title, fontsize=10)
    axis.set(xlabel=x, ylabel=y)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)


def lines(
    axis: Any,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    **options: Any,
) -> None:
    """Draws lines, each with its name in the legend.

    Args:
        series: The points (x, y) of each line, by its name.
        options: Options of matplotlib's `plot`, for all lines.
    """
    for name, (x, y) in series.items():
        marker = "o" if len(x) == 1 else None  # a single point makes no line
        style = {"label": name, "marker": marker, **options}
        axis.plot(x, y, **style)
    axis.legend(fontsize=8, frameon=False)


def _scale(run: Run) -> tuple[float, str]:
    """The factor of a run's values in pictures, and their name."""
    if run.main_metric == "accuracy":
        return 100.0, f"{split_name(run)} accuracy, %"
    return 1.0, f"{split_name(run)} loss"


def curves(runs: Runs, path: str | Path) -> Path:
    """Draws the accuracy or loss by round, with one line per algorithm.

    The first panel shows the mean over clients. Each client that is the target of a run
    has a panel of its own. The band around a line is ± the standard deviation over
    seeds.
    """
    groups = label_runs(runs)
    scale, unit = _scale(runs[0])
    targets = sorted({run.target for run in runs if run.target is not None})
    panels = [None, *targets]  # None stands for the mean over clients
    legend_below = len(groups) > MAX_NAMES or max(map(len, groups)) > LONG_NAME_LETTERS
    height = 4.2
    if legend_below:
        height += 0.2 * len(groups)
    figure, axes = figure_of(5.6 * len(panels), height, len(panels))
    for axis, client in zip(axes, panels, strict=True):
        series = {}
        for name, members in groups.items():
            # All lines have the metric and the scale of the first run.
            rounds, mean, std = _seed_curve(members, client, runs[0].main_metric, scale)
            series[name] = rounds, mean.tolist()
            with np.errstate(invalid="ignore"):  # an infinite loss has no band
                low = mean - std
                high = mean + std
            axis.fill_between(rounds, low, high, alpha=0.18, linewidth=0)
        lines(axis, series)
        title = "mean over clients"
        if client is not None:
            title = f"client {client}, the target"
        tidy(axis, title, "round", unit)
    if legend_below:
        for axis in axes:
            axis.get_legend().remove()
        figure.legend(*axes[0].get_legend_handles_labels(), **LEGEND_BELOW_OPTIONS)
    return save(figure, path)


def _seed_curve(
    runs: Runs, client: int | None, metric: str, scale: float
) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The evaluated rounds, with means and deviations over seeds.

    The mean of a round is over the runs that were evaluated in it.
    """
    values: dict[int, list[float]] = {}
    for run in runs:
        rounds, curve = run.curve(client, metric)
        for round, value in zip(rounds, curve, strict=True):
            values.setdefault(round, []).append(scale * value)
    rounds = sorted(values)
    mean = np.array([metrics.mean(values[round]) for round in rounds])
    std = np.array([metrics.std(values[round]) for round in rounds])
    return rounds, mean, std


class HeatMap(NamedTuple):
    """One heat map of a picture.

    Attributes:
        title: The title above the map.
        values: The values [M, N], a row for each line of the map.
        columns: The numbers [N] at the x axis.
        x: The label of the x axis.
        y: The label of the y axis.
    """

    title: str
    values: Tensor  # [M, N]
    columns: Sequence[int]
    x: str = "gives (client)"
    y: str = "receives (model)"


def heat_maps(
    panels: Sequence[HeatMap], path: str | Path, wide: int = 100
) -> Path | None:
    """Draws heat maps, at most `wide` of them in a row.

    Returns the path of the PNG, or None where there are no panels.
    """
    if not panels:
        return None
    wide = min(wide, len(panels))
    tall = math.ceil(len(panels) / wide)
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
    """The rounds of a run with one model, and weights `[T, N]`.

    Rounds with another number of clients than the last round are left out.
    """
    rounds, rows = run.weights()
    kept_rounds = []
    kept_rows = []
    for round, row in zip(rounds, rows, strict=True):
        if len(row) == len(rows[-1]):
            kept_rounds.append(round)
            kept_rows.append(row)
    return kept_rounds, torch.stack(kept_rows)


def weights(runs: Runs, path: str | Path) -> Path | None:
    """Draws a heat map of mixing weights for each algorithm.

    For one model the axes of the map are clients and rounds (WAFFLE, Fig. 3). For
    several models the map shows each client's weight in each model in the last round.
    """
    panels = []
    for name, members in label_runs(runs).items():
        run = members[0]
        # Only the last round is read, because matrices of all may not fit into memory.
        last_rounds, matrices = run.weights(run.rounds_with_weights()[-1:])
        for round, weight in zip(last_rounds, matrices, strict=True):
            if weight.ndim == 2:
                columns = range(weight.shape[1])
                panels.append(HeatMap(f"{name}, round {round}", weight, columns))
                continue
            rounds, by_round = weights_by_round(run)
            target = "" if run.target is None else f", target {run.target}"
            panels.append(HeatMap(name + target, by_round.T, rounds, "round", "client"))
    return heat_maps(panels, path)


def clients(runs: Runs, path: str | Path) -> Path:
    """Draws the clients' last values, with one box per algorithm.

    A box has the clients of all seeds together, without values that are not finite.
    """
    groups = label_runs(runs)
    scale, unit = _scale(runs[0])
    boxes = []
    for members in groups.values():
        by_run = [scale * run.last_values(runs[0].main_metric) for run in members]
        values = torch.cat(by_run)
        boxes.append(values[values.isfinite()].tolist())
    names = list(groups)
    inches_per_box = 1.1
    style: dict[str, int] = {"rotation": 20}
    if max(map(len, names)) > LONG_NAME_LETTERS:
        names = [textwrap.fill(name, 24, break_long_words=False) for name in names]
        inches_per_box = 1.6
        style = {"fontsize": 7}
    line_breaks = max(name.count("\n") for name in names)
    width = 1.6 + inches_per_box * len(names)
    figure, (axis,) = figure_of(width, 4 + line_breaks / 8)
    axis.boxplot(boxes, widths=0.5)
    axis.set_xticks(range(1, len(names) + 1), names, **style)
    tidy(axis, "clients at the last evaluation", "", unit)
    return save(figure, path)


def _count_clients(run: Run) -> int:
    """The number of clients of a run.

    Where the header is lost, it is the smallest number that fits the mixing weights.
    """
    n = run.header.get("n")
    if n is not None:
        return int(n)
    return max(min_num_clients(record.get("report") or {}) for record in run.rounds)


def draw(runs: Runs, folder: str | Path) -> list[Path]:
    """Draws every picture that the runs have values for, into `folder`.

    Returns the paths of the PNG files. Mixing weights are drawn for runs of at most
    1,000 clients.
    """
    folder = Path(folder)
    small = []
    for run in runs:
        if run.rounds_with_weights() and _count_clients(run) <= MAX_WEIGHT_CLIENTS:
            small.append(run)
    evaluated = [run for run in runs if run.evaluations]
    paths = [weights(small, folder / "weights.png")]
    if evaluated:
        paths.append(curves(evaluated, folder / "curves.png"))
        paths.append(clients(evaluated, folder / "clients.png"))
    return [path for path in paths if path]

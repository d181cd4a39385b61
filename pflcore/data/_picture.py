"""The picture of a federation: clients by classes, as dots of an area by the count.

matplotlib is imported when a picture is drawn. pyplot is not used, so a caller's own
figures do not change. Which samples of a federation are drawn is said in `_samples`.

Symbols: N clients, C classes (or bins of targets); n samples of all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pflcore.check import import_optional

MAX_CLIENTS = 200  # with more, a dot is smaller than a point of print
MAX_NAMED_CLIENTS = 50  # with more, names at the axis lie over one another
MAX_TICKS = 20  # with more clients or classes, only some of them get a number
TARGET_BINS = 20
COLOUR = "#0072B2"
INCHES_PER_CLIENT = 0.32
INCHES_PER_CLASS = 0.26
MIN_INCHES = (4.0, 2.2)  # width and height of the dots' panel
MAX_INCHES = (12.0, 9.0)
LEGEND_INCHES = 1.6
LABEL_INCHES = 1.1
POINTS_PER_INCH = 72
# Diameter of the largest dot in widths of a narrow cell, and in those of a wide one.
# Large dots may lie over their neighbours, which shine through.
NARROW_CELLS = 2.0
WIDE_CELLS = 1.2
MAX_DIAMETER = 22  # in points; a larger dot has no place in the legend
ALPHA = 0.75


def draw_counts(
    counts: Tensor,  # [N, C]
    title: str,
    names: Sequence[str | int] | None = None,
    edges: Sequence[float] | None = None,
) -> Any:
    """A matplotlib figure of numbers of samples, clients at the x axis.

    The area of a dot is proportional to the number of samples.

    Args:
        counts: samples of each client, by class or by bin
        title: title of the picture
        names: names of the clients at the x axis; None for their numbers
        edges: the C + 1 edges of the bins, where `counts` are of numbers to predict;
            None where they are of classes
    """
    num_clients, num_rows = counts.shape
    figure, axis = _figure_of(num_clients, num_rows, title)
    axis.set(xlim=(-0.5, num_clients - 0.5), ylim=(-0.5, num_rows - 0.5))
    axis.grid(alpha=0.2, linewidth=0.5)
    axis.set_axisbelow(True)
    _label_clients(axis, num_clients, names)
    if edges is None:
        axis.set_ylabel("class")
        _number(axis.yaxis, num_rows)
    else:
        axis.set_ylabel("target")
        _label_edges(axis, edges)
    _draw_dots(figure, axis, counts)
    return figure


def draw_sizes(
    sizes: Tensor,  # [N]
    title: str,
    names: Sequence[str | int] | None = None,
) -> Any:
    """A matplotlib figure with a bar for each client's number of samples."""
    figure, axis = _figure_of(len(sizes), 8, title)
    axis.bar(range(len(sizes)), sizes.tolist(), color=COLOUR)
    axis.set_ylabel("samples")
    axis.grid(axis="y", alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.set_xlim(-0.5, len(sizes) - 0.5)
    _label_clients(axis, len(sizes), names)
    return figure


def bin_targets(
    targets: Tensor,  # [n]
    owners: Tensor,  # [n], in 0..N-1
    n: int,
) -> tuple[Tensor, list[float]]:  # [N, C], C + 1 edges
    """Numbers of samples of each client, by bins of equal width, and the edges.

    Where all targets are equal, or nearly equal, there is one bin.
    """
    values = targets.double()
    low = float(values.min())
    high = float(values.max())
    num_bins = TARGET_BINS
    # The difference of the largest numbers of float64 would be infinite.
    width = high / num_bins - low / num_bins
    if width == 0:
        num_bins = 1
        width = 1.0
        high = low + width
    bins = (values / width - low / width).long().clamp(0, num_bins - 1)
    cells = owners * num_bins + bins
    counts = torch.bincount(cells, minlength=n * num_bins).view(n, num_bins)
    shares = [k / num_bins for k in range(num_bins + 1)]
    return counts, [low * (1 - share) + high * share for share in shares]


def _figure_of(num_clients: int, num_rows: int, title: str) -> tuple[Any, Any]:
    """A figure whose size follows from the numbers of clients and rows; its axis."""
    figures = import_optional("matplotlib.figure")
    width = min(max(MIN_INCHES[0], INCHES_PER_CLIENT * num_clients), MAX_INCHES[0])
    height = min(max(MIN_INCHES[1], INCHES_PER_CLASS * num_rows), MAX_INCHES[1])
    size = (width + LEGEND_INCHES, height + LABEL_INCHES)
    figure = figures.Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _label_clients(
    axis: Any, num_clients: int, names: Sequence[str | int] | None
) -> None:
    """Labels the x axis with names of clients, or with their numbers."""
    axis.set_xlabel("client")
    if names is not None and num_clients <= MAX_NAMED_CLIENTS:
        labels = [str(name) for name in names[:num_clients]]
        axis.set_xticks(range(num_clients), labels, rotation=90, fontsize=7)
        return
    _number(axis.xaxis, num_clients)


def _number(axis: Any, count: int) -> None:
    """Numbers the ticks of an axis: all of 0..count-1, or some of many."""
    if count <= MAX_TICKS:
        axis.set_ticks(range(count))
        return
    axis.get_major_locator().set_params(integer=True)


def _label_edges(axis: Any, edges: Sequence[float]) -> None:
    """Labels the y axis with round numbers at their places between the edges."""
    ticker = import_optional("matplotlib.ticker")
    low = edges[0]
    width = edges[1] - low
    values = []
    for value in ticker.MaxNLocator(6).tick_values(low, edges[-1]).tolist():
        if low <= value <= edges[-1]:
            values.append(value)
    places = [(value - low) / width - 0.5 for value in values]
    axis.set_yticks(places, [f"{value:g}" for value in values])


def _draw_dots(
    figure: Any,
    axis: Any,
    counts: Tensor,  # [N, C]
) -> None:
    """Draws the dots, and a legend with the numbers that three dots stand for."""
    largest = max(int(counts.max()), 1)
    legend_counts = sorted({largest, max(1, largest // 4), max(1, largest // 16)})
    style = {"color": COLOUR, "alpha": ALPHA, "linewidths": 0}
    handles = [axis.scatter([], [], **style) for _ in legend_counts]
    legend = {
        "title": "samples",
        "loc": "outside right upper",
        "frameon": False,
        "fontsize": 8,
        "title_fontsize": 8,
        "labelspacing": 1.4,
        "handletextpad": 1.0,
    }
    labels = [f"{count:,}" for count in legend_counts]
    figure.legend(handles[::-1], labels[::-1], **legend)
    # The layout decides the size of the panel, and so that of a cell and of its dot.
    figure.draw_without_rendering()
    box = axis.get_window_extent()
    cell = (box.width / counts.shape[0], box.height / counts.shape[1])
    diameter = min(NARROW_CELLS * min(cell), WIDE_CELLS * max(cell))  # in pixels
    diameter = min(diameter * POINTS_PER_INCH / figure.dpi, MAX_DIAMETER)
    clients, rows = counts.nonzero(as_tuple=True)
    # matplotlib takes squares of diameters, which are proportional to areas.
    areas = counts[clients, rows] / largest * diameter**2
    axis.scatter(clients.tolist(), rows.tolist(), s=areas.tolist(), **style)
    dots = figure.legends[0].legend_handles
    for dot, count in zip(dots, legend_counts[::-1], strict=True):
        dot.set_sizes([count / largest * diameter**2])

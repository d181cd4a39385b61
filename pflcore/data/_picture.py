"""The picture of a federation: clients by classes, as dots of an area by the count.

matplotlib is imported when a picture is drawn. pyplot is not used, so a caller's own
figures do not change.

Symbols: N clients, C classes (or bins of targets); n samples of all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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
    figure, axis, cell = _figure_of(num_clients, num_rows, title, names)
    ends = np.arange(num_rows + 1) - 0.5 if edges is None else np.asarray(edges)
    if edges is None:
        axis.set_ylabel("class")
        axis.yaxis.get_major_locator().set_params(integer=True, nbins=MAX_TICKS)
    else:
        axis.set_ylabel("target")
    axis.set_ylim(ends[0], ends[-1])
    axis.grid(alpha=0.2, linewidth=0.5)
    middles = (ends[1:] + ends[:-1]) / 2
    largest = max(int(counts.max()), 1)
    diameter = min(NARROW_CELLS * min(cell), WIDE_CELLS * max(cell), MAX_DIAMETER)
    # matplotlib takes squares of diameters, which are proportional to areas.
    area_of_sample = diameter**2 / largest
    clients, rows = counts.numpy().nonzero()
    dots = axis.scatter(
        clients,
        middles[rows],
        s=counts.numpy()[clients, rows] * area_of_sample,
        color=COLOUR,
        alpha=ALPHA,
        linewidths=0,
    )
    legend_counts = sorted({largest, max(1, largest // 4), max(1, largest // 16)})
    handles, labels = dots.legend_elements(
        "sizes",
        num=legend_counts,
        fmt="{x:,.0f}",
        func=lambda area: area / area_of_sample,
        color=COLOUR,
    )
    style = {"frameon": False, "fontsize": 8, "title_fontsize": 8, "labelspacing": 1.4}
    place = "outside right upper"
    figure.legend(handles[::-1], labels[::-1], title="samples", loc=place, **style)
    return figure


def draw_sizes(
    sizes: Tensor,  # [N]
    title: str,
    names: Sequence[str | int] | None = None,
) -> Any:
    """A matplotlib figure with a bar for each client's number of samples."""
    figure, axis, _ = _figure_of(len(sizes), 8, title, names)
    axis.bar(range(len(sizes)), sizes.tolist(), color=COLOUR)
    axis.set_ylabel("samples")
    axis.grid(axis="y", alpha=0.25, linewidth=0.6)
    return figure


def bin_targets(
    targets: Tensor,  # [n]
    owners: Tensor,  # [n], in 0..N-1
    n: int,
) -> tuple[Tensor, list[float]]:  # [N, C], C + 1 edges
    """Numbers of samples of each client, by bins of equal width, and the edges."""
    bins: Any = [np.arange(n + 1), TARGET_BINS]
    values = targets.double().numpy()
    counts, _, edges = np.histogram2d(owners.numpy(), values, bins)
    return torch.from_numpy(counts).long(), edges.tolist()


def _figure_of(
    num_clients: int, num_rows: int, title: str, names: Sequence[str | int] | None
) -> tuple[Any, Any, tuple[float, float]]:
    """A figure for these numbers of clients and rows, its axis, and a cell's points."""
    figures = import_optional("matplotlib.figure")
    width = min(max(MIN_INCHES[0], INCHES_PER_CLIENT * num_clients), MAX_INCHES[0])
    height = min(max(MIN_INCHES[1], INCHES_PER_CLASS * num_rows), MAX_INCHES[1])
    size = (width + LEGEND_INCHES, height + LABEL_INCHES)
    figure = figures.Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, fontsize=10)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("client")
    axis.set_xlim(-0.5, num_clients - 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=MAX_TICKS)
    if names is not None and num_clients <= MAX_NAMED_CLIENTS:
        labels = [str(name) for name in names[:num_clients]]
        axis.set_xticks(range(num_clients), labels, rotation=90, fontsize=7)
    inches = (width / num_clients, height / num_rows)
    return figure, axis, (inches[0] * POINTS_PER_INCH, inches[1] * POINTS_PER_INCH)

"""Functions that draw pictures of all kinds.

matplotlib is imported when the first picture is drawn. pyplot is not used, so a
caller's own figures do not change.

Symbols: N clients; M models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pflcore.check import import_optional
from pflcore.simulation._files import atomic_write

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
# Dashes and markers tell lines apart without colours.
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FORMATS = (".png", ".svg", ".pdf")  # the files of one picture
# Letters of a PDF as letters of TrueType, which publishers accept.
PDF_OPTIONS = {"pdf.fonttype": 42}


class LineStyle(NamedTuple):
    """The look of a line, by the names of matplotlib's options.

    Attributes:
        color: The colour.
        linestyle: The dashes.
        marker: The shape of its points.
        markersize: The size of its points.
    """

    color: str
    linestyle: Any
    marker: str
    markersize: float = 4.0


def line_styles(count: int) -> list[LineStyle]:
    """Styles of lines that can be told apart, also in black and white."""
    styles = []
    for i in range(count):
        # The numbers of colours, dashes and markers have no common factor, so pairs of
        # them repeat late.
        colour = LINE_COLOURS[i % len(LINE_COLOURS)]
        dashes = DASHES[i % len(DASHES)]
        styles.append(LineStyle(colour, dashes, MARKERS[i % len(MARKERS)]))
    return styles


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
    styles = line_styles(len(LINE_COLOURS) * len(DASHES))
    for axis in axes:
        axis.set_prop_cycle(
            color=[style.color for style in styles],
            linestyle=[style.linestyle for style in styles],
        )
    return figure, axes


def save(figure: Any, path: str | Path) -> Path:
    """Saves a figure as PNG, SVG and PDF; returns the PNG's path."""
    path = Path(path)
    for suffix in FORMATS:
        with atomic_write(path.with_suffix(suffix)) as part:
            write_figure(figure, part, suffix)
    return path


def write_figure(figure: Any, part: Path, suffix: str) -> None:
    """Writes a figure into a file in the form of a suffix, one of `FORMATS`."""
    with import_optional("matplotlib").rc_context(PDF_OPTIONS):
        figure.savefig(part, dpi=200, format=suffix[1:])


def plain_ticks(axis: Any) -> None:
    """Marks 1, 2 and 5 times powers of ten on a logarithmic axis, in full digits."""
    ticker = import_optional("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def round_ticks(axis: Any) -> None:
    """Marks whole numbers alone on the axis of rounds or clients."""
    ticker = import_optional("matplotlib.ticker")
    axis.set_major_locator(ticker.MaxNLocator(integer=True))


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
        round_ticks(axis.xaxis)
        round_ticks(axis.yaxis)
        figure.colorbar(image, ax=axis, label="weight")
    return save(figure, path)

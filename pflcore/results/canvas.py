"""What every picture is drawn with. matplotlib is imported here, when a picture is asked for, and
never touches a caller's own figures (no pyplot)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore.results import optional

# Okabe and Ito's, distinct for the colour-blind too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
STYLES = ("-", "--", "-.", ":")
# of a name beside its line
OFFSET: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "fontsize": 8}
MOST = 1000  # clients of a picture of mixing weights


def look(i: int) -> dict[str, str]:
    """Colour and style of the i-th line."""
    style = STYLES[i // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": style}


def figure_of(width: float, height: float, panels: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure with so many panels beside each other, in so many rows."""
    figures = optional("matplotlib.figure", "'pflcore[plot]'")
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    return figure, [*figure.subplots(rows, panels, squeeze=False).flat]


def save(figure: Any, path: str | Path) -> Path:
    """The picture as PNG, and beside it as SVG."""
    path = Path(path)
    for file in (path, path.with_suffix(".svg")):
        figure.savefig(file, dpi=200)
    return path


def tidy(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set(xlabel=x, ylabel=y)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)


def lines(
    axis: Any, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], **how: Any
) -> None:
    """Lines (x, y), each with its name in its colour where it ends; names do not overlap."""
    for i, (x, y) in enumerate(series.values()):
        marker = "o" if len(x) == 1 else None
        axis.plot(x, y, **{"linewidth": 1.6, "marker": marker, **look(i), **how})
    low, high = axis.get_ylim()
    gap = 0.05 * (high - low)
    top = high + gap
    ends = [(y[-1], x[-1], i, k) for i, (k, (x, y)) in enumerate(series.items()) if len(x)]
    for end, right, i, name in sorted(ends, key=lambda place: -place[0]):
        top = min(top - gap, end)
        axis.annotate(name, (right, top), (6, -3), color=look(i)["color"], **OFFSET)


def client_ticks(axis: Any, ids: Tensor) -> None:
    step = -(-len(ids) // 20) or 1
    axis.set_ticks(range(0, len(ids), step), map(str, ids[::step].tolist()), fontsize=7)

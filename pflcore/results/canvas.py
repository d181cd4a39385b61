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
    figure.savefig(path, dpi=200)
    figure.savefig(path.with_suffix(".svg"), dpi=200)
    return path


def tidy(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
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
    gap, top = 0.05 * (high - low), high + 0.05 * (high - low)
    names = list(series)
    ends = {name: (x[-1], y[-1]) for name, (x, y) in series.items() if len(x)}
    for name, (right, end) in sorted(ends.items(), key=lambda item: -item[1][1]):
        top = min(top - gap, end)
        colour = look(names.index(name))["color"]
        axis.annotate(name, (right, top), (6, -3), color=colour, **OFFSET)


def client_ticks(axis: Any, ids: Tensor) -> None:
    step = max(1, -(-len(ids) // 20))
    axis.set_ticks(
        list(range(0, len(ids), step)), [str(i) for i in ids[::step].tolist()], fontsize=7
    )

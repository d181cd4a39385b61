"""The pictures of Motley's sections 4 and 5: clients in boxes, gains by size, and what has to be
weighed against what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore import metrics
from pflcore.results.canvas import COLOURS, figure_of, lines, save, tidy


def _values(v: Tensor) -> list[float]:
    return [float(x) for x in v[~v.isnan()]]


def boxes(groups: Mapping[str, Tensor], path: str | Path, unit: str) -> Path:
    """A box per method over its clients, whiskers to the extremes within 1.5 quartile distances
    (Fig. 2)."""
    figure, (axis,) = figure_of(1.6 + 1.1 * len(groups), 4.0)
    axis.boxplot(
        [_values(v) for v in groups.values()],
        widths=0.5,
        medianprops={"color": COLOURS[1]},
        flierprops={"markersize": 3},
    )
    axis.set_xticks(range(1, len(groups) + 1), list(groups), rotation=20, ha="right", fontsize=8)
    tidy(axis, "clients", "", f"test {unit}")
    return save(figure, path)


def deltas(
    size: Tensor, groups: Mapping[str, Tensor], path: str | Path, unit: str, better: str = "up"
) -> Path:
    """Each client's change against the number of samples it personalizes with, a panel per method
    (Fig. 3b, c)."""
    figure, axes = figure_of(3.6 * len(groups), 3.4, len(groups))
    for axis, (name, delta) in zip(axes, groups.items(), strict=True):
        keep = ~delta.isnan()
        worse = delta < 0 if better == "up" else delta > 0
        for flag, colour in ((False, COLOURS[0]), (True, COLOURS[1])):
            at = keep & (worse == flag)
            axis.plot(
                size[at].tolist(),
                delta[at].tolist(),
                "o",
                markersize=4,
                alpha=0.7,
                color=colour,
                label="hurt" if flag else None,
            )
        axis.axhline(0, color="0.4", linewidth=0.8)
        tidy(
            axis,
            f"{name}: {100 * (worse & keep).sum().item() / max(1, int(keep.sum())):.0f} % hurt",
            "samples of the client",
            f"change of {unit}",
        )
    return save(figure, path)


def option(
    points: Sequence[tuple[Any, float, float]],
    path: str | Path,
    name: str,
    unit: str,
    log: bool = False,
) -> Path:
    """Mean over clients and percent hurt by an option's value: they need not agree on the best one
    (Fig. 4c, 7a, b)."""
    figure, (axis,) = figure_of(4.8, 3.6)
    x, mean, hurt = ([float(p[i]) for p in points] for i in range(3))
    (left,) = axis.plot(x, mean, "o-", color=COLOURS[0], label=unit)
    other = axis.twinx()
    (right,) = other.plot(x, hurt, "s--", color=COLOURS[1], label="% hurt")
    other.set_ylabel("clients hurt, %")
    other.set_ylim(bottom=0)
    if log:
        axis.set_xscale("log")
    axis.legend(handles=[left, right], fontsize=8, frameon=False)
    tidy(axis, "", name, f"mean {unit}")
    return save(figure, path)


def distributions(
    series: Mapping[str, Sequence[tuple[Any, float, float]]], path: str | Path, unit: str
) -> Path:
    """In- against out-of-distribution results, a line per method with its option's values along it
    (Fig. 5)."""
    figure, (axis,) = figure_of(5.4, 4.4)
    pairs = {
        name: ([p[2] for p in points], [p[1] for p in points]) for name, points in series.items()
    }
    lines(axis, pairs, marker="o", markersize=4)
    for points in series.values():
        for label, x, y in points if len(points) > 1 else ():
            axis.annotate(
                f"{label:g}" if isinstance(label, float | int) else str(label),
                (y, x),
                fontsize=6,
                xytext=(3, 2),
                textcoords="offset points",
            )
    tidy(
        axis,
        "clients' own distribution against everybody's",
        f"{unit} out of distribution",
        f"{unit} in distribution",
    )
    return save(figure, path)


def sizes(series: Mapping[str, Mapping[float, Tensor]], path: str | Path, unit: str) -> Path:
    """Mean over clients by the part of the personalization set that is used (Fig. 7c)."""
    figure, (axis,) = figure_of(4.8, 3.6)
    parts = {name: sorted(by) for name, by in series.items()}
    means = {
        n: ([100 * p for p in ps], [metrics.mean(series[n][p]) for p in ps])
        for n, ps in parts.items()
    }
    lines(axis, means, marker="o", markersize=4)
    tidy(axis, "", "personalization set used, %", f"mean {unit}")
    return save(figure, path)


def cost(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: str | Path, unit: str
) -> Path:
    """Mean over clients by what was sent so far (Fig. 6b, c)."""
    figure, (axis,) = figure_of(5.4, 4.0)
    lines(
        axis,
        {name: ([s / 2**20 for s in sent], mean) for name, (sent, mean) in series.items()},
        marker="o",
        markersize=3,
    )
    tidy(axis, "", "sent down and up by all clients, MiB", f"mean {unit}")
    return save(figure, path)
